// Attention over paged KV, in 32 bits.
//
// The pool is [blocks, kv_heads, layers, 2, block_size, head_dim] of float, bfloat16 or half; keys and values are read
// where they lie. A query's bits depend on its own prefix alone:
//
//   scores    per key, one chain of fused multiply-adds over head_dim; keys sixteen at a time, transposed
//   weights   e^(score - largest); their sum lane by lane of sixteen from position 0
//   answer    one chain of fused multiply-adds over the keys, first to last
//
// Under a window a query sees the last so many tokens, itself included: tiles before it are not read, and lanes stay
// those of a token's position. A soft cap makes cap * tanh(score / cap) of a score; a head's sink is one more score of
// its softmax, without a value.
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
      for (int64_t j = 0; j < vectors; next = nullptr) {
        const int64_t some = vectors - j >= 8 ? 8 : vectors - j >= 4 ? 4 : 1;
        const float *shifted[LANES];
        for (int64_t t = 0; t < count; ++t) shifted[t] = values[t] + j * LANES;
        if (some == 8) weigh<8>(weights, shifted, count, sums + j * LANES, next);
        if (some == 4) weigh<4>(weights, shifted, count, sums + j * LANES, next);
        if (some == 1) weigh<1>(weights, shifted, count, sums + j * LANES, next);
        j += some;
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

// What becomes of scores before the softmax: `softcap` 0 is none, `sinks` [heads] or null.
struct Scoring {
  float scale, softcap;
  const float *sinks;
};

// One query row: it sees tokens [low, limit); `head` is its own.
struct Query {
  const float *q;
  float *out;
  int64_t low, limit, head;
};

static int64_t down(int64_t token) { return token / LANES * LANES; }

// Of `width` scores, cap * tanh(score / cap), by tanh(x) = 1 - 2 / (e^2x + 1).
static void cap(float *scores, int64_t width, float softcap) {
  const Floats one = every(1.0f), two = every(2.0f), most = every(softcap), over = every(2.0f / softcap);
  for (int64_t t = 0; t < width; t += LANES) {
    const Floats power = exponential(mul(load(scores + t), over));
    store(scores + t, mul(most, sub(one, div(two, add(power, one)))));
  }
}

// `count` query rows of one KV head: each attends to what it sees of the parts that name it, in their order; limits
// ascend within a part. Without WINDOWED every `low` is 0, and nothing is computed for it.
template <bool WINDOWED>
static void attend(const Pool &pool, int64_t layer, int64_t head, const std::vector<Part> &parts, const Query *queries,
                   int count, const Scoring &scoring, Scratch &scratch) {
  const int64_t dim = pool.head_dim;
  const float *q[ROWS_AT_ONCE];
  int64_t limits[ROWS_AT_ONCE], least = queries[0].low, most = 0;
  for (int r = 0; r < count; ++r) {
    q[r] = queries[r].q, limits[r] = queries[r].limit;
    least = std::min(least, queries[r].low), most = std::max(most, limits[r]);
  }
  const auto low_of = [=](int r) -> int64_t { return WINDOWED ? queries[r].low : 0; };
  const int64_t base = WINDOWED ? down(least) : 0;
  const int64_t padded = (most - base + LANES - 1) / LANES * LANES;
  const Floats scale = every(scoring.scale);
  scratch.scores.resize(count * padded);
  scratch.keys.resize(dim * LANES);
  scratch.wide.resize(dim * LANES);
  scratch.zeros.assign(dim, 0.0f);
  for (const Part &part : parts)
    each_tile(pool, layer, head, 0, part, scratch, [&](int64_t first, const float *const *keys, const Next *ahead) {
      transpose(keys, dim, scratch.keys.data());
      int end = part.row + part.rows;
      float *to[ROWS_AT_ONCE];
      for (int r = part.row; r < end; ++r) to[r] = &scratch.scores[r * padded + first - base];
      int r = part.row;
      // These see none of the keys: within a sequence the first rows, and under a window the last ones.
      while (r < end && limits[r] <= first) ++r;
      while (r < end && low_of(end - 1) >= first + LANES) --end;
      for (; r + 4 <= end; r += 4, ahead = nullptr) score<4>(q + r, scratch.keys.data(), dim, scale, to + r, ahead);
      if (end - r == 3) score<3>(q + r, scratch.keys.data(), dim, scale, to + r, ahead);
      if (end - r == 2) score<2>(q + r, scratch.keys.data(), dim, scale, to + r, ahead);
      if (end - r == 1) score<1>(q + r, scratch.keys.data(), dim, scale, to + r, ahead);
    });
  float totals[ROWS_AT_ONCE];
  for (int r = 0; r < count; ++r) {
    // From here on positions count from the tile in which the row's first token lies.
    const int64_t skipped = down(low_of(r)), low = low_of(r) - skipped, limit = limits[r] - skipped;
    float *scores = &scratch.scores[r * padded + skipped - base];
    const int64_t end = (limit + LANES - 1) / LANES * LANES;
    if (scoring.softcap != 0.0f) cap(scores, end, scoring.softcap);
    for (int64_t t = 0; t < low; ++t) scores[t] = -INFINITY;
    for (int64_t t = limit; t < end; ++t) scores[t] = -INFINITY;
    Floats most_of = load(scores);
    for (int64_t t = LANES; t < end; t += LANES) most_of = larger(most_of, load(scores + t));
    const float sink = scoring.sinks ? scoring.sinks[queries[r].head] : -INFINITY, best = largest(most_of);
    const Floats top = every(best < sink ? sink : best);
    Floats total = every(0.0f);
    for (int64_t t = 0; t < end; t += LANES) {
      Floats weights = exponential(sub(load(scores + t), top));
      if (t + LANES > limit || t < low) {
        store(scores + t, weights);
        for (int64_t i = t; i < low; ++i) scores[i] = 0.0f;
        for (int64_t i = limit; i < end; ++i) scores[i] = 0.0f;
        weights = load(scores + t);
      }
      store(scores + t, weights);
      total = add(total, weights);
    }
    totals[r] = sum(total);
    if (scoring.sinks) {
      float weights[LANES];
      store(weights, exponential(sub(every(sink), top)));
      totals[r] += weights[0];
    }
    std::fill(queries[r].out, queries[r].out + dim, 0.0f);
  }
  for (const Part &part : parts)
    each_tile(pool, layer, head, 1, part, scratch, [&](int64_t first, const float *const *values, const Next *ahead) {
      for (int r = part.row + part.rows - 1; r >= part.row && limits[r] > first; --r) {
        const int64_t before = std::max<int64_t>(0, low_of(r) - first), end = std::min<int64_t>(LANES, limits[r] - first);
        if (WINDOWED && before >= end) continue;
        weigh_any(dim / LANES, &scratch.scores[r * padded + first - base + before], values + before, end - before,
                  queries[r].out, ahead);
        ahead = nullptr;
      }
    });
  for (int r = 0; r < count; ++r)
    for (int64_t d = 0; d < dim; ++d) queries[r].out[d] /= totals[r];
}

}  // namespace headrace

