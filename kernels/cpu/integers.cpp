// x W^T where W is codes: x is rounded to integers, 32 columns with one scale, and these are multiplied by the codes in
// integers, whose sum over 32 columns (or 16, of H8 and X8) is scaled in 32-bit floats:
//
//   x = scale_x * n, rounded to the nearest
//   sum of x w = scale_x * (scale_w * sum of n * code) + offset_w * (scale_x * sum of n)
//
// 16 bits, |n| <= 32639: half of 2^-15 of the largest of 32 is lost at most. 23 bits, |n| <= 3686000: half of 2^-21.8, which
// is no more than what sums of 32-bit floats lose. An integer is cut into terms that a processor's instruction multiplies:
//
//   bytes, of 4 columns at a time     16 bits: n = 256 m + l          23 bits: n = 2^15 h + 128 m + l
//   words, of 2 columns at a time     16 bits: n                      23 bits: n = 2^15 h + (128 m + l)
//   bytes, in pairs of columns                                        23 bits, 4-bit codes: pairs.h
//
// With 4-bit codes 23 bits are 2^15 h + 256 m + l. -128 <= h, m, l < 128; of 23 bits |h| <= 112, and the middle term (the
// lowest of 8-bit codes) is of 7 bits. Bytes are multiplied by bytes without a sign, so 8-bit codes
// have 128 added, and their sums begin with that much less. The sums of terms are exact in 32 bits; that of n, of 4-bit
// codes, is too: 32 * 3686000 * 15 < 2^31. Of 8-bit codes it is made of two floats. Integers have no order, and the groups of a row are added first to last. So the
// bits of a product depend on its row of x and its row of W alone: not on the other rows, the number of threads, or the
// processor.

#include "integers.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "crew.h"
#include "ints.h"
#include "pairs.h"

