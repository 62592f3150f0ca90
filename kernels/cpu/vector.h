// Sixteen floats, and the few operations that the kernels need of them: AVX-512, AVX2 with FMA, or whatever the compiler
// makes of plain loops. Every operation rounds once, as IEEE 754 says, and sums are added in one order, so that all three
// give the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define HEADRACE_API extern "C" __attribute__((visibility("default")))

namespace headrace {

constexpr int LANES = 16;

#if defined(__AVX512F__)

struct Floats {
  __m512 v;
};
inline Floats load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline void store(float *p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats every(float x) { return {_mm512_set1_ps(x)}; }
inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats div(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats larger(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats smaller(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats whole(Floats a) { return {_mm512_roundscale_ps(a.v, 0)}; }
// 2^n for whole n of -126 .. 127.
inline Floats power_of_two(Floats n) {
  const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
inline Floats from_bfloat16(const uint16_t *p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Floats from_float16(const uint16_t *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))}; }
inline void to_float16(uint16_t *p, Floats a) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a.v, 0)); }
inline Floats from_int8(const int8_t *p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)))};
}
// 8-bit floats (E4M3), divided by 256: with seven zeros behind them they are halves, once bit 14, a copy of the sign, is
// cleared.
inline Floats from_e4m3_over_256(const uint8_t *p) {
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
  return {_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16((short)0xbf80)))};
}
// Lanes [from, to) of a; the others are `other`.
inline Floats only(Floats a, int from, int to, float other) {
  const __mmask16 chosen = (__mmask16)((1u << to) - (1u << from));
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), chosen, a.v)};
}
// Sixteen bytes of two codes each: the low halves, then the high ones.
inline void from_int4(const uint8_t *p, Floats &low, Floats &high) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  low.v = _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(15)));
  high.v = _mm512_cvtepi32_ps(_mm512_srli_epi32(bytes, 4));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Floats {
  __m256 a, b;
};
inline Floats load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Floats every(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats sub(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats div(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats larger(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats smaller(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Floats whole(Floats x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
inline __m256 power_of_two(__m256 n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline Floats power_of_two(Floats n) { return {power_of_two(n.a), power_of_two(n.b)}; }
inline __m256 eight_bfloat16(const uint16_t *p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Floats from_bfloat16(const uint16_t *p) { return {eight_bfloat16(p), eight_bfloat16(p + 8)}; }
inline Floats from_float16(const uint16_t *p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
inline void to_float16(uint16_t *p, Floats x) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, 0));
}
inline __m256 eight_int8(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
inline Floats from_int8(const int8_t *p) { return {eight_int8(p), eight_int8(p + 8)}; }
inline Floats from_e4m3_over_256(const uint8_t *p) {
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
  const __m256i halves = _mm256_and_si256(words, _mm256_set1_epi16((short)0xbf80));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
inline void from_int4(const uint8_t *p, Floats &low, Floats &high) {
  const __m256i first = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  const __m256i second = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)));
  const __m256i mask = _mm256_set1_epi32(15);
  low = {_mm256_cvtepi32_ps(_mm256_and_si256(first, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(second, mask))};
  high = {_mm256_cvtepi32_ps(_mm256_srli_epi32(first, 4)), _mm256_cvtepi32_ps(_mm256_srli_epi32(second, 4))};
}

#else

struct Floats {
  float v[LANES];
};
#define HEADRACE_EACH(expression)      \
  Floats r;                            \
  for (int i = 0; i < LANES; ++i) r.v[i] = (expression); \
  return r
inline Floats load(const float *p) { HEADRACE_EACH(p[i]); }
inline void store(float *p, Floats a) { std::memcpy(p, a.v, sizeof a.v); }
inline Floats every(float x) { HEADRACE_EACH(x); }
inline Floats add(Floats a, Floats b) { HEADRACE_EACH(a.v[i] + b.v[i]); }
inline Floats sub(Floats a, Floats b) { HEADRACE_EACH(a.v[i] - b.v[i]); }
inline Floats mul(Floats a, Floats b) { HEADRACE_EACH(a.v[i] * b.v[i]); }
inline Floats div(Floats a, Floats b) { HEADRACE_EACH(a.v[i] / b.v[i]); }
inline Floats fma(Floats a, Floats b, Floats c) { HEADRACE_EACH(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
inline Floats larger(Floats a, Floats b) { HEADRACE_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Floats smaller(Floats a, Floats b) { HEADRACE_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline Floats whole(Floats a) { HEADRACE_EACH(__builtin_rintf(a.v[i])); }
inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
// Above 2^23 the lowest bits of a float are those of its whole number.
inline Floats power_of_two(Floats n) { HEADRACE_EACH(float_of_bits(bits_of_float(n.v[i] + (0x1p23f + 127.0f)) << 23)); }
inline Floats from_bfloat16(const uint16_t *p) { HEADRACE_EACH(float_of_bits((uint32_t)p[i] << 16)); }
inline float one_float16(uint16_t bits) {
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff;
  if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // A power of two brings the exponent's bias from 15 to 127, denormals included, without rounding.
  return float_of_bits(sign | 0x3f800000) * (float_of_bits(rest << 13) * 0x1p112f);
}
inline Floats from_float16(const uint16_t *p) { HEADRACE_EACH(one_float16(p[i])); }
inline uint16_t as_float16(float x) {
  const uint32_t bits = bits_of_float(x), rest = bits & 0x7fffffff;
  const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  if (rest > 0x7f800000) return sign | 0x7e00 | (rest >> 13 & 0x3ff);
  if (rest >= 0x477ff000) return sign | 0x7c00;
  // Below the smallest normal one: the last place of 0.5 is that of a denormal, so the sum rounds to it.
  if (rest < 0x38800000) return sign | (uint16_t)(bits_of_float(float_of_bits(rest) + 0.5f) - 0x3f000000);
  return sign | (uint16_t)((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}
inline void to_float16(uint16_t *p, Floats a) {
  for (int i = 0; i < LANES; ++i) p[i] = as_float16(a.v[i]);
}
inline Floats from_int8(const int8_t *p) { HEADRACE_EACH((float)p[i]); }
inline Floats from_e4m3_over_256(const uint8_t *p) {
  HEADRACE_EACH(one_float16((uint16_t)((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7)));
}
inline void from_int4(const uint8_t *p, Floats &low, Floats &high) {
  for (int i = 0; i < LANES; ++i) {
    low.v[i] = (float)(p[i] & 15);
    high.v[i] = (float)(p[i] >> 4);
  }
}
#undef HEADRACE_EACH

#endif

inline Floats from_e4m3(const uint8_t *p) { return mul(from_e4m3_over_256(p), every(256.0f)); }

#if defined(__AVX512F__)

// Neighbours at distance 8, 4, 2, 1 are added.
inline float sum(Floats a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Of lanes that are no numbers, none or one of them.
inline float largest(Floats a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#else

inline Floats only(Floats a, int from, int to, float other) {
  float v[LANES];
  store(v, a);
  for (int i = 0; i < LANES; ++i) v[i] = i >= from && i < to ? v[i] : other;
  return load(v);
}

inline float sum(Floats a) {
  float v[LANES];
  store(v, a);
  for (int distance = LANES / 2; distance > 0; distance /= 2)
    for (int i = 0; i < distance; ++i) v[i] += v[i + distance];
  return v[0];
}

inline float largest(Floats a) {
  float v[LANES];
  store(v, a);
  for (int i = 1; i < LANES; ++i) v[0] = v[0] > v[i] ? v[0] : v[i];
  return v[0];
}

#endif

// e^x to within two units in the last place, for x of any size; below -87.3 it is 1.2e-38, not 0. Of two operands that
// do not compare, the second is taken: so what is no number stays none.
inline Floats exponential(Floats x) {
  x = larger(every(-87.3f), smaller(every(88.0f), x));
  const Floats n = whole(mul(x, every(1.44269504088896341f)));
  Floats r = fma(n, every(-0.693359375f), x);
  r = fma(n, every(2.12194440e-4f), r);
  Floats p = every(1.9875691500e-4f);
  p = fma(p, r, every(1.3981999507e-3f));
  p = fma(p, r, every(8.3334519073e-3f));
  p = fma(p, r, every(4.1665795894e-2f));
  p = fma(p, r, every(1.6666665459e-1f));
  p = fma(p, r, every(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), every(1.0f));
  return mul(p, power_of_two(n));
}

}  // namespace headrace
