// Sixteen 32-bit integers, and products of the bytes or 16-bit words in them. Integers have no rounding, so every way of
// adding them up gives the same bits: vpdpbusd where the processor has it, else vpmaddwd and an addition, else plain loops.
#pragma once

#include "vector.h"

namespace headrace {

#if defined(__AVX512F__)

struct Ints {
  __m512i v;
};
inline Ints load_ints(const void *p) { return {_mm512_loadu_si512(p)}; }
inline void store(void *p, Ints a) { _mm512_storeu_si512(p, a.v); }
inline Ints every(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints less(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints both(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Ints differing(Ints a, Ints b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int BITS>
inline Ints left(Ints a) {
  return {_mm512_slli_epi32(a.v, BITS)};
}
template <int BITS>
inline Ints right(Ints a) {
  return {_mm512_srli_epi32(a.v, BITS)};
}
template <int BITS>
inline Ints signed_right(Ints a) {
  return {_mm512_srai_epi32(a.v, BITS)};
}
// The lowest byte of each.
inline void store_bytes(void *p, Ints a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(a.v)); }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
// total + the products of the four bytes of each of `a`, without a sign, by those of `b`, with one.
inline Ints add_bytes(Ints total, Ints a, Ints b) {
  // The intrinsic wants a target of its own, and GCC 12 copies `total` before each.
  __asm__("vpdpbusd %2, %1, %0" : "+v"(total.v) : "v"(a.v), "v"(b.v));
  return total;
}
// The sums of their bytes.
inline Ints sums_of_bytes(Ints a, Ints b) {
  return {_mm512_add_epi8(a.v, b.v)};
}
// total + the products of the two words of each, with signs.
inline Ints add_words(Ints total, Ints a, Ints b) {
  return {_mm512_add_epi32(total.v, _mm512_madd_epi16(a.v, b.v))};
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Ints {
  __m256i a, b;
};
inline Ints load_ints(const void *p) {
  return {_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
inline void store(void *p, Ints x) {
  _mm256_storeu_si256((__m256i *)p, x.a);
  _mm256_storeu_si256((__m256i *)p + 1, x.b);
}
inline Ints every(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints add(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline Ints less(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline Ints both(Ints x, Ints y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline Ints differing(Ints x, Ints y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int BITS>
inline Ints left(Ints x) {
  return {_mm256_slli_epi32(x.a, BITS), _mm256_slli_epi32(x.b, BITS)};
}
template <int BITS>
inline Ints right(Ints x) {
  return {_mm256_srli_epi32(x.a, BITS), _mm256_srli_epi32(x.b, BITS)};
}
template <int BITS>
inline Ints signed_right(Ints x) {
  return {_mm256_srai_epi32(x.a, BITS), _mm256_srai_epi32(x.b, BITS)};
}
inline void store_bytes(void *p, Ints x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(low, high));
}
inline Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline Ints add_bytes(Ints total, Ints x, Ints y) {
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(total.a) : "x"(x.a), "x"(y.a));
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(total.b) : "x"(x.b), "x"(y.b));
  return total;
}
inline Ints add_words(Ints total, Ints x, Ints y) {
  return {_mm256_add_epi32(total.a, _mm256_madd_epi16(x.a, y.a)),
          _mm256_add_epi32(total.b, _mm256_madd_epi16(x.b, y.b))};
}

#else

struct Ints {
  int32_t v[LANES];
};
#define HEADRACE_EACH(expression)                        \
  Ints r;                                                \
  for (int i = 0; i < LANES; ++i) r.v[i] = (expression); \
  return r
inline Ints load_ints(const void *p) {
  Ints r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void store(void *p, Ints a) { std::memcpy(p, a.v, sizeof a.v); }
inline Ints every(int32_t x) { HEADRACE_EACH(x); }
inline Ints add(Ints a, Ints b) { HEADRACE_EACH(a.v[i] + b.v[i]); }
inline Ints less(Ints a, Ints b) { HEADRACE_EACH(a.v[i] - b.v[i]); }
inline Ints both(Ints a, Ints b) { HEADRACE_EACH(a.v[i] & b.v[i]); }
inline Ints differing(Ints a, Ints b) { HEADRACE_EACH(a.v[i] ^ b.v[i]); }
template <int BITS>
inline Ints left(Ints a) {
  HEADRACE_EACH((int32_t)((uint32_t)a.v[i] << BITS));
}
template <int BITS>
inline Ints right(Ints a) {
  HEADRACE_EACH((int32_t)((uint32_t)a.v[i] >> BITS));
}
template <int BITS>
inline Ints signed_right(Ints a) {
  HEADRACE_EACH(a.v[i] >> BITS);
}
inline void store_bytes(void *p, Ints a) {
  for (int i = 0; i < LANES; ++i) ((int8_t *)p)[i] = (int8_t)a.v[i];
}
inline Floats to_floats(Ints a) {
  Floats r;
  for (int i = 0; i < LANES; ++i) r.v[i] = (float)a.v[i];
  return r;
}
inline Ints to_ints(Floats a) { HEADRACE_EACH((int32_t)__builtin_rintf(a.v[i])); }
inline int32_t bytes_of(int32_t a, int32_t b) {
  int32_t sum = 0;
  for (int at = 0; at < 32; at += 8) sum += (uint8_t)(a >> at) * (int8_t)(b >> at);
  return sum;
}
inline Ints add_bytes(Ints total, Ints a, Ints b) { HEADRACE_EACH(total.v[i] + bytes_of(a.v[i], b.v[i])); }
inline Ints add_words(Ints total, Ints a, Ints b) {
  HEADRACE_EACH(total.v[i] + (int16_t)a.v[i] * (int16_t)b.v[i] + (a.v[i] >> 16) * (b.v[i] >> 16));
}
#undef HEADRACE_EACH

#endif

// The lowest bits of each, with a sign.
template <int BITS>
inline Ints low_part(Ints a) {
  return signed_right<32 - BITS>(left<32 - BITS>(a));
}

// Whether this processor has `add_bytes`.
inline bool multiplies_bytes() {
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
