// x W^T where W is codes: x is rounded to 16-bit integers, 32 columns with one scale, and these are multiplied by the
// codes in integers, whose sum over 32 columns (or 16, of H8 and X8) is scaled in 32-bit floats:
//
//   x = scale_x * n, |n| <= 32767, rounded to the nearest          half of 2^-15 of the largest of 32 at most is lost
//   sum of x w = scale_x * (scale_w * sum of n * code) + offset_w * (scale_x * sum of n)
//
// The largest sum is 32 * 32767 * 128 < 2^27, so nothing overflows; the sum of n alone is below 2^24, a float without
// rounding. Integers have no order, and the groups of a row are added first to last. So the bits of a product depend on its
// row of x and its row of W alone: not on the other rows, the number of threads, or the processor.

#include "integers.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "crew.h"
#include "ints.h"

namespace headrace {

constexpr int MOST = 32767;
constexpr int64_t SHARED_ROWS = 32;  // fewer are rounded before another thread could take a part
constexpr int PAIRS = GROUP / 2;
constexpr int SPAN = VECTORS / TILE_VECTORS;  // a tile has every SPAN-th vector of a panel
static_assert((int64_t)GROUP * MOST * 128 < (int64_t)1 << 31, "sums of products with 8-bit codes fit 32 bits");
static_assert(GROUP * MOST < 1 << 24, "sums of integers are floats without rounding");

// 32 values -> integers, and their four factors. What is no number, or infinite, makes the scale none.
static void round_group(const float *x, int16_t *codes, float *factors) {
  uint32_t bits[GROUP], most = 0;
  std::memcpy(bits, x, sizeof bits);
  for (int i = 0; i < GROUP; ++i) most = std::max(most, bits[i] & 0x7fffffffu);
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  const bool is_finite = most < 0x7f800000u;
  if (!is_finite || largest < 0x1p-100f) {  // below, 1 / scale would overflow
    std::memset(codes, 0, GROUP * sizeof *codes);
    factors[0] = is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    factors[1] = factors[2] = factors[3] = factors[0];
    return;
  }
  const Floats inverse = every((float)MOST / largest);
  for (int i = 0; i < GROUP; i += LANES) to_int16(codes + i, whole(mul(load(x + i), inverse)));
  int32_t first = 0, last = 0;
  for (int i = 0; i < GROUP / 2; ++i) first += codes[i];
  for (int i = GROUP / 2; i < GROUP; ++i) last += codes[i];
  const float scale = largest / (float)MOST;
  factors[0] = scale;
  factors[1] = scale * (float)(first + last);
  factors[2] = scale * (float)first;
  factors[3] = scale * (float)last;
}

WholeRows round_rows(const float *x, int64_t rows, int64_t columns, int threads) {
  static thread_local std::vector<int16_t> codes;
  static thread_local std::vector<float> factors;
  codes.resize(std::max<size_t>(codes.size(), rows * columns));
  factors.resize(std::max<size_t>(factors.size(), rows * columns / GROUP * 4));
  int16_t *to = codes.data();
  float *beside = factors.data();
  each_row(rows, rows < SHARED_ROWS ? 1 : threads, [=](int64_t r) {
    for (int64_t g = 0; g < columns / GROUP; ++g)
      round_group(x + r * columns + g * GROUP, to + (g * rows + r) * GROUP, beside + (g * rows + r) * 4);
  });
  return {to, beside, rows};
}

inline Ints pair_at(const int16_t *codes) {
  return every((int32_t)((uint32_t)(uint16_t)codes[0] | (uint32_t)(uint16_t)codes[1] << 16));
}

// Two columns of codes as pairs, of one tile's vectors.
template <int KIND>
static inline void widen_pair(const uint8_t *column, int tile, Ints (&w)[TILE_VECTORS]) {
  const uint8_t *next = column + code_bytes(KIND);
  if (KIND == Q4) {
    for (int j = 0; j < TILE_VECTORS / 2; ++j) {
      const int at = (tile + j * SPAN) * LANES;
      pairs_of_int4(column + at, next + at, w[j], w[j + TILE_VECTORS / 2]);
    }
  } else {
    for (int j = 0; j < TILE_VECTORS; ++j) {
      const int at = (tile + j * SPAN) * LANES;
      w[j] = pairs_of_int8((const int8_t *)column + at, (const int8_t *)next + at);
    }
  }
}

// One part of 32 columns: ROWS rows by the vectors of one tile.
template <int ROWS, int KIND, bool DOTS, typename Widen>
static inline void tile_of(const int16_t *x, const float *factors, const float *by, int part, int tile, float *sums,
                           Widen widen) {
  constexpr int COUNT = PAIRS / parts_of(KIND);
  Ints total[ROWS][TILE_VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < TILE_VECTORS; ++j) total[r][j] = no_ints();
  for (int k = part * COUNT; k < (part + 1) * COUNT; ++k) {
    Ints w[TILE_VECTORS];
    widen(k, w);
    for (int r = 0; r < ROWS; ++r) {
      const Ints pair = pair_at(x + r * GROUP + 2 * k);
      for (int j = 0; j < TILE_VECTORS; ++j) total[r][j] = add_products<DOTS>(total[r][j], w[j], pair);
    }
  }
  by += part * part_floats(KIND);
  for (int j = 0; j < TILE_VECTORS; ++j) {
    const int column = (tile + j * SPAN) * LANES;
    const Floats scale = load(by + column), offset = has_offsets(KIND) ? load(by + PANEL + column) : scale;
    for (int r = 0; r < ROWS; ++r) {
      const float *of = factors + r * 4;
      float *at = sums + r * PANEL + column;
      Floats sum = fma(mul(to_floats(total[r][j]), scale), every(of[0]), load(at));
      if (has_offsets(KIND)) sum = fma(offset, every(of[parts_of(KIND) == 1 ? 1 : 2 + part]), sum);
      store(at, sum);
    }
    // One vector after the other: mixed, they need more registers than there are.
    __asm__ volatile("" ::: "memory");
  }
}

// ROWS rows by 32 columns, from codes, or from pairs [16][64] made of them before.
template <int ROWS, int KIND, bool DOTS>
static void rows_of(const int16_t *x, const float *factors, const uint8_t *group, const int32_t *pairs, float *sums) {
  const float *by = (const float *)group;
  const uint8_t *codes = (const uint8_t *)(by + parts_of(KIND) * part_floats(KIND));
  for (int part = 0; part < parts_of(KIND); ++part)
    for (int tile = 0; tile < SPAN; ++tile) {
      if (pairs)
        tile_of<ROWS, KIND, DOTS>(x, factors, by, part, tile, sums, [=](int k, Ints(&w)[TILE_VECTORS]) {
          for (int j = 0; j < TILE_VECTORS; ++j) w[j] = load(pairs + k * PANEL + (tile + j * SPAN) * LANES);
        });
      else
        tile_of<ROWS, KIND, DOTS>(x, factors, by, part, tile, sums, [=](int k, Ints(&w)[TILE_VECTORS]) {
          for (int64_t at = k * group_bytes(KIND) / PAIRS; at < (k + 1) * group_bytes(KIND) / PAIRS; at += 64)
            fetch(group + AHEAD + at);
          widen_pair<KIND>(codes + 2 * k * code_bytes(KIND), tile, w);
        });
    }
}

template <int KIND, bool DOTS>
static void some_rows(int rows, const int16_t *x, const float *factors, const uint8_t *group, const int32_t *pairs,
                      float *sums) {
  switch (rows) {
    case 1: return rows_of<1, KIND, DOTS>(x, factors, group, pairs, sums);
    case 2: return rows_of<2, KIND, DOTS>(x, factors, group, pairs, sums);
    case 3: return rows_of<3, KIND, DOTS>(x, factors, group, pairs, sums);
#if defined(__AVX512F__)
    case 4: return rows_of<4, KIND, DOTS>(x, factors, group, pairs, sums);
    case 5: return rows_of<5, KIND, DOTS>(x, factors, group, pairs, sums);
    default: return rows_of<6, KIND, DOTS>(x, factors, group, pairs, sums);
#endif
  }
}

// 32 columns of codes as pairs [16][64].
template <int KIND>
static void widen_group(const uint8_t *group, int32_t *pairs) {
  const uint8_t *codes = group + parts_of(KIND) * part_floats(KIND) * sizeof(float);
  for (int k = 0; k < PAIRS; ++k)
    for (int tile = 0; tile < SPAN; ++tile) {
      Ints w[TILE_VECTORS];
      widen_pair<KIND>(codes + 2 * k * code_bytes(KIND), tile, w);
      for (int j = 0; j < TILE_VECTORS; ++j) store(pairs + k * PANEL + (tile + j * SPAN) * LANES, w[j]);
    }
  for (int64_t at = 0; at < group_bytes(KIND); at += 64) fetch(group + AHEAD + at);
}

template <int KIND, bool DOTS>
static void multiply_codes(const WholeRows &x, int64_t rows, int64_t groups, const uint8_t *panel, float *sums) {
  alignas(64) int32_t buffer[PAIRS * PANEL];
  for (int64_t g = 0; g < groups; ++g, panel += group_bytes(KIND)) {
    const int16_t *codes = x.codes + g * x.rows * GROUP;
    const float *factors = x.factors + g * x.rows * 4;
    // Few rows: codes are multiplied where they are widened. More go in tiles of nearly the same height.
    const bool is_few = rows <= TILE_ROWS;
    if (!is_few) widen_group<KIND>(panel, buffer);
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, some = 0;
    for (int64_t r = 0; r < rows; r += some, --tiles) {
      some = (rows - r + tiles - 1) / tiles;
      some_rows<KIND, DOTS>((int)some, codes + r * GROUP, factors + r * 4, panel, is_few ? nullptr : buffer,
                            sums + r * PANEL);
    }
  }
}

template <int KIND>
static void multiply_codes(const WholeRows &x, int64_t rows, int64_t groups, const uint8_t *panel, bool dots,
                           float *sums) {
  if (dots)
    multiply_codes<KIND, true>(x, rows, groups, panel, sums);
  else
    multiply_codes<KIND, false>(x, rows, groups, panel, sums);
}

void multiply_whole(int kind, const WholeRows &x, int64_t rows, int64_t columns, const uint8_t *panel, bool dots,
                    float *sums) {
  const int64_t groups = columns / GROUP;
  switch (kind) {
    case Q4: return multiply_codes<Q4>(x, rows, groups, panel, dots, sums);
    case Q8: return multiply_codes<Q8>(x, rows, groups, panel, dots, sums);
    case A8: return multiply_codes<A8>(x, rows, groups, panel, dots, sums);
    case H8: return multiply_codes<H8>(x, rows, groups, panel, dots, sums);
    default: return multiply_codes<X8>(x, rows, groups, panel, dots, sums);
  }
}

bool has_dots() {
#if defined(__AVX512F__)
  static const bool found = __builtin_cpu_supports("avx512vnni");
#elif defined(__AVX2__)
  // Not one of the names that __builtin_cpu_supports knows in every compiler.
  static const bool found = [] {
    unsigned a = 7, b = 0, c = 1, d = 0;
    if (__builtin_cpu_supports("avx2")) __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return (a >> 4 & 1) != 0;
  }();
#else
  static const bool found = false;
#endif
  return found;
}

}  // namespace headrace
