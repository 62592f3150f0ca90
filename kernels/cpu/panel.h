// How weights lie in panels; `kernels/panels.py` writes them.
//
// A panel is 64 rows of W, column after column: whoever reads a panel reads memory in order. Weights are kept as small as
// they can be without loss:
//
//   F32   [columns][64] float
//   BF16  [columns][64] bfloat16
//   Q4    per 32 columns: scales [64], offsets [64] float, codes [8][32][4] bytes    w = scale * code + offset
//         four columns lie together; byte j of a column: rows j (low half) and j + 32 (high half) of the panel
//   Q8    per 32 columns: scales [64] float, codes [8][64][4] int8                   w = scale * code
//   A8    as Q8, with offsets [64] behind the scales                                 w = scale * code + offset
//   H8    as Q8, with scales of columns 0 to 15, and of 16 to 31                     w = scale * code
//   X8    as A8, with scales and offsets of columns 0 to 15, and of 16 to 31         w = scale * code + offset
//   F8    as Q8, of 8-bit floats (E4M3), codes [32][64]                              w = scale * value of the code
#pragma once

#include <cstdint>

#include "vector.h"

namespace headrace {

constexpr int PANEL = 64;
constexpr int GROUP = 32;
constexpr int VECTORS = PANEL / LANES;

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#else
constexpr int TILE_ROWS = 3, TILE_VECTORS = 2;
#endif

constexpr int AHEAD = 4096;  // bytes; memory is asked for this much before its turn, past the ends of pages

inline void fetch(const void *at) { __builtin_prefetch(at, 0, 3); }

enum Kind { F32 = 0, BF16 = 1, Q8 = 2, Q4 = 3, A8 = 4, H8 = 5, X8 = 6, F8 = 7 };

// Codes that are whole numbers; those of F8 are not.
constexpr bool is_whole(int kind) { return kind == Q4 || kind == Q8 || kind == A8 || kind == H8 || kind == X8; }

constexpr bool has_offsets(int kind) { return kind == Q4 || kind == A8 || kind == X8; }
constexpr int parts_of(int kind) { return kind == H8 || kind == X8 ? 2 : 1; }
constexpr int code_bytes(int kind) { return kind == Q4 ? PANEL / 2 : PANEL; }  // of a column
constexpr int part_floats(int kind) { return has_offsets(kind) ? 2 * PANEL : PANEL; }
constexpr int64_t group_bytes(int kind) { return parts_of(kind) * part_floats(kind) * 4 + GROUP * code_bytes(kind); }

}  // namespace headrace
