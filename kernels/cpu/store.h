// How a row of floats is written to paged KV.
#pragma once

#include "pool.h"

namespace headrace {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Round to nearest even: the last place of 1.5 * 2^23 is 1.
inline int8_t to_int8(float x) { return (int8_t)(bits_of(x + 0x1.8p23f) - 0x4b400000); }

// Round to nearest even, at most 448.
inline uint8_t to_e4m3(float x) {
  const uint32_t bits = bits_of(x), size = std::min(bits & 0x7fffffff, 0x43e00000u);
  // Normal numbers keep three bits of the fraction; the exponent's bias goes from 127 to 7.
  const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - 960;
  // Below 2^-6 the step is 2^-9, the last place of a float of 2^14.
  float exact;
  std::memcpy(&exact, &size, sizeof exact);
  const uint32_t small = bits_of(exact + 16384.0f) - 0x46800000;
  const uint32_t code = (bits & 0x7fffffff) > 0x7f800000 ? 0x7f : size < 0x3c800000 ? small : normal;
  return (uint8_t)(code | (bits >> 24 & 0x80));
}

// As kernels.kv_write.quantize: a scale is the largest value over the largest code, 0 for a row of zeros; none where a
// value is none, since its bits are the largest.
inline float quantize(const float *values, int64_t head_dim, int storage, uint8_t *codes) {
  uint32_t most = 0;
  for (int64_t d = 0; d < head_dim; ++d) most = std::max(most, bits_of(values[d]) & 0x7fffffff);
  float scale;
  std::memcpy(&scale, &most, sizeof scale);
  scale *= (float)(storage == INT8 ? 1.0 / 127.0 : 1.0 / 448.0);
  const float divisor = scale > 0.0f ? scale : 1.0f;
  if (storage == INT8) {
    for (int64_t d = 0; d < head_dim; ++d) ((int8_t *)codes)[d] = to_int8(values[d] / divisor);
  } else {
    for (int64_t d = 0; d < head_dim; ++d) codes[d] = to_e4m3(values[d] / divisor);
  }
  return scale;
}

inline void write(const Pool &pool, uint8_t *slice, int64_t row, const float *values) {
  uint8_t *to = pool.codes(slice, row);
  if (pool.scaled()) {
    *pool.scale(slice, row) = quantize(values, pool.head_dim, pool.storage, to);
  } else if (pool.storage == FLOAT) {
    std::memcpy(to, values, pool.head_dim * sizeof(float));
  } else if (pool.storage == BFLOAT16) {
    for (int64_t d = 0; d < pool.head_dim; ++d) ((uint16_t *)to)[d] = to_bfloat16(values[d]);
  } else {
    for (int64_t d = 0; d < pool.head_dim; d += LANES) to_float16((uint16_t *)to + d, load(values + d));
  }
}

}  // namespace headrace
