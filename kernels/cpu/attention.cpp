// Rotary embedding with the KV write, and attention over paged KV, in 32 bits.
//
// The pool is [blocks, kv_heads, layers, 2, block_size, head_dim] of float, bfloat16 or half; keys and values are read
// where they lie. A query's bits depend on its own prefix alone:
//
//   scores    per key, one chain of fused multiply-adds over head_dim; keys sixteen at a time, transposed
//   weights   e^(score - largest); their sum lane by lane of sixteen from position 0
//   answer    one chain of fused multiply-adds over the keys, first to last
//
// The query heads of a KV head, and a few tokens of a prompt, are computed side by side, so that a key is read and
// transposed once for all of them.

#include <algorithm>
#include <vector>

#include "vector.h"

namespace headrace {

float inverse_rms(const float *x, int64_t width, float eps);

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

static const float *widened(const Pool &pool, const uint8_t *row, float *to) {
  if (pool.storage == FLOAT) return (const float *)row;
  const uint16_t *bits = (const uint16_t *)row;
  for (int64_t d = 0; d < pool.head_dim; d += LANES)
    store(to + d, pool.storage == BFLOAT16 ? from_bfloat16(bits + d) : from_float16(bits + d));
  return to;
}

static uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void write(const Pool &pool, uint8_t *row, const float *values) {
  if (pool.storage == FLOAT) {
    std::memcpy(row, values, pool.head_dim * sizeof(float));
  } else if (pool.storage == BFLOAT16) {
    for (int64_t d = 0; d < pool.head_dim; ++d) ((uint16_t *)row)[d] = to_bfloat16(values[d]);
  } else {
    for (int64_t d = 0; d < pool.head_dim; d += LANES) to_float16((uint16_t *)row + d, load(values + d));
  }
}

static void rotate(float *x, const float *cos, const float *sin, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = __builtin_fmaf(-b, sin[i], a * cos[i]);
    x[i + half] = __builtin_fmaf(a, sin[i], b * cos[i]);
  }
}

// Sixteen keys, each `head_dim` floats, as [head_dim][16].
static void transpose(const float *const *keys, int64_t head_dim, float *to) {
#if defined(__AVX512F__)
  for (int64_t d = 0; d < head_dim; d += LANES) {
    __m512 a[LANES], b[LANES];
    for (int i = 0; i < LANES; ++i) a[i] = _mm512_loadu_ps(keys[i] + d);
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
    // a[4g + c], 128-bit lane l: keys 4g .. 4g + 3 of dimension 4l + c.
    for (int c = 0; c < 4; ++c) {
      const __m512 p = _mm512_shuffle_f32x4(a[c], a[c + 4], 0x88), q = _mm512_shuffle_f32x4(a[c], a[c + 4], 0xdd);
      const __m512 r = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0x88);
      const __m512 s = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0xdd);
      _mm512_storeu_ps(to + (d + c) * LANES, _mm512_shuffle_f32x4(p, r, 0x88));
      _mm512_storeu_ps(to + (d + c + 4) * LANES, _mm512_shuffle_f32x4(q, s, 0x88));
      _mm512_storeu_ps(to + (d + c + 8) * LANES, _mm512_shuffle_f32x4(p, r, 0xdd));
      _mm512_storeu_ps(to + (d + c + 12) * LANES, _mm512_shuffle_f32x4(q, s, 0xdd));
    }
  }
#else
  for (int64_t d = 0; d < head_dim; ++d)
    for (int i = 0; i < LANES; ++i) to[d * LANES + i] = keys[i][d];
#endif
}

// Sixteen rows that will be wanted soon. Blocks lie anywhere, so the processor cannot guess where; asked for a row at a
// time, between pieces of work, they are there when their turn comes.
struct Next {
  const uint8_t *rows[LANES];
  int64_t row_bytes;
  void fetch(int i) const {
    for (int64_t at = 0; rows[i] && at < row_bytes; at += 64) __builtin_prefetch(rows[i] + at, 0, 2);
  }
};

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

template <int ROWS>
static void score(const float *const *q, const float *keys, int64_t head_dim, Floats scale, float *const *to,
                  const Next *next) {
  Floats total[ROWS];
  for (int r = 0; r < ROWS; ++r) total[r] = every(0.0f);
  const int64_t part = head_dim / LANES;
  for (int i = 0; i < LANES; ++i) {
    if (next) next->fetch(i);
    for (int64_t d = i * part; d < (i + 1) * part; ++d) {
      const Floats column = load(keys + d * LANES);
      for (int r = 0; r < ROWS; ++r) total[r] = fma(every(q[r][d]), column, total[r]);
    }
  }
  for (int r = 0; r < ROWS; ++r) store(to[r], mul(total[r], scale));
}

