// Paged KV: [blocks, kv_heads, layers, 2, block_size, head_dim] of float, bfloat16 or half; or of int8 or E4M3, where a
// head's slice of a block is its rows [layers, 2, block_size, head_dim] and then a float for each row, its scale.
#pragma once

#include <algorithm>

#include "vector.h"

namespace headrace {

enum Storage { FLOAT = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3, E4M3 = 4 };

struct Pool {
  uint8_t *data;
  int storage;
  int64_t kv_heads, layers, block_size, head_dim;
  bool scaled() const { return storage == INT8 || storage == E4M3; }
  int64_t row_bytes() const { return head_dim * (storage == FLOAT ? 4 : scaled() ? 1 : 2); }
  // Of a head's slice of a block.
  int64_t rows() const { return layers * 2 * block_size; }
  uint8_t *slice(int64_t block, int64_t head) const {
    return data + (block * kv_heads + head) * rows() * (row_bytes() + (scaled() ? 4 : 0));
  }
  // A token's row within a slice; `which` is 0 for its key, 1 for its value.
  int64_t row(int64_t offset, int64_t layer, int which) const { return (layer * 2 + which) * block_size + offset; }
  uint8_t *codes(uint8_t *slice, int64_t row) const { return slice + row * row_bytes(); }
  float *scale(uint8_t *slice, int64_t row) const { return (float *)codes(slice, rows()) + row; }
};

inline const float *widened(const Pool &pool, const uint8_t *row, float *to) {
  if (pool.storage == FLOAT) return (const float *)row;
  const uint16_t *bits = (const uint16_t *)row;
  for (int64_t d = 0; d < pool.head_dim; d += LANES)
    store(to + d, pool.storage == BFLOAT16 ? from_bfloat16(bits + d) : from_float16(bits + d));
  return to;
}

// Sixteen tokens of a sequence, null after the last.
struct Tile {
  const uint8_t *rows[LANES];
  const float *scales[LANES];
};

// The rows of consecutive tokens of a sequence, from one that begins a block or lies within one.
class Walk {
 public:
  Walk(const Pool &pool, const int64_t *table, int64_t head, int64_t layer, int which, int64_t from, int64_t to)
      : pool_(pool), table_(table + from / pool.block_size), offset_(from % pool.block_size), left_(to - from),
        head_(head), layer_(layer), which_(which) {}

  bool over() const { return left_ <= 0; }

  void tile(Tile &to) {
    const int64_t count = std::max<int64_t>(0, std::min<int64_t>(LANES, left_)), bytes = pool_.row_bytes();
    left_ -= LANES;
    for (int64_t at = 0; at < count;) {
      if (offset_ == pool_.block_size) offset_ = 0, ++table_;
      uint8_t *slice = pool_.slice(*table_, head_);
      const int64_t first = pool_.row(offset_, layer_, which_), run = std::min(count - at, pool_.block_size - offset_);
      const uint8_t *row = pool_.codes(slice, first);
      const float *scale = pool_.scale(slice, first);
      for (int64_t i = 0; i < run; ++i) to.rows[at + i] = row + i * bytes, to.scales[at + i] = scale + i;
      at += run, offset_ += run;
    }
    for (int64_t at = count; at < LANES; ++at) to.rows[at] = nullptr, to.scales[at] = nullptr;
  }

 private:
  const Pool &pool_;
  const int64_t *table_;
  int64_t offset_, left_;
  const int64_t head_, layer_;
  const int which_;
};

}  // namespace headrace