namespace headrace {

constexpr int64_t SHARED_ROWS = 32;  // fewer are rounded before another thread could take a part

constexpr bool by_words(int arithmetic) { return arithmetic == BITS_16_BY_WORDS || arithmetic == BITS_23_BY_WORDS; }
constexpr bool is_wide(int arithmetic) { return arithmetic == BITS_23 || arithmetic == BITS_23_BY_WORDS; }
constexpr int terms_of(int arithmetic) { return (by_words(arithmetic) ? 1 : 2) + (is_wide(arithmetic) ? 1 : 0); }
constexpr int low_bits(int arithmetic, bool is_q4) { return is_wide(arithmetic) && !is_q4 ? 7 : LOW_BITS; }
constexpr int most_of(int arithmetic) { return is_wide(arithmetic) ? 3686000 : 32639; }
constexpr int bytes_of_terms(int arithmetic) { return terms_of(arithmetic) * GROUP * (by_words(arithmetic) ? 2 : 1); }

static_assert((int64_t)GROUP * 3686000 * 15 < (int64_t)1 << 31, "sums of products with 4-bit codes fit 32 bits");
static_assert((int64_t)GROUP * 32639 * 255 < (int64_t)1 << 31, "sums of a term and 8-bit codes fit 32 bits");
static_assert((112 << HIGH_BITS) + (1 << (HIGH_BITS - 1)) - 128 > 3686000 + 1, "the highest term is at most 112");

// The rows that are multiplied at a time, and the vectors of a panel: what the registers hold.
#if defined(__AVX512F__)
constexpr int tile_rows(int arithmetic) { return is_wide(arithmetic) ? 4 : 6; }
constexpr int AT_ONCE = 2;
#else
constexpr int tile_rows(int arithmetic) { return is_wide(arithmetic) ? 2 : 3; }
constexpr int AT_ONCE = 1;
#endif
constexpr int SPAN = VECTORS / AT_ONCE;  // a tile has every SPAN-th vector of a panel

// 32 integers -> their terms, one term of all after the other; words in the order 0, 2, 1, 3 of each four.
template <int ARITHMETIC, int LOW>
static void cut(const Ints (&n)[2], Ints (&high)[2], Ints (&middle)[2], uint8_t *terms) {
  constexpr bool WIDE = is_wide(ARITHMETIC);
  constexpr int MIDDLE = HIGH_BITS - LOW;
  int32_t words[GROUP * 2];
  for (int i = 0; i < 2; ++i) {
    const Ints low = low_part<LOW>(n[i]), more = signed_right<LOW>(less(n[i], low));
    middle[i] = WIDE ? low_part<MIDDLE>(more) : more;
    high[i] = signed_right<MIDDLE>(less(more, middle[i]));
    if (by_words(ARITHMETIC)) {
      store(words + i * LANES, WIDE ? high[i] : n[i]);
      if (WIDE) store(words + GROUP + i * LANES, add(left<LOW>(middle[i]), low));
    } else {
      if (WIDE) store_bytes(terms + i * LANES, high[i]);
      store_bytes(terms + (WIDE ? GROUP : 0) + i * LANES, middle[i]);
      store_bytes(terms + (WIDE ? 2 * GROUP : GROUP) + i * LANES, low);
    }
  }
  for (int i = 0; by_words(ARITHMETIC) && i < terms_of(ARITHMETIC) * GROUP; ++i)
    ((int16_t *)terms)[(i & ~3) + (i >> 1 & 1) + (i & 1) * 2] = (int16_t)words[i];
}

// What is no number, or infinite, makes the scale none. `in_pairs`: many rows are multiplied as pairs.h says.
template <int ARITHMETIC, bool IS_Q4>
static void round_group(const float *x, int parts, bool in_pairs, uint8_t *terms, Beside &beside) {
  constexpr bool is_shifted = !IS_Q4;
  uint32_t bits[GROUP], most = 0;
  std::memcpy(bits, x, sizeof bits);
  for (int i = 0; i < GROUP; ++i) most = std::max(most, bits[i] & 0x7fffffffu);
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  const bool is_finite = most < 0x7f800000u;
  beside = {};
  if (!is_finite || largest < 0x1p-100f) {  // below, 1 / scale would overflow
    std::memset(terms, 0, bytes_of_terms(ARITHMETIC));
    beside.scale = beside.sums[0] = beside.sums[1] = is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const float limit = (float)most_of(ARITHMETIC);
  const Floats inverse = every(limit / largest);
  const Ints whole[2] = {to_ints(mul(load(x), inverse)), to_ints(mul(load(x + LANES), inverse))};
  Ints high[2], middle[2];
  cut<ARITHMETIC, low_bits(ARITHMETIC, IS_Q4)>(whole, high, middle, terms);
  beside.scale = largest / limit;
  if (ARITHMETIC == BITS_23 && IS_Q4 && in_pairs) beside.starts[0][0] = start_of_pairs(whole, high, middle);
  int32_t n[GROUP];
  for (int i = 0; i < 2; ++i) store(n + i * LANES, whole[i]);
  const int count = GROUP / parts;
  for (int part = 0; part < parts; ++part) {
    int32_t sum = 0;
    for (int i = 0; i < count; ++i) sum += n[part * count + i];
    beside.sums[part] = beside.scale * (float)sum;
    for (int term = 0; is_shifted && term < terms_of(ARITHMETIC); ++term) {
      int32_t of_term = 0;
      for (int i = term * GROUP + part * count; i < term * GROUP + (part + 1) * count; ++i)
        of_term += by_words(ARITHMETIC) ? ((const int16_t *)terms)[i] : ((const int8_t *)terms)[i];
      beside.starts[part][term] = -128 * of_term;
    }
  }
}

template <int ARITHMETIC>
static WholeRows rounded(const float *x, int64_t rows, int64_t columns, int kind, int threads) {
  constexpr int SIZE = bytes_of_terms(ARITHMETIC);
  static thread_local std::vector<uint8_t> terms;
  static thread_local std::vector<Beside> besides;
  terms.resize(std::max<size_t>(terms.size(), rows * columns / GROUP * SIZE));
  besides.resize(std::max<size_t>(besides.size(), rows * columns / GROUP));
  uint8_t *to = terms.data();
  Beside *beside = besides.data();
  const bool in_pairs = has_pairs() && rows > tile_rows(ARITHMETIC);
  constexpr int64_t TOGETHER = 16;
  each((rows + TOGETHER - 1) / TOGETHER, rows < SHARED_ROWS ? 1 : threads, [=](int64_t i) {
    // Row after row of a group: those of other groups lie at distances that share few lines of the first-level cache.
    const int64_t first = i * TOGETHER, end = std::min(rows, first + TOGETHER);
    for (int64_t g = 0; g < columns / GROUP; ++g)
      for (int64_t r = first; r < end; ++r) {
        const float *from = x + r * columns + g * GROUP;
        uint8_t *at = to + (g * rows + r) * SIZE;
        fetch(from + GROUP), fetch(from + GROUP + LANES);
        if (kind == Q4)
          round_group<ARITHMETIC, true>(from, 1, in_pairs, at, beside[g * rows + r]);
        else
          round_group<ARITHMETIC, false>(from, parts_of(kind), false, at, beside[g * rows + r]);
      }
  });
  return {to, beside, rows, SIZE};
}

WholeRows round_rows(const float *x, int64_t rows, int64_t columns, int kind, int arithmetic, int threads) {
  switch (arithmetic) {
    case BITS_16: return rounded<BITS_16>(x, rows, columns, kind, threads);
    case BITS_23: return rounded<BITS_23>(x, rows, columns, kind, threads);
    case BITS_16_BY_WORDS: return rounded<BITS_16_BY_WORDS>(x, rows, columns, kind, threads);
    default: return rounded<BITS_23_BY_WORDS>(x, rows, columns, kind, threads);
  }
}

// The codes of four columns as bytes without a sign, of one vector of a panel.
template <int KIND>
inline Ints quad_of(const uint8_t *quad, int vector) {
  if (KIND != Q4) return differing(load_ints(quad + vector * LANES * 4), every((int32_t)0x80808080));
  const Ints bytes = load_ints(quad + vector % 2 * LANES * 4), low = every(0x0f0f0f0f);
  return vector < VECTORS / 2 ? both(bytes, low) : both(right<4>(bytes), low);
}

inline int32_t four_bytes(const uint8_t *p) {
  int32_t found;
  std::memcpy(&found, p, sizeof found);
  return found;
}

// The sum of n * code of one vector, as a float.
template <int KIND, int ARITHMETIC>
inline Floats sum_of(const Ints *total) {
  constexpr bool WIDE = is_wide(ARITHMETIC);
  const Ints *rest = total + WIDE;
  const Ints low =
      by_words(ARITHMETIC) ? rest[0] : add(left<low_bits(ARITHMETIC, KIND == Q4)>(rest[0]), rest[by_words(ARITHMETIC) ? 0 : 1]);
  if (!WIDE) return to_floats(low);
  if (KIND == Q4) return to_floats(add(left<HIGH_BITS>(total[0]), low));
  return fma(to_floats(total[0]), every((float)(1 << HIGH_BITS)), to_floats(low));
}

// One part of 32 columns: ROWS rows by the vectors of one tile. Loops that GCC does not unroll early keep totals in memory.
template <int ROWS, int KIND, int ARITHMETIC, int COUNT, typename Quad>
static inline void tile_of(const uint8_t *x, const Beside *beside, const float *by, int part, int tile, float *sums,
                           Quad quad) {
  constexpr int TERMS = terms_of(ARITHMETIC), SIZE = bytes_of_terms(ARITHMETIC), QUADS = GROUP / 4 / parts_of(KIND);
  Ints total[ROWS][COUNT][TERMS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; ++j)
#pragma GCC unroll 8
      for (int t = 0; t < TERMS; ++t) total[r][j][t] = every(KIND == Q4 ? 0 : beside[r].starts[part][t]);
  for (int q = part * QUADS; q < (part + 1) * QUADS; ++q) {
    Ints w[COUNT];
    quad(q, w);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int t = 0; t < TERMS; ++t) {
        const uint8_t *at = x + r * SIZE + (t * GROUP + 4 * q) * (by_words(ARITHMETIC) ? 2 : 1);
        if (by_words(ARITHMETIC)) {
          const Ints even = every(four_bytes(at)), odd = every(four_bytes(at + 4)), low = every(0x00ff00ff);
#pragma GCC unroll 8
          for (int j = 0; j < COUNT; ++j) {
            total[r][j][t] = add_words(total[r][j][t], both(w[j], low), even);
            total[r][j][t] = add_words(total[r][j][t], both(right<8>(w[j]), low), odd);
          }
        } else {
          const Ints bytes = every(four_bytes(at));
#pragma GCC unroll 8
          for (int j = 0; j < COUNT; ++j) total[r][j][t] = add_bytes(total[r][j][t], w[j], bytes);
        }
      }
  }
  by += part * part_floats(KIND);
#pragma GCC unroll 8
  for (int j = 0; j < COUNT; ++j) {
    const int column = (tile + j * (VECTORS / COUNT)) * LANES;
    const Floats scale = load(by + column), offset = has_offsets(KIND) ? load(by + PANEL + column) : scale;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      float *at = sums + r * PANEL + column;
      Floats sum = fma(mul(sum_of<KIND, ARITHMETIC>(total[r][j]), scale), every(beside[r].scale), load(at));
      if (has_offsets(KIND)) sum = fma(offset, every(beside[r].sums[part]), sum);
      store(at, sum);
    }
    // One vector after the other: mixed, they need more registers than there are.
    __asm__ volatile("" ::: "memory");
  }
}

