// Rotary embedding, query and key norm, and the KV write.

#include "crew.h"
#include "store.h"

namespace headrace {

float inverse_rms(const float *x, int64_t width, float eps);

static void rotate(float *x, const float *cos, const float *sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = __builtin_fmaf(-b, sin[i], a * cos[i]);
    x[i + half] = __builtin_fmaf(a, sin[i], b * cos[i]);
  }
}

}  // namespace headrace

using namespace headrace;

// qkv [rows, heads + 2 * kv_heads, head_dim]: norm (where q_norm is not null) and rotate queries and keys in place;
// write keys and values of the first `written` rows to `slots`. cos, sin: tables [context, half]: the first 2 * half
// columns turn, the rest pass; none at all where half is 0.
HEADRACE_API void headrace_rotate_and_write(float *qkv, int64_t rows, int64_t heads, const float *cos, const float *sin,
                                          int64_t half, const int64_t *positions, const float *q_norm,
                                          const float *k_norm, float eps, uint8_t *data, int storage, int64_t kv_heads, int64_t layers,
                                          int64_t block_size, int64_t head_dim, int64_t layer, const int64_t *slots,
                                          int64_t written, int threads) {
  const Pool pool{data, storage, kv_heads, layers, block_size, head_dim};
  each_row(rows, threads, [&](int64_t r) {
    float *row = qkv + r * (heads + 2 * kv_heads) * head_dim;
    for (int64_t h = 0; h < heads + kv_heads; ++h) {
      float *x = row + h * head_dim;
      if (q_norm) {
        const float *weight = h < heads ? q_norm : k_norm;
        const float inverse = inverse_rms(x, head_dim, eps);
        for (int64_t d = 0; d < head_dim; ++d) x[d] = x[d] * inverse * weight[d];
      }
      rotate(x, cos + positions[r] * half, sin + positions[r] * half, half);
    }
    if (r >= written) return;
    for (int64_t h = 0; h < kv_heads; ++h) {
      uint8_t *slice = pool.slice(slots[r] / block_size, h);
      const int64_t key = pool.row(slots[r] % block_size, layer, 0), value = pool.row(slots[r] % block_size, layer, 1);
      write(pool, slice, key, row + (heads + h) * head_dim);
      write(pool, slice, value, row + (heads + kv_heads + h) * head_dim);
    }
  });
}
