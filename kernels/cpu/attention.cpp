// Attention over paged KV, in 32 bits.
//
// Keys and values are read where they lie (pool.h). A query's bits depend on its own prefix alone:
//
//   scores    per key, one chain of fused multiply-adds over head_dim; keys sixteen at a time, transposed
//   weights   e^(score - largest); their sum lane by lane of sixteen from position 0
//   answer    one chain of fused multiply-adds over the keys, first to last
//
// Of rows in 8 bits the very codes are multiplied: a key's scale multiplies its score, a value's scale its weight in the
// answer, and no number is rounded for being widened.
//
// Under a window a query sees the last so many tokens, itself included: tiles before it are not read, and lanes stay
// those of a token's position. A soft cap makes cap * tanh(score / cap) of a score; a head's sink is one more score of
// its softmax, without a value.
//
// The query heads of a KV head, and a few tokens of a prompt, are computed side by side, so that a key is read and
// transposed once for all of them. A chain waits for itself, so several are under way: of a few rows, and with many
// registers of two tiles.

#include <type_traits>
#include <vector>

#include "crew.h"
#include "items.h"
#include "pool.h"
#include "transpose.h"

namespace headrace {

#if defined(__AVX512F__)
constexpr int TILES = 2, GROUPS_AHEAD = 2, ROWS_TO_SCORE = 4, ROWS_TO_WEIGH = 6, WIDEST = 4;
#else
constexpr int TILES = 1, GROUPS_AHEAD = 4, ROWS_TO_SCORE = 4, ROWS_TO_WEIGH = 2, WIDEST = 2;
#endif

// Sixteen numbers as they lie, times UNIT: floats, int8, E4M3.
static Floats wide(const float *p) { return load(p); }
static Floats wide(const int8_t *p) { return from_int8(p); }
static Floats wide(const uint8_t *p) { return from_e4m3_over_256(p); }
template <typename E>
constexpr float UNIT = 1.0f;
template <>
constexpr float UNIT<uint8_t> = 256.0f;

// Tiles that are computed together. Blocks lie anywhere, so the processor cannot guess what comes next; asked for a row
// at a time, between pieces of work, it is there when its turn comes.
struct Group {
  Tile tiles[TILES];
  int64_t row_bytes;
  bool scaled;
  // Inlined, or GCC takes a function that only prefetches for one without effects, and drops its calls.
  __attribute__((always_inline)) void fetch(int i) const {
    for (const Tile &tile : tiles) {
      if (!tile.rows[i]) continue;
      for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(tile.rows[i] + at, 0, 2);
      if (scaled && (i == 0 || i == LANES - 1)) __builtin_prefetch(tile.scales[i], 0, 2);
    }
  }
};

// The scales of a tile's rows, times `factor`: none where one is not finite, since not all codes are then numbers.
static Floats scales_of(const Tile &tile, float factor) {
  Floats scales;
  if (tile.scales[LANES - 1] && tile.scales[LANES - 1] == tile.scales[0] + LANES - 1) {
    scales = load(tile.scales[0]);
  } else {
    float some[LANES];
    for (int i = 0; i < LANES; ++i) some[i] = tile.scales[i] ? *tile.scales[i] : 0.0f;
    scales = load(some);
  }
  return mul(add(scales, sub(scales, scales)), every(factor));
}

// `keys`: of each tile [head_dim][16]; `factors` of each tile multiply its scores.
template <int ROWS, int MANY, typename E>
static void score(const float *const *q, const E *keys, int64_t head_dim, const Floats *factors, float *const *to,
                  const Group *next) {
  Floats total[MANY][ROWS];
  for (int t = 0; t < MANY; ++t)
    for (int r = 0; r < ROWS; ++r) total[t][r] = every(0.0f);
  const int64_t part = head_dim / LANES;
  for (int i = 0; i < LANES; ++i) {
    if (next) next->fetch(i);
    for (int64_t d = i * part; d < (i + 1) * part; ++d) {
      for (int t = 0; t < MANY; ++t) {
        const Floats column = wide(keys + (t * head_dim + d) * LANES);
        for (int r = 0; r < ROWS; ++r) total[t][r] = fma(every(q[r][d]), column, total[t][r]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int t = 0; t < MANY; ++t) store(to[r] + t * LANES, mul(total[t][r], factors[t]));
}

template <int ROWS, int MANY, typename E>
static void score_some(int rows, const float *const *q, const E *keys, int64_t head_dim, const Floats *factors,
                       float *const *to, const Group *next) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return score_some<ROWS - 1, MANY>(rows, q, keys, head_dim, factors, to, next);
  score<ROWS, MANY>(q, keys, head_dim, factors, to, next);
}

// Add to columns [from, from + 16 * WIDTH) of each row's sums what `count` values weigh in it.
template <int ROWS, int WIDTH, typename E>
static void weigh(const float *const *weights, const E *const *values, int64_t count, float *const *sums, int64_t from,
                  const Group *next) {
  Floats total[ROWS][WIDTH];
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < WIDTH; ++j) total[r][j] = load(sums[r] + from + j * LANES);
  for (int64_t t = 0; t < count; ++t) {
    if (next) next->fetch((int)t);
    Floats value[WIDTH];
    for (int j = 0; j < WIDTH; ++j) value[j] = wide(values[t] + from + j * LANES);
    for (int r = 0; r < ROWS; ++r) {
      const Floats weight = every(weights[r][t]);
      for (int j = 0; j < WIDTH; ++j) total[r][j] = fma(weight, value[j], total[r][j]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < WIDTH; ++j) store(sums[r] + from + j * LANES, total[r][j]);
}

template <int ROWS, typename E>
static void weigh_some(int rows, int64_t head_dim, const float *const *weights, const E *const *values, int64_t count,
                       float *const *sums, const Group *next) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return weigh_some<ROWS - 1>(rows, head_dim, weights, values, count, sums, next);
  int64_t d = 0;
  for (; d + WIDEST * LANES <= head_dim; d += WIDEST * LANES, next = nullptr)
    weigh<ROWS, WIDEST>(weights, values, count, sums, d, next);
  for (; d < head_dim; d += LANES, next = nullptr) weigh<ROWS, 1>(weights, values, count, sums, d, next);
}

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

// What `visit` is given: the position of a group's first token, how many tiles it has, their rows (zeros after the
// last) and scales, and the group to ask memory for meanwhile. `then` walks what is read next: where the part ends, its
// first tiles are asked for, or short sequences would wait for memory at the beginning of their keys and of their values.
template <typename E, typename Visit>
static void each_group(const Pool &pool, Walk walk, Walk then, const Part &part, Scratch &scratch, Visit visit) {
  const auto fill = [&](Tile &tile) { (walk.over() ? then : walk).tile(tile); };
  Group groups[GROUPS_AHEAD + 1];
  for (Group &group : groups) {
    group.row_bytes = pool.row_bytes(), group.scaled = pool.scaled();
    for (Tile &tile : group.tiles) fill(tile);
  }
  const E *rows[TILES * LANES];
  for (int64_t first = part.from, turn = 0; first < part.to; first += TILES * LANES) {
    Group &here = groups[turn], &last = groups[(turn + GROUPS_AHEAD) % (GROUPS_AHEAD + 1)];
    const int many = (int)std::min<int64_t>(TILES, (part.to - first + LANES - 1) / LANES);
    for (int i = 0; i < many * LANES; ++i) {
      const uint8_t *row = here.tiles[i / LANES].rows[i % LANES];
      if (!row) {
        rows[i] = (const E *)scratch.zeros.data();
      } else if constexpr (std::is_same_v<E, float>) {
        rows[i] = widened(pool, row, scratch.wide.data() + i * pool.head_dim);
      } else {
        rows[i] = (const E *)row;
      }
    }
    visit(first, many, rows, here, &last);
    for (Tile &tile : here.tiles) fill(tile);
    turn = (turn + 1) % (GROUPS_AHEAD + 1);
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
// ascend within a part. Without WINDOWED every `low` is 0, and nothing is computed for it. E: what the pool's rows are of
// as they are multiplied.
template <bool WINDOWED, typename E>
static void attend(const Pool &pool, int64_t layer, int64_t head, const std::vector<Part> &parts, const Query *queries,
                   int count, const Scoring &scoring, Scratch &scratch) {
  const int64_t dim = pool.head_dim;
  const float *q[PROMPT_ROWS];
  int64_t limits[PROMPT_ROWS], least = queries[0].low, most = 0;
  for (int r = 0; r < count; ++r) {
    q[r] = queries[r].q, limits[r] = queries[r].limit;
    least = std::min(least, queries[r].low), most = std::max(most, limits[r]);
  }
  const auto low_of = [=](int r) -> int64_t { return WINDOWED ? queries[r].low : 0; };
  const int64_t base = WINDOWED ? down(least) : 0;
  const int64_t padded = (most - base + LANES - 1) / LANES * LANES;
  constexpr bool SCALED = !std::is_same_v<E, float>;
  using Word = std::conditional_t<SCALED, uint8_t, float>;
  scratch.scores.resize(count * padded);
  scratch.keys.resize(TILES * dim * LANES);
  scratch.wide.resize(TILES * dim * LANES);
  scratch.zeros.assign(dim, 0.0f);
  // What is read, in order: each part's keys, then each part's values, then nothing.
  const auto walk_of = [&](size_t turn) {
    const Part &part = parts[turn % parts.size()];
    const size_t which = turn / parts.size();
    return Walk(pool, part.table, head, layer, (int)which, part.from, which < 2 ? part.to : part.from);
  };
  for (size_t at = 0; at < parts.size(); ++at) {
    const Part &part = parts[at];
    each_group<E>(pool, walk_of(at), walk_of(at + 1), part, scratch, [&](int64_t first, int many, const E *const *keys,
                                                                         const Group &here, const Group *ahead) {
      Word *turned = (Word *)scratch.keys.data();
      Floats factors[TILES];
      for (int t = 0; t < many; ++t) {
        transpose((const Word *const *)keys + t * LANES, dim, turned + t * dim * LANES);
        factors[t] = SCALED ? scales_of(here.tiles[t], UNIT<E> * scoring.scale) : every(scoring.scale);
      }
      int end = part.row + part.rows;
      float *to[PROMPT_ROWS];
      for (int r = part.row; r < end; ++r) to[r] = &scratch.scores[r * padded + first - base];
      int r = part.row;
      // These see none of the keys: within a sequence the first rows, and under a window the last ones.
      while (r < end && limits[r] <= first) ++r;
      while (r < end && low_of(end - 1) >= first + many * LANES) --end;
      for (; r < end; r += ROWS_TO_SCORE, ahead = nullptr) {
        const int some = std::min(ROWS_TO_SCORE, end - r);
        const auto chosen = many == TILES ? score_some<ROWS_TO_SCORE, TILES, E> : score_some<ROWS_TO_SCORE, 1, E>;
        chosen(some, q + r, (const E *)turned, dim, factors, to + r, ahead);
      }
    });
  }
  float totals[PROMPT_ROWS];
  for (int r = 0; r < count; ++r) {
    // From here on positions count from the tile in which the row's first token lies.
    const int64_t skipped = down(low_of(r)), low = low_of(r) - skipped, limit = limits[r] - skipped;
    float *scores = &scratch.scores[r * padded + skipped - base];
    const int64_t end = (limit + LANES - 1) / LANES * LANES;
    if (scoring.softcap != 0.0f) cap(scores, end, scoring.softcap);
    // Only the first tile and the last one have lanes that the row does not see.
    const auto seen = [=](Floats of_tile, int64_t t, float other) {
      if (t >= low && t + LANES <= limit) return of_tile;
      return only(of_tile, (int)std::max<int64_t>(0, low - t), (int)std::min<int64_t>(LANES, limit - t), other);
    };
    Floats most_of = every(-INFINITY);
    for (int64_t t = 0; t < end; t += LANES) most_of = larger(most_of, seen(load(scores + t), t, -INFINITY));
    const float sink = scoring.sinks ? scoring.sinks[queries[r].head] : -INFINITY, best = largest(most_of);
    const Floats top = every(best < sink ? sink : best);
    Floats total = every(0.0f);
    for (int64_t t = 0; t < end; t += LANES) {
      const Floats weights = seen(exponential(sub(load(scores + t), top)), t, 0.0f);
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
  for (size_t at = 0; at < parts.size(); ++at) {
    const Part &part = parts[at];
    const size_t turn = parts.size() + at;
    each_group<E>(pool, walk_of(turn), walk_of(turn + 1), part, scratch, [&](int64_t first, int many, const E *const *values,
                                                                             const Group &here, const Group *ahead) {
      for (int t = 0; t < many; ++t, first += LANES, values += LANES) {
        const auto before_of = [=](int r) { return std::max<int64_t>(0, low_of(r) - first); };
        const auto end_of = [=](int r) { return std::min<int64_t>(LANES, limits[r] - first); };
        const Floats factors = SCALED ? scales_of(here.tiles[t], UNIT<E>) : every(1.0f);
        for (int last = part.row + part.rows - 1; last >= part.row && limits[last] > first;) {
          const int64_t before = before_of(last), end = end_of(last);
          const float *weights[ROWS_TO_WEIGH];
          float *sums[ROWS_TO_WEIGH];
          int some = 0;
          // Rows that see the same of these tokens.
          for (; some < ROWS_TO_WEIGH && last >= part.row && before_of(last) == before && end_of(last) == end; ++some) {
            float *own = &scratch.scores[last * padded + first - base];
            if (SCALED) store(own, mul(load(own), factors));
            weights[some] = own + before, sums[some] = queries[last--].out;
          }
          if (before >= end) continue;
          weigh_some<ROWS_TO_WEIGH>(some, dim, weights, values + before, end - before, sums, ahead);
          ahead = nullptr;
        }
      }
    });
  }
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
    Query queries[PROMPT_ROWS] = {};
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
    const auto chosen = pool.storage == INT8   ? (window ? attend<true, int8_t> : attend<false, int8_t>)
                        : pool.storage == E4M3 ? (window ? attend<true, uint8_t> : attend<false, uint8_t>)
                                               : (window ? attend<true, float> : attend<false, float>);
    chosen(pool, layer, item.head, parts, queries, count, scoring, scratch);
  });
}