template <int WIDTH>
static void weigh(const float *weights, const float *const *values, int64_t count, float *sums, const Next *next) {
  Floats total[WIDTH];
  for (int j = 0; j < WIDTH; ++j) total[j] = load(sums + j * LANES);
  for (int64_t t = 0; t < count; ++t) {
    if (next) next->fetch((int)t);
    const Floats weight = every(weights[t]);
    for (int j = 0; j < WIDTH; ++j) total[j] = fma(weight, load(values[t] + j * LANES), total[j]);
  }
  for (int j = 0; j < WIDTH; ++j) store(sums + j * LANES, total[j]);
}

static void weigh_any(int64_t vectors, const float *weights, const float *const *values, int64_t count, float *sums,
                      const Next *next) {
  switch (vectors) {
    case 4: return weigh<4>(weights, values, count, sums, next);
    case 8: return weigh<8>(weights, values, count, sums, next);
    default:
      for (int64_t j = 0; j < vectors; ++j) {
        const float *shifted[LANES];
        for (int64_t t = 0; t < count; ++t) shifted[t] = values[t] + j * LANES;
        weigh<1>(weights, shifted, count, sums + j * LANES, j ? nullptr : next);
      }
  }
}

constexpr int ROWS_AT_ONCE = 24;
constexpr int TILES_AHEAD = 2;

struct Scratch {
  std::vector<float> scores, keys, wide, zeros;
};

// Tokens [from, to) of the sequence whose blocks `table` names; query rows [row, row + rows) attend to them. `from` is a
// multiple of sixteen.
struct Part {
  const int64_t *table;
  int64_t from, to;
  int row, rows;
};

// What `visit` is given: the position of a tile's first token, its sixteen rows as floats (zeros after the last), and
// the rows to ask memory for meanwhile.
template <typename Visit>
static void each_tile(const Pool &pool, int64_t layer, int64_t head, int which, const Part &part, Scratch &scratch,
                      Visit visit) {
  Walk walk(pool, part.table, head, layer, which, part.from, part.to);
  Next tiles[TILES_AHEAD + 1];
  for (Next &tile : tiles) {
    tile.row_bytes = pool.head_dim * pool.width();
    walk.tile(tile.rows);
  }
  const float *rows[LANES];
  for (int64_t first = part.from, turn = 0; first < part.to; first += LANES) {
    Next &here = tiles[turn], &last = tiles[(turn + TILES_AHEAD) % (TILES_AHEAD + 1)];
    for (int i = 0; i < LANES; ++i)
      rows[i] = here.rows[i] ? widened(pool, here.rows[i], scratch.wide.data() + i * pool.head_dim)
                             : scratch.zeros.data();
    visit(first, rows, &last);
    walk.tile(here.rows);
    turn = (turn + 1) % (TILES_AHEAD + 1);
  }
}

