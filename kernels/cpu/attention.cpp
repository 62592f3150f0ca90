// Attention over paged KV, in 32 bits.
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

#include "crew.h"
#include "items.h"
#include "pool.h"

namespace headrace {

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

}  // namespace headrace

using namespace headrace;

// Rotated qkv of consecutive sequences: `counts[i]` rows at the end of `contexts[i]` tokens, whose blocks are
// tables[starts[i] ..]. out [rows, heads * head_dim] is written for these rows only.
HEADRACE_API void headrace_attend(const float *qkv, int64_t heads, int64_t sequences, const int64_t *counts,
                                const int64_t *contexts, const int64_t *starts, const int64_t *tables, uint8_t *data,
                                int storage, int64_t kv_heads, int64_t layers, int64_t block_size, int64_t head_dim,
                                int64_t layer, float scale, float *out, int threads) {
  const Pool pool{data, storage, kv_heads, layers, block_size, head_dim};
  const int64_t group = heads / kv_heads;
  const std::vector<Item> items = items_of(sequences, counts, contexts, starts, tables, block_size, kv_heads, group, threads);
  each((int64_t)items.size(), threads, [&](int64_t i) {
    static thread_local Scratch scratch;
    const Item &item = items[i];
    const float *q[ROWS_AT_ONCE];
    float *to[ROWS_AT_ONCE];
    int64_t limits[ROWS_AT_ONCE] = {};
    int count = 0;
    std::vector<Part> parts;
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
  });
}
