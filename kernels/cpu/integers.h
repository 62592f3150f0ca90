// Products of rows of 16-bit integers with weights in panels of codes.
#pragma once

#include <cstdint>

#include "panel.h"

namespace headrace {

// Codes that are whole numbers; those of F8 are not.
constexpr bool is_whole(int kind) { return kind == Q4 || kind == Q8 || kind == A8 || kind == H8 || kind == X8; }

// Rows of x as 16-bit integers: `codes` [groups of 32 columns][rows][32], and for each 32 of them four `factors`: the
// scale, and the scale times the sum of all 32, of the first 16, and of the last 16.
struct WholeRows {
  const int16_t *codes;
  const float *factors;
  int64_t rows;

  WholeRows from(int64_t row) const { return {codes + row * GROUP, factors + row * 4, rows}; }
};

// x [rows, columns]. What is returned is this thread's, until it calls again.
WholeRows round_rows(const float *x, int64_t rows, int64_t columns, int threads);

// Add the products of the first `rows` of x with a panel to sums [rows][64]. `dots`: with the processor's instruction for it.
void multiply_whole(int kind, const WholeRows &x, int64_t rows, int64_t columns, const uint8_t *panel, bool dots,
                    float *sums);

// Whether this processor multiplies 16-bit integers and adds them up in one instruction.
bool has_dots();

}  // namespace headrace