// `count` query rows of one KV head: row i attends to the first limits[i] tokens of the parts that name it, in their
// order; limits ascend within a part; out[i] [head_dim].
static void attend(const Pool &pool, int64_t layer, int64_t head, const std::vector<Part> &parts, const float *const *q,
                   const int64_t *limits, int count, float scale, float *const *out, Scratch &scratch) {
  const int64_t dim = pool.head_dim, most = *std::max_element(limits, limits + count);
  const int64_t padded = (most + LANES - 1) / LANES * LANES;
  scratch.scores.resize(count * padded);
  scratch.keys.resize(dim * LANES);
  scratch.wide.resize(dim * LANES);
  scratch.zeros.assign(dim, 0.0f);
  for (const Part &part : parts)
    each_tile(pool, layer, head, 0, part, scratch, [&](int64_t first, const float *const *keys, const Next *ahead) {
      transpose(keys, dim, scratch.keys.data());
      const int end = part.row + part.rows;
      float *to[ROWS_AT_ONCE];
      for (int r = part.row; r < end; ++r) to[r] = &scratch.scores[r * padded + first];
      int r = part.row;
      while (r < end && limits[r] <= first) ++r;  // sees none of these keys
      for (; r + 4 <= end; r += 4, ahead = nullptr) score<4>(q + r, scratch.keys.data(), dim, every(scale), to + r, ahead);
      if (end - r == 3) score<3>(q + r, scratch.keys.data(), dim, every(scale), to + r, ahead);
      if (end - r == 2) score<2>(q + r, scratch.keys.data(), dim, every(scale), to + r, ahead);
      if (end - r == 1) score<1>(q + r, scratch.keys.data(), dim, every(scale), to + r, ahead);
    });
  float totals[ROWS_AT_ONCE];
  for (int r = 0; r < count; ++r) {
    float *scores = &scratch.scores[r * padded];
    const int64_t end = (limits[r] + LANES - 1) / LANES * LANES;
    for (int64_t t = limits[r]; t < end; ++t) scores[t] = -INFINITY;
    Floats most_of = load(scores);
    for (int64_t t = LANES; t < end; t += LANES) most_of = larger(most_of, load(scores + t));
    const Floats top = every(largest(most_of));
    Floats total = every(0.0f);
    for (int64_t t = 0; t < end; t += LANES) {
      Floats weights = exponential(sub(load(scores + t), top));
      if (t + LANES > limits[r]) {
        store(scores + t, weights);
        for (int64_t i = limits[r]; i < end; ++i) scores[i] = 0.0f;
        weights = load(scores + t);
      }
      store(scores + t, weights);
      total = add(total, weights);
    }
    totals[r] = sum(total);
    std::fill(out[r], out[r] + dim, 0.0f);
  }
  for (const Part &part : parts)
    each_tile(pool, layer, head, 1, part, scratch, [&](int64_t first, const float *const *values, const Next *ahead) {
      for (int r = part.row + part.rows - 1; r >= part.row && limits[r] > first; --r, ahead = nullptr)
        weigh_any(dim / LANES, &scratch.scores[r * padded + first], values,
                  std::min<int64_t>(LANES, limits[r] - first), out[r], ahead);
    });
  for (int r = 0; r < count; ++r)
    for (int64_t d = 0; d < dim; ++d) out[r][d] /= totals[r];
}

// Query rows of one sequence and one KV head, which are its tokens times the query heads of that head: [first, end) of
// them. `row` is the sequence's first in qkv.
struct Member {
  int64_t sequence, row, first, end;
};

// What one thread does at a time: at most ROWS_AT_ONCE rows; its members' first `shared` tokens lie in the same blocks.
struct Item {
  std::vector<Member> members;
  int64_t head, shared;
};

constexpr int64_t SHARED_LEAST = 64;  // tokens; for fewer it is not worth it

// Sequences with one new token each that begin with the same blocks are read once for all of them; prompts go by tiles.
static std::vector<Item> items_of(int64_t sequences, const int64_t *counts, const int64_t *contexts,
                                  const int64_t *starts, const int64_t *tables, int64_t block_size, int64_t kv_heads,
                                  int64_t group, int threads) {
  std::vector<Item> items;
  const int64_t at_once = std::max<int64_t>(1, ROWS_AT_ONCE / group) * group;
  // Two items for each thread, so that none ends long after the others.
  const int64_t together = std::min(ROWS_AT_ONCE / group, sequences * kv_heads / (2 * threads));
  int64_t row = 0;
  for (int64_t s = 0; s < sequences; row += counts[s++]) {
    const int64_t rows = counts[s] * group;
    if (counts[s] == 1 && rows <= ROWS_AT_ONCE) {
      const int64_t *blocks = tables + starts[s];
      bool joined = false;
      for (size_t i = 0; i < items.size() && !joined; ++i) {
        Item &item = items[i];
        const int64_t other = item.members[0].sequence;
        if ((int64_t)item.members.size() >= together || counts[other] != 1) continue;
        const int64_t *theirs = tables + starts[other];
        const int64_t known = item.shared ? item.shared : contexts[other] - 1;
        const int64_t limit = std::min(known, contexts[s] - 1);
        int64_t same = 0;
        while (same * block_size < limit && blocks[same] == theirs[same]) ++same;
        const int64_t shared = std::min(same * block_size, limit) / LANES * LANES;
        if (shared < SHARED_LEAST || shared * 2 < item.shared) continue;
        item.shared = shared;
        item.members.push_back({s, row, 0, rows});
        joined = true;
      }
      if (!joined) items.push_back({{{s, row, 0, rows}}, 0, 0});
      continue;
    }
    for (int64_t first = 0; first < rows; first += at_once)
      for (int64_t some = first; some < std::min(rows, first + at_once); some += ROWS_AT_ONCE)
        items.push_back({{{s, row, some, std::min({rows, first + at_once, some + ROWS_AT_ONCE})}}, 0, 0});
  }
  const size_t of_a_head = items.size();
  for (int64_t head = 1; head < kv_heads; ++head)
    for (size_t i = 0; i < of_a_head; ++i) {
      items.push_back(items[i]);
      items.back().head = head;
    }
  return items;
}

}  // namespace headrace

