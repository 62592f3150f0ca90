// Sixteen 32-bit integers, and products of pairs of 16-bit ones. Integers have no rounding, so every way of adding them up
// gives the same bits: vpdpwssd where the processor has it (DOTS), else vpmaddwd and an addition, else plain loops.
#pragma once

#include "vector.h"

namespace headrace {

#if defined(__AVX512F__)

struct Ints {
  __m512i v;
};
inline Ints no_ints() { return {_mm512_setzero_si512()}; }
inline Ints load(const int32_t *p) { return {_mm512_loadu_si512(p)}; }
inline void store(int32_t *p, Ints a) { _mm512_storeu_si512(p, a.v); }
inline Ints every(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
// Each of `a` and `b` is two 16-bit integers, low and high: total + low * low + high * high.
template <bool DOTS>
inline Ints add_products(Ints total, Ints a, Ints b) {
  // The intrinsic wants a target of its own, and GCC 12 copies `total` before each.
  if (DOTS)
    __asm__("vpdpwssd %2, %1, %0" : "+v"(total.v) : "v"(a.v), "v"(b.v));
  else
    total.v = _mm512_add_epi32(total.v, _mm512_madd_epi16(a.v, b.v));
  return total;
}
// Sixteen codes each of two columns that follow each other -> pairs.
inline Ints pairs_of_int8(const int8_t *p, const int8_t *next) {
  const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
  const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)next));
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16))};
}
// Sixteen bytes each of two columns, of two codes a byte: the low halves, then the high ones.
inline void pairs_of_int4(const uint8_t *p, const uint8_t *next, Ints &low, Ints &high) {
  const __m512i first = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  const __m512i second = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)next));
  const __m512i bytes = _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
  low.v = _mm512_and_si512(bytes, _mm512_set1_epi16(15));
  high.v = _mm512_srli_epi16(bytes, 4);
}
inline void to_int16(int16_t *p, Floats a) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Ints {
  __m256i a, b;
};
inline Ints no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Ints load(const int32_t *p) {
  return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 8))};
}
inline void store(int32_t *p, Ints x) {
  _mm256_storeu_si256((__m256i *)p, x.a);
  _mm256_storeu_si256((__m256i *)(p + 8), x.b);
}
inline Ints every(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
template <bool DOTS>
inline Ints add_products(Ints total, Ints x, Ints y) {
  if (DOTS) {
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(total.a) : "x"(x.a), "x"(y.a));
    __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(total.b) : "x"(x.b), "x"(y.b));
  } else {
    total.a = _mm256_add_epi32(total.a, _mm256_madd_epi16(x.a, y.a));
    total.b = _mm256_add_epi32(total.b, _mm256_madd_epi16(x.b, y.b));
  }
  return total;
}
inline __m256i eight_pairs(const int8_t *p, const int8_t *next) {
  const __m256i low = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
  const __m256i high = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)next));
  return _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
}
inline Ints pairs_of_int8(const int8_t *p, const int8_t *next) {
  return {eight_pairs(p, next), eight_pairs(p + 8, next + 8)};
}
inline __m256i eight_bytes(const uint8_t *p, const uint8_t *next) {
  const __m256i first = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  const __m256i second = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)next));
  return _mm256_or_si256(first, _mm256_slli_epi32(second, 16));
}
inline void pairs_of_int4(const uint8_t *p, const uint8_t *next, Ints &low, Ints &high) {
  const __m256i a = eight_bytes(p, next), b = eight_bytes(p + 8, next + 8), mask = _mm256_set1_epi16(15);
  low = {_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)};
  high = {_mm256_srli_epi16(a, 4), _mm256_srli_epi16(b, 4)};
}
inline void to_int16(int16_t *p, Floats x) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

#else

struct Ints {
  int32_t v[LANES];
};
#define HEADRACE_EACH(expression)                        \
  Ints r;                                                \
  for (int i = 0; i < LANES; ++i) r.v[i] = (expression); \
  return r
inline int32_t pair_of(int low, int high) { return (int32_t)((uint32_t)(uint16_t)low | (uint32_t)high << 16); }
inline Ints no_ints() { HEADRACE_EACH(0); }
inline Ints load(const int32_t *p) { HEADRACE_EACH(p[i]); }
inline void store(int32_t *p, Ints a) { std::memcpy(p, a.v, sizeof a.v); }
inline Ints every(int32_t x) { HEADRACE_EACH(x); }
inline Floats to_floats(Ints a) {
  Floats r;
  for (int i = 0; i < LANES; ++i) r.v[i] = (float)a.v[i];
  return r;
}
template <bool DOTS>
inline Ints add_products(Ints total, Ints a, Ints b) {
  HEADRACE_EACH(total.v[i] + (int16_t)a.v[i] * (int16_t)b.v[i] + (a.v[i] >> 16) * (b.v[i] >> 16));
}
inline Ints pairs_of_int8(const int8_t *p, const int8_t *next) { HEADRACE_EACH(pair_of(p[i], next[i])); }
inline void pairs_of_int4(const uint8_t *p, const uint8_t *next, Ints &low, Ints &high) {
  for (int i = 0; i < LANES; ++i) {
    low.v[i] = pair_of(p[i] & 15, next[i] & 15);
    high.v[i] = pair_of(p[i] >> 4, next[i] >> 4);
  }
}
inline void to_int16(int16_t *p, Floats a) {
  for (int i = 0; i < LANES; ++i) p[i] = (int16_t)a.v[i];
}
#undef HEADRACE_EACH

#endif

}  // namespace headrace