// ROWS rows by 32 columns, where the codes lie.
template <int ROWS, int KIND, int ARITHMETIC>
static void few_rows(const uint8_t *x, const Beside *beside, const uint8_t *group, float *sums) {
  constexpr int COUNT = ROWS * terms_of(ARITHMETIC) <= 3 * AT_ONCE ? 2 * AT_ONCE : AT_ONCE;
  const float *by = (const float *)group;
  const uint8_t *codes = (const uint8_t *)(by + parts_of(KIND) * part_floats(KIND));
  for (int part = 0; part < parts_of(KIND); ++part)
    for (int tile = 0; tile < VECTORS / COUNT; ++tile)
      tile_of<ROWS, KIND, ARITHMETIC, COUNT>(x, beside, by, part, tile, sums, [=](int q, Ints(&w)[COUNT]) {
        constexpr int64_t STEP = group_bytes(KIND) / (GROUP / 4);
        for (int64_t at = q * STEP; tile == 0 && at < (q + 1) * STEP; at += 64) fetch(group + AHEAD + at);
        for (int j = 0; j < COUNT; ++j) w[j] = quad_of<KIND>(codes + q * 4 * code_bytes(KIND), tile + j * (VECTORS / COUNT));
      });
}

// The same from bytes [8][64][4] that were made of them before.
template <int ROWS, int KIND, int ARITHMETIC>
static void more_rows(const uint8_t *x, const Beside *beside, const uint8_t *group, const uint8_t *quads, float *sums) {
  if (KIND == Q4 && ARITHMETIC == BITS_23 && has_pairs()) {
    for (int j = 0; j < SPAN; ++j) multiply_pairs<ROWS, AT_ONCE>(x, beside, (const float *)group, quads, j, sums);
    return;
  }
  for (int part = 0; part < parts_of(KIND); ++part)
    for (int tile = 0; tile < SPAN; ++tile)
      tile_of<ROWS, KIND, ARITHMETIC, AT_ONCE>(
          x, beside, (const float *)group, part, tile, sums, [=](int q, Ints(&w)[AT_ONCE]) {
            for (int j = 0; j < AT_ONCE; ++j) w[j] = load_ints(quads + q * PANEL * 4 + (tile + j * SPAN) * LANES * 4);
          });
}