using namespace headrace;

// qkv [rows, heads + 2 * kv_heads, head_dim]: norm (where q_norm is not null) and rotate queries and keys in place;
// write keys and values of the first `written` rows to `slots`. cos, sin: tables [context, head_dim / 2].
HEADRACE_API void headrace_rotate_and_write(float *qkv, int64_t rows, int64_t heads, const float *cos, const float *sin,
                                          const int64_t *positions, const float *q_norm, const float *k_norm,
                                          float eps, uint8_t *data, int storage, int64_t kv_heads, int64_t layers,
                                          int64_t block_size, int64_t head_dim, int64_t layer, const int64_t *slots,
                                          int64_t written) {
  const Pool pool{data, storage, kv_heads, layers, block_size, head_dim};
  for (int64_t r = 0; r < rows; ++r) {
    float *row = qkv + r * (heads + 2 * kv_heads) * head_dim;
    for (int64_t h = 0; h < heads + kv_heads; ++h) {
      float *x = row + h * head_dim;
      if (q_norm) {
        const float *weight = h < heads ? q_norm : k_norm;
        const float inverse = inverse_rms(x, head_dim, eps);
        for (int64_t d = 0; d < head_dim; ++d) x[d] = x[d] * inverse * weight[d];
      }
      rotate(x, cos + positions[r] * (head_dim / 2), sin + positions[r] * (head_dim / 2), head_dim);
    }
    if (r >= written) continue;
    for (int64_t h = 0; h < kv_heads; ++h) {
      const int64_t block = slots[r] / block_size, offset = slots[r] % block_size;
      write(pool, pool.row(block, offset, h, layer, 0), row + (heads + h) * head_dim);
      write(pool, pool.row(block, offset, h, layer, 1), row + (heads + kv_heads + h) * head_dim);
    }
  }
}

// Rotated qkv of consecutive sequences: `counts[i]` rows at the end of `contexts[i]` tokens, whose blocks are
// tables[starts[i] ..]. out [rows, heads * head_dim] is written for these rows only.
HEADRACE_API void headrace_attend(const float *qkv, int64_t heads, int64_t sequences, const int64_t *counts,
                                const int64_t *contexts, const int64_t *starts, const int64_t *tables, uint8_t *data,
                                int storage, int64_t kv_heads, int64_t layers, int64_t block_size, int64_t head_dim,
                                int64_t layer, float scale, float *out, int threads) {
  const Pool pool{data, storage, kv_heads, layers, block_size, head_dim};
  const int64_t group = heads / kv_heads;
  const std::vector<Item> items = items_of(sequences, counts, contexts, starts, tables, block_size, kv_heads, group, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch scratch;
    std::vector<Part> parts;
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < items.size(); ++i) {
      const Item &item = items[i];
      const float *q[ROWS_AT_ONCE];
      float *to[ROWS_AT_ONCE];
      int64_t limits[ROWS_AT_ONCE];
      int count = 0;
      parts.clear();
      if (item.shared) parts.push_back({tables + starts[item.members[0].sequence], 0, item.shared, 0, 0});
      for (const Member &member : item.members) {
        const int begin = count;
        for (int64_t at = member.first; at < member.end; ++at, ++count) {
          const int64_t row = member.row + at / group, h = item.head * group + at % group;
          q[count] = qkv + (row * (heads + 2 * kv_heads) + h) * head_dim;
          to[count] = out + (row * heads + h) * head_dim;
          limits[count] = contexts[member.sequence] - counts[member.sequence] + at / group + 1;
        }
        parts.push_back({tables + starts[member.sequence], item.shared, limits[count - 1], begin, count - begin});
      }
      if (item.shared) parts[0].rows = count;
      attend(pool, layer, item.head, parts, q, limits, count, scale, to, scratch);
    }
  }
}
