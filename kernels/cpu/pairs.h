// Fewer products of bytes, where a processor adds bytes beside multiplying them: AMD's with AVX-512 begin two products and
// two sums in a cycle. Intel's begin two of either, so they multiply as integers.cpp says, with the same bits.
//
// The product of two pairs takes one multiplication (S. Winograd, "A new algorithm for inner product", 1968):
//
//   (a + w)(b + v) = a v + b w + a b + v w         a, b: terms of two columns of x; v, w: the 4-bit codes of these columns
//
// a b is the same for all rows of W, v w for all rows of x. The columns are those of two quads, one after the other. Bytes
// without a sign are a + (w + 128), with one b + v, so |a|, |b| <= 112: the highest term and the lowest are multiplied so,
// the middle one as ever, which shares the processor's work best. Sums are exact modulo 2^32, and what is left of them fits.
#pragma once

#include "integers.h"
#include "ints.h"
#include "panel.h"

namespace headrace {

constexpr int HIGH_BITS = 15, LOW_BITS = 7;  // of the terms of 23 bits

#if defined(__AVX512F__)

inline bool has_pairs() {
  static const bool found = multiplies_bytes() && __builtin_cpu_is("amd");
  return found;
}

// What the lowest term of 32 columns begins with: what only x decides of the products of all three, negative.
inline int32_t start_of_pairs(const uint8_t *terms) {
  const __m256i sign = _mm256_set1_epi8((char)0x80);
  const auto second = [=](int term) { return _mm256_srli_epi64(_mm256_loadu_si256((const __m256i *)terms + term), 32); };
  const auto pairs = [=](__m256i first, __m256i second) {
    __m256i sum = _mm256_setzero_si256();
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(_mm256_xor_si256(first, sign)), "v"(second));
    return sum;
  };
  const __m256i high = pairs(_mm256_loadu_si256((const __m256i *)terms), second(0));
  const __m256i middle = pairs(_mm256_setzero_si256(), second(1));
  const __m256i low = pairs(_mm256_loadu_si256((const __m256i *)terms + 2), second(2));
  const __m256i all = _mm256_add_epi32(
      _mm256_add_epi32(_mm256_slli_epi32(high, HIGH_BITS), _mm256_slli_epi32(middle, LOW_BITS)), low);
  // By hand: _mm512_reduce_add_epi32 ends in an addition of two ints, which must not overflow.
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_sub_epi32(_mm_setzero_si128(), sum));  // the second and fourth are zeros
}

// Quads [8][64][4] of 4-bit codes: add 128 to each second one, and write behind them [64] what only W decides of the
// products of the highest and the lowest term.
inline void make_pairs(uint8_t *quads) {
  for (int j = 0; j < VECTORS; ++j) {
    Ints total = every(0);
    for (int q = 0; q < GROUP / 4; q += 2) {
      uint8_t *at = quads + (q * VECTORS + j) * LANES * 4;
      const Ints raised = differing(load_ints(at + PANEL * 4), every((int32_t)0x80808080));
      total = add_bytes(total, raised, load_ints(at));
      store(at + PANEL * 4, raised);
    }
    store(quads + GROUP * PANEL + j * LANES * 4, add(left<HIGH_BITS>(total), total));
  }
}

inline Ints four_columns(const uint8_t *terms) {
  int32_t found;
  std::memcpy(&found, terms, sizeof found);
  return every(found);
}

// Add the products of ROWS rows with 32 columns to sums [ROWS][64]: each (VECTORS / COUNT)-th vector of the panel.
template <int ROWS, int COUNT>
inline void multiply_pairs(const uint8_t *x, const Beside *beside, const float *by, const uint8_t *quads, int vector,
                           float *sums) {
  constexpr int SPAN = VECTORS / COUNT;
  Ints high[ROWS][COUNT], middle[ROWS][COUNT], low[ROWS][COUNT];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; ++j) {
      high[r][j] = middle[r][j] = every(0);
      low[r][j] = every(beside[r].starts[0][0]);
    }
  for (int q = 0; q < GROUP / 4; q += 2) {
    Ints v[COUNT], w[COUNT];
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; ++j) {
      v[j] = load_ints(quads + (q * VECTORS + vector + j * SPAN) * LANES * 4);
      w[j] = load_ints(quads + ((q + 1) * VECTORS + vector + j * SPAN) * LANES * 4);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const uint8_t *at = x + r * 3 * GROUP + 4 * q;
      const auto add_pairs = [&](Ints(&total)[COUNT], const uint8_t *term) {
        const Ints a = four_columns(term), b = four_columns(term + 4);
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; ++j)
          total[j] = add_bytes(total[j], sums_of_bytes(w[j], a), sums_of_bytes(v[j], b));
      };
      add_pairs(high[r], at);
      const Ints a = four_columns(at + GROUP), b = four_columns(at + GROUP + 4);
#pragma GCC unroll 8
      for (int j = 0; j < COUNT; ++j) middle[r][j] = add_bytes(add_bytes(middle[r][j], v[j], a), w[j], b);
      add_pairs(low[r], at + 2 * GROUP);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < COUNT; ++j) {
    const int column = (vector + j * SPAN) * LANES;
    const Ints of_codes = load_ints(quads + GROUP * PANEL + column * sizeof(int32_t));
    const Floats scale = load(by + column), offset = load(by + PANEL + column);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Ints more = add(left<HIGH_BITS>(high[r][j]), left<LOW_BITS>(middle[r][j]));
      const Floats total = to_floats(add(more, less(low[r][j], of_codes)));
      float *at = sums + r * PANEL + column;
      store(at, fma(offset, every(beside[r].sums[0]), fma(mul(total, scale), every(beside[r].scale), load(at))));
    }
  }
}

#else

constexpr bool has_pairs() { return false; }
inline int32_t start_of_pairs(const uint8_t *) { return 0; }
inline void make_pairs(uint8_t *) {}
template <int ROWS, int COUNT>
inline void multiply_pairs(const uint8_t *, const Beside *, const float *, const uint8_t *, int, float *) {}

#endif

}  // namespace headrace
