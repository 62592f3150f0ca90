// Products of rows of integers of 16 or 23 bits with weights in panels of codes.
#pragma once

#include <cstdint>

#include "panel.h"

namespace headrace {

// How a product with codes is computed; the numbers are those that callers of the library have. The second two are without
// the processor's instruction for products of bytes, with the same bits.
enum Arithmetic { FLOATS = 0, BITS_16 = 1, BITS_23 = 2, BITS_16_BY_WORDS = 3, BITS_23_BY_WORDS = 4 };

// What goes with the 32 integers of a row: their scale; and for each part of the columns the scale times their sum, and
// with what the sums of products with 8-bit codes begin, term by term; with 4-bit codes, in pairs, starts[0][0] (pairs.h).
struct Beside {
  float scale, sums[2];
  int32_t starts[2][3];
};

// Rows of x as integers, [groups of 32 columns][rows], in terms of bytes or words (integers.cpp).
struct WholeRows {
  const uint8_t *terms;
  const Beside *beside;
  int64_t rows;
  int term_bytes;  // of 32 columns

  WholeRows from(int64_t row) const { return {terms + row * term_bytes, beside + row, rows, term_bytes}; }
};

// x [rows, columns], for codes of a kind. What is returned is this thread's, until it calls again.
WholeRows round_rows(const float *x, int64_t rows, int64_t columns, int kind, int arithmetic, int threads);

// Add the products of the first `rows` of x with a panel to sums [rows][64].
void multiply_whole(int kind, const WholeRows &x, int64_t rows, int64_t columns, const uint8_t *panel, int arithmetic,
                    float *sums);

// The same arithmetic by words, where this processor does not multiply bytes and add them up in one instruction.
int possible(int arithmetic);

}  // namespace headrace