template <int ROWS, int KIND, int ARITHMETIC>
static void some_rows(int rows, const uint8_t *x, const Beside *beside, const uint8_t *group, const uint8_t *quads,
                      float *sums) {
  if (ROWS > 1 && rows < ROWS)
    return some_rows<(ROWS > 1 ? ROWS - 1 : 1), KIND, ARITHMETIC>(rows, x, beside, group, quads, sums);
  if (quads)
    more_rows<ROWS, KIND, ARITHMETIC>(x, beside, group, quads, sums);
  else
    few_rows<ROWS, KIND, ARITHMETIC>(x, beside, group, sums);
}

template <int KIND>
static void widen_group(const uint8_t *group, bool in_pairs, uint8_t *quads) {
  const uint8_t *codes = group + parts_of(KIND) * part_floats(KIND) * sizeof(float);
  for (int q = 0; q < GROUP / 4; ++q)
    for (int j = 0; j < VECTORS; ++j)
      store(quads + (q * VECTORS + j) * LANES * 4, quad_of<KIND>(codes + q * 4 * code_bytes(KIND), j));
  if (in_pairs) make_pairs(quads);
  for (int64_t at = 0; at < group_bytes(KIND); at += 64) fetch(group + AHEAD + at);
}

template <int KIND, int ARITHMETIC>
static void multiply_codes(const WholeRows &x, int64_t rows, int64_t groups, const uint8_t *panel, float *sums) {
  constexpr int HEIGHT = tile_rows(ARITHMETIC);
  alignas(64) uint8_t quads[GROUP * PANEL + PANEL * sizeof(int32_t)];
  const bool in_pairs = KIND == Q4 && ARITHMETIC == BITS_23 && has_pairs();
  for (int64_t g = 0; g < groups; ++g, panel += group_bytes(KIND)) {
    const WholeRows here = x.from(g * x.rows);
    // Few rows: codes are multiplied where they lie. More go in tiles of nearly the same height.
    const bool is_few = rows <= HEIGHT;
    if (!is_few) widen_group<KIND>(panel, in_pairs, quads);
    int64_t tiles = (rows + HEIGHT - 1) / HEIGHT, some = 0;
    for (int64_t r = 0; r < rows; r += some, --tiles) {
      some = (rows - r + tiles - 1) / tiles;
      some_rows<HEIGHT, KIND, ARITHMETIC>((int)some, here.terms + r * x.term_bytes, here.beside + r, panel,
                                          is_few ? nullptr : quads, sums + r * PANEL);
    }
  }
}

