// Fewer products of bytes, where a processor adds bytes beside multiplying them: AMD's with AVX-512 begin two products and
// two sums in a cycle. Intel's begin two of either, so they multiply as integers.cpp says, with the same bits.
//
// The product of two pairs takes one multiplication (S. Winograd, "A new algorithm for inner product", 1968):
//
//   (a + w)(b + v) = a v + b w + a b + v w         a, b: terms of two columns of x; v, w: the 4-bit codes of these columns
//
// a b is the same for all rows of W, v w for all rows of x. The columns are those of two quads, one after the other. Bytes
// without a sign are a + (w + 128), with one b + v, so |a|, |b| <= 112: the highest term and the middle one are multiplied
// so, the lowest as ever, which shares the processor's work best. Sums are exact modulo 2^32, and what is left of them fits.
#pragma once

#include "integers.h"
#include "ints.h"
#include "panel.h"

namespace headrace {

// n = 2^HIGH_BITS h + 2^LOW_BITS m + l, of 4-bit codes.
constexpr int HIGH_BITS = 15, LOW_BITS = 8, MIDDLE_BITS = HIGH_BITS - LOW_BITS;

#if defined(__AVX512F__)

inline bool has_pairs() {
  static const bool found = multiplies_bytes() && __builtin_cpu_is("amd");
  return found;
}

// What the lowest term of 32 columns begins with: what only x decides of the products of all three, negative. Of n and
// its two highest terms, sixteen columns at a time:
//
//   2^15 sum of (h + 128) h' + 2^8 sum of (m + 128) m' + sum of 128 l' = sum of 2^15 h h' + 2^8 m m' + 2^7 n'
inline int32_t start_of_pairs(const Ints (&n)[2], const Ints (&high)[2], const Ints (&middle)[2]) {
  // Words of the first quad of each two; and whole numbers of the second.
  const __m512i first = _mm512_maskz_set1_epi32(0x0f0f, 0xffff);
  const auto products = [=](const Ints(&x)[2]) {
    __m512i total = _mm512_setzero_si512();
    for (const Ints &some : x) {
      const __m512i second = _mm512_shuffle_i32x4(some.v, some.v, _MM_SHUFFLE(2, 3, 0, 1));
      total = _mm512_add_epi32(total, _mm512_madd_epi16(_mm512_and_si512(some.v, first), second));
    }
    return total;
  };
  const __m512i of_second = _mm512_maskz_add_epi32(0xf0f0, n[0].v, n[1].v);
  const __m512i all = _mm512_add_epi32(
      _mm512_add_epi32(_mm512_slli_epi32(products(high), HIGH_BITS), _mm512_slli_epi32(products(middle), LOW_BITS)),
      _mm512_slli_epi32(of_second, 7));
  // By hand: _mm512_reduce_add_epi32 ends in an addition of two ints, which must not overflow.
  const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
  return _mm_cvtsi128_si32(_mm_sub_epi32(_mm_setzero_si128(), sum));
}

// Quads [8][64][4] of 4-bit codes: add 128 to each second one, and write behind them [64] what the middle term begins with:
// what only W decides of the products of the two highest, negative.
inline void make_pairs(uint8_t *quads) {
  for (int j = 0; j < VECTORS; ++j) {
    Ints total = every(0);
    for (int q = 0; q < GROUP / 4; q += 2) {
      uint8_t *at = quads + (q * VECTORS + j) * LANES * 4;
      const Ints raised = differing(load_ints(at + PANEL * 4), every((int32_t)0x80808080));
      total = add_bytes(total, raised, load_ints(at));
      store(at + PANEL * 4, raised);
    }
    store(quads + GROUP * PANEL + j * LANES * 4, less(every(0), add(left<MIDDLE_BITS>(total), total)));
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
  for (int j = 0; j < COUNT; ++j) {
    const Ints start = load_ints(quads + GROUP * PANEL + (vector + j * SPAN) * LANES * 4);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
      high[r][j] = every(0), middle[r][j] = start, low[r][j] = every(beside[r].starts[0][0]);
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
      const Ints a = four_columns(at + 2 * GROUP), b = four_columns(at + 2 * GROUP + 4);
#pragma GCC unroll 8
      for (int j = 0; j < COUNT; ++j) low[r][j] = add_bytes(add_bytes(low[r][j], v[j], a), w[j], b);
      add_pairs(middle[r], at + GROUP);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < COUNT; ++j) {
    const int column = (vector + j * SPAN) * LANES;
    const Floats scale = load(by + column), offset = load(by + PANEL + column);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Ints more = add(left<MIDDLE_BITS>(high[r][j]), middle[r][j]);
      const Floats total = to_floats(add(left<LOW_BITS>(more), low[r][j]));
      float *at = sums + r * PANEL + column;
      store(at, fma(offset, every(beside[r].sums[0]), fma(mul(total, scale), every(beside[r].scale), load(at))));
    }
  }
}

#else

constexpr bool has_pairs() { return false; }
inline int32_t start_of_pairs(const Ints (&)[2], const Ints (&)[2], const Ints (&)[2]) { return 0; }
inline void make_pairs(uint8_t *) {}
template <int ROWS, int COUNT>
inline void multiply_pairs(const uint8_t *, const Beside *, const float *, const uint8_t *, int, float *) {}

#endif

}  // namespace headrace
