// Sixteen rows of `head_dim` floats or bytes, as [head_dim][16]; head_dim is a multiple of sixteen.
#pragma once

#include "vector.h"

namespace headrace {

#if defined(__AVX512F__)

// Sixteen rows of sixteen 32-bit words, as columns.
inline void turn(__m512 *a) {
  __m512 b[LANES];
  for (int i = 0; i < LANES; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4) {
    a[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[i]), _mm512_castps_pd(b[i + 2])));
    a[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[i]), _mm512_castps_pd(b[i + 2])));
    a[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b[i + 1]), _mm512_castps_pd(b[i + 3])));
    a[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b[i + 1]), _mm512_castps_pd(b[i + 3])));
  }
  // a[4g + c], 128-bit lane l: rows 4g .. 4g + 3 of column 4l + c.
  for (int c = 0; c < 4; ++c) {
    const __m512 p = _mm512_shuffle_f32x4(a[c], a[c + 4], 0x88), q = _mm512_shuffle_f32x4(a[c], a[c + 4], 0xdd);
    const __m512 r = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0x88);
    const __m512 s = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0xdd);
    b[c] = _mm512_shuffle_f32x4(p, r, 0x88), b[c + 4] = _mm512_shuffle_f32x4(q, s, 0x88);
    b[c + 8] = _mm512_shuffle_f32x4(p, r, 0xdd), b[c + 12] = _mm512_shuffle_f32x4(q, s, 0xdd);
  }
  for (int i = 0; i < LANES; ++i) a[i] = b[i];
}

inline void transpose(const float *const *rows, int64_t head_dim, float *to) {
  for (int64_t d = 0; d < head_dim; d += LANES) {
    __m512 a[LANES];
    for (int i = 0; i < LANES; ++i) a[i] = _mm512_loadu_ps(rows[i] + d);
    turn(a);
    for (int i = 0; i < LANES; ++i) _mm512_storeu_ps(to + (d + i) * LANES, a[i]);
  }
}

inline void transpose(const uint8_t *const *rows, int64_t head_dim, uint8_t *to) {
  const __m512i by_byte = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m512i together = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t d = 0; d < head_dim; d += 64) {
    const int64_t some = head_dim - d < 64 ? head_dim - d : 64;
    const __mmask64 there = some == 64 ? ~(__mmask64)0 : ((__mmask64)1 << some) - 1;
    __m512 a[LANES];
    for (int i = 0; i < LANES; ++i) a[i] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi8(there, rows[i] + d));
    turn(a);
    // a[i]: bytes 4i .. 4i + 3 of row after row.
    for (int i = 0; 4 * i < some; ++i) {
      const __m512i bytes = _mm512_shuffle_epi8(_mm512_castps_si512(a[i]), by_byte);
      _mm512_storeu_si512(to + (d + 4 * i) * LANES, _mm512_permutexvar_epi32(together, bytes));
    }
  }
}

#else

inline void transpose(const float *const *rows, int64_t head_dim, float *to) {
  for (int64_t d = 0; d < head_dim; ++d)
    for (int i = 0; i < LANES; ++i) to[d * LANES + i] = rows[i][d];
}

inline void transpose(const uint8_t *const *rows, int64_t head_dim, uint8_t *to) {
#if defined(__AVX2__)
  for (int64_t d = 0; d < head_dim; d += LANES) {
    __m128i a[LANES], b[LANES];
    for (int i = 0; i < LANES; ++i) a[i] = _mm_loadu_si128((const __m128i *)(rows[i] + d));
    // Rows i and i + 8 side by side, four times over, are columns.
    for (int turns = 0; turns < 2; ++turns) {
      for (int i = 0; i < 8; ++i) b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]), b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
      for (int i = 0; i < 8; ++i) a[2 * i] = _mm_unpacklo_epi8(b[i], b[i + 8]), a[2 * i + 1] = _mm_unpackhi_epi8(b[i], b[i + 8]);
    }
    for (int i = 0; i < LANES; ++i) _mm_storeu_si128((__m128i *)(to + (d + i) * LANES), a[i]);
  }
#else
  for (int64_t d = 0; d < head_dim; ++d)
    for (int i = 0; i < LANES; ++i) to[d * LANES + i] = rows[i][d];
#endif
}

#endif

}  // namespace headrace