template <int KIND>
static void multiply_codes(const WholeRows &x, int64_t rows, int64_t groups, const uint8_t *panel, int arithmetic,
                           float *sums) {
  switch (arithmetic) {
    case BITS_16: return multiply_codes<KIND, BITS_16>(x, rows, groups, panel, sums);
    case BITS_23: return multiply_codes<KIND, BITS_23>(x, rows, groups, panel, sums);
    case BITS_16_BY_WORDS: return multiply_codes<KIND, BITS_16_BY_WORDS>(x, rows, groups, panel, sums);
    default: return multiply_codes<KIND, BITS_23_BY_WORDS>(x, rows, groups, panel, sums);
  }
}

void multiply_whole(int kind, const WholeRows &x, int64_t rows, int64_t columns, const uint8_t *panel, int arithmetic,
                    float *sums) {
  const int64_t groups = columns / GROUP;
  switch (kind) {
    case Q4: return multiply_codes<Q4>(x, rows, groups, panel, arithmetic, sums);
    case Q8: return multiply_codes<Q8>(x, rows, groups, panel, arithmetic, sums);
    case A8: return multiply_codes<A8>(x, rows, groups, panel, arithmetic, sums);
    case H8: return multiply_codes<H8>(x, rows, groups, panel, arithmetic, sums);
    default: return multiply_codes<X8>(x, rows, groups, panel, arithmetic, sums);
  }
}

int possible(int arithmetic) {
  if (multiplies_bytes()) return arithmetic;
  return arithmetic == BITS_16 ? BITS_16_BY_WORDS : arithmetic == BITS_23 ? BITS_23_BY_WORDS : arithmetic;
}

}  // namespace headrace
