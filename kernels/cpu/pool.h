// Paged KV: [blocks, kv_heads, layers, 2, block_size, head_dim] of float, bfloat16 or half.
#pragma once

#include "vector.h"

namespace headrace {

enum Storage { FLOAT = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct Pool {
  uint8_t *data;
  int storage;
  int64_t kv_heads, layers, block_size, head_dim;
  int64_t width() const { return storage == FLOAT ? 4 : 2; }
  // The row of a token; `which` is 0 for its key, 1 for its value.
  uint8_t *row(int64_t block, int64_t offset, int64_t head, int64_t layer, int which) const {
    const int64_t slab = ((block * kv_heads + head) * layers + layer) * 2 + which;
    return data + (slab * block_size + offset) * head_dim * width();
  }
};

inline const float *widened(const Pool &pool, const uint8_t *row, float *to) {
  if (pool.storage == FLOAT) return (const float *)row;
  const uint16_t *bits = (const uint16_t *)row;
  for (int64_t d = 0; d < pool.head_dim; d += LANES)
    store(to + d, pool.storage == BFLOAT16 ? from_bfloat16(bits + d) : from_float16(bits + d));
  return to;
}

inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void write(const Pool &pool, uint8_t *row, const float *values) {
  if (pool.storage == FLOAT) {
    std::memcpy(row, values, pool.head_dim * sizeof(float));
  } else if (pool.storage == BFLOAT16) {
    for (int64_t d = 0; d < pool.head_dim; ++d) ((uint16_t *)row)[d] = to_bfloat16(values[d]);
  } else {
    for (int64_t d = 0; d < pool.head_dim; d += LANES) to_float16((uint16_t *)row + d, load(values + d));
  }
}

// The rows of consecutive tokens of a sequence, from one that begins a block or lies within one.
class Walk {
 public:
  Walk(const Pool &pool, const int64_t *table, int64_t head, int64_t layer, int which, int64_t from, int64_t to)
      : pool_(pool), table_(table + from / pool.block_size), offset_(from % pool.block_size), left_(to - from),
        head_(head), layer_(layer), which_(which) {}
  // Sixteen of them, null after the last.
  void tile(const uint8_t **to) {
    for (int i = 0; i < LANES; ++i, --left_) {
      if (left_ <= 0) {
        to[i] = nullptr;
        continue;
      }
      if (offset_ == pool_.block_size) offset_ = 0, row_ = nullptr, ++table_;
      if (!row_) row_ = pool_.row(*table_, offset_, head_, layer_, which_);
      to[i] = row_;
      row_ += pool_.head_dim * pool_.width();
      ++offset_;
    }
  }

 private:
  const Pool &pool_;
  const int64_t *table_;
  int64_t offset_, left_;
  const int64_t head_, layer_;
  const int which_;
  const uint8_t *row_ = nullptr;
};

}  // namespace headrace