using namespace headrace;

// Rotated qkv of consecutive sequences: `counts[i]` rows at the end of `contexts[i]` tokens, whose blocks are
// tables[starts[i] ..]; those before the window of all its rows are not read. window 0: all tokens. sinks [heads] or
// null. out [rows, heads * head_dim] is written for these rows only.
HEADRACE_API void headrace_attend(const float *qkv, int64_t heads, int64_t sequences, const int64_t *counts,
                                const int64_t *contexts, const int64_t *starts, const int64_t *tables, uint8_t *data,
                                int storage, int64_t kv_heads, int64_t layers, int64_t block_size, int64_t head_dim,
                                int64_t layer, int64_t window, float scale, float softcap, const float *sinks,
                                float *out, int threads) {
  const Pool pool{data, storage, kv_heads, layers, block_size, head_dim};
  const Scoring scoring{scale, softcap, sinks};
  const int64_t group = heads / kv_heads;
  const std::vector<Item> items =
      items_of(sequences, counts, contexts, starts, tables, block_size, kv_heads, group, window, threads);
  each((int64_t)items.size(), threads, [&](int64_t i) {
    static thread_local Scratch scratch;
    const Item &item = items[i];
    Query queries[ROWS_AT_ONCE] = {};
    int count = 0;
    std::vector<Part> parts;
    if (item.shared) parts.push_back({nullptr, item.shared, item.shared, 0, 0});
    for (const Member &member : item.members) {
      const int begin = count;
      for (int64_t at = member.first; at < member.end; ++at, ++count) {
        const int64_t row = member.row + at / group, h = item.head * group + at % group;
        const int64_t limit = contexts[member.sequence] - counts[member.sequence] + at / group + 1;
        const int64_t low = window ? std::max<int64_t>(0, limit - window) : 0;
        queries[count] = {qkv + (row * (heads + 2 * kv_heads) + h) * head_dim, out + (row * heads + h) * head_dim, low,
                          limit, h};
      }
      const int64_t *table = tables + starts[member.sequence], from = down(queries[begin].low);
      parts.push_back({table, std::max(item.shared, from), queries[count - 1].limit, begin, count - begin});
      if (item.shared) {
        // What they share is read from where the first of them sees it, by that one's table.
        if (!parts[0].table || from < parts[0].from) {
          parts[0].table = table;
          parts[0].from = std::min(from, item.shared);
        }
        parts[0].rows = count;
      }
    }
    (window ? attend<true> : attend<false>)(pool, layer, item.head, parts, queries, count, scoring, scratch);
  });
}
