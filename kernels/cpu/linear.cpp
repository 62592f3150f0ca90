// x W^T + b with W in panels (panel.h), in 32 bits.
//
// Codes are widened, 32 columns at a time, into a buffer that stays in the first-level cache. Each product is the sum, first
// to last, of chains of fused multiply-adds over 32 columns. So its bits depend on its row of x and its row of W alone: not on
// the other rows, the number of threads, the processor, or how W is kept.
//
// With `whole`, codes are multiplied in integers instead (integers.cpp), with bits of their own and the same promise.

#include <algorithm>
#include <vector>

#include "crew.h"
#include "integers.h"
#include "ints.h"
#include "panel.h"

namespace headrace {

constexpr int FEW_ROWS = 4;
constexpr int64_t PART_ROWS = 64;  // of products in integers

// The vectors of a panel that few rows are multiplied by at a time, each STRIDE-th: what the registers hold.
#if defined(__AVX512F__)
constexpr int AT_ONCE = VECTORS;
#else
constexpr int AT_ONCE = VECTORS / 2;
#endif
constexpr int STRIDE = VECTORS / AT_ONCE;

// What a column of codes of one part is widened by, of the vectors from `first` on.
template <int KIND>
struct Factors {
  Floats scale[AT_ONCE], offset[AT_ONCE];
  int first;

  inline Factors(const float *at, int first) : first(first) {
    for (int j = 0; j < AT_ONCE; ++j) {
      scale[j] = load(at + place(j));
      if (has_offsets(KIND)) offset[j] = load(at + PANEL + place(j));
    }
  }

  inline int place(int j) const { return (first + j * STRIDE) * LANES; }

  // A column of four, which lie together (or, of 8-bit floats, one after the other).
  template <int COLUMN>
  inline void widen(const uint8_t *quad, Floats (&w)[AT_ONCE]) const {
    if (KIND == Q4) {
      for (int j = 0; j < AT_ONCE / 2; ++j) {
        const Ints bytes = load_ints(quad + place(j) * 4), low = every(15);
        w[j] = to_floats(both(right<8 * COLUMN>(bytes), low));
        w[j + AT_ONCE / 2] = to_floats(both(right<8 * COLUMN + 4>(bytes), low));
      }
    } else {
      for (int j = 0; j < AT_ONCE; ++j)
        w[j] = KIND == F8 ? from_e4m3(quad + COLUMN * PANEL + place(j))
                          : to_floats(signed_right<24>(left<24 - 8 * COLUMN>(load_ints(quad + place(j) * 4))));
    }
    for (int j = 0; j < AT_ONCE; ++j) w[j] = has_offsets(KIND) ? fma(scale[j], w[j], offset[j]) : mul(scale[j], w[j]);
  }

  // use(k, column) for each column of a part, first to last.
  template <typename Use>
  inline void each_column(const uint8_t *codes, int part, Use use) const {
    constexpr int COLUMNS = GROUP / parts_of(KIND);
    Floats w[AT_ONCE];
    for (int k = part * COLUMNS; k < (part + 1) * COLUMNS; k += 4) {
      const uint8_t *quad = codes + k * code_bytes(KIND);
      widen<0>(quad, w), use(k, w);
      widen<1>(quad, w), use(k + 1, w);
      widen<2>(quad, w), use(k + 2, w);
      widen<3>(quad, w), use(k + 3, w);
    }
  }
};

// 32 columns of codes as floats [32][64].
template <int KIND>
static void widen_codes(const uint8_t *from, float *to) {
  const float *factors = (const float *)from;
  const uint8_t *codes = (const uint8_t *)(factors + parts_of(KIND) * part_floats(KIND));
  for (int part = 0; part < parts_of(KIND); ++part)
    for (int first = 0; first < STRIDE; ++first) {
      const Factors<KIND> by(factors + part * part_floats(KIND), first);
      by.each_column(codes, part, [&](int k, const Floats(&w)[AT_ONCE]) {
        if (first == 0) fetch(from + AHEAD + k * group_bytes(KIND) / GROUP);
        for (int j = 0; j < AT_ONCE; ++j) store(to + k * PANEL + by.place(j), w[j]);
      });
    }
}

// `count` columns of a panel as floats [count][64]; a view where they are floats already. Of codes, `count` is 32.
static const float *widen(int kind, const uint8_t *from, int count, float *to) {
  switch (kind) {
    case F32: return (const float *)from;
    case BF16: {
      const uint16_t *bits = (const uint16_t *)from;
      for (int at = 0; at < count * PANEL; at += LANES) store(to + at, from_bfloat16(bits + at));
      break;
    }
    case Q8: widen_codes<Q8>(from, to); break;
    case Q4: widen_codes<Q4>(from, to); break;
    case A8: widen_codes<A8>(from, to); break;
    case H8: widen_codes<H8>(from, to); break;
    case X8: widen_codes<X8>(from, to); break;
    default: widen_codes<F8>(from, to);
  }
  return to;
}

template <int ROWS, int WIDTH>
static inline void add_to(float *sums, const Floats (&total)[ROWS][WIDTH]) {
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < WIDTH; ++j) {
      float *at = sums + r * PANEL + j * LANES;
      store(at, add(load(at), total[r][j]));
    }
}

// Add `count` columns to ROWS rows of sums [ROWS][64].
template <int ROWS, int WIDTH>
static inline void multiply(const float *x, int64_t stride, const float *w, int count, float *sums) {
  Floats total[ROWS][WIDTH];
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < WIDTH; ++j) total[r][j] = every(0.0f);
  for (int k = 0; k < count; ++k) {
    Floats column[WIDTH];
    for (int j = 0; j < WIDTH; ++j) column[j] = load(w + k * PANEL + j * LANES);
    for (int r = 0; r < ROWS; ++r) {
      const Floats value = every(x[r * stride + k]);
      for (int j = 0; j < WIDTH; ++j) total[r][j] = fma(value, column[j], total[r][j]);
    }
  }
  add_to(sums, total);
}

template <int ROWS>
static void rows_of(const float *x, int64_t stride, const float *w, int count, float *sums) {
  for (int j = 0; j < VECTORS; j += TILE_VECTORS)
    multiply<ROWS, TILE_VECTORS>(x, stride, w + j * LANES, count, sums + j * LANES);
}

static void some_rows(int rows, const float *x, int64_t stride, const float *w, int count, float *sums) {
  switch (rows) {
    case 1: return rows_of<1>(x, stride, w, count, sums);
    case 2: return rows_of<2>(x, stride, w, count, sums);
    case 3: return rows_of<3>(x, stride, w, count, sums);
#if defined(__AVX512F__)
    case 4: return rows_of<4>(x, stride, w, count, sums);
    case 5: return rows_of<5>(x, stride, w, count, sums);
    default: return rows_of<6>(x, stride, w, count, sums);
#endif
  }
}

// Few rows: each weight is multiplied where it is widened, without a buffer between. The same chains, the same bits.
template <int ROWS, int KIND>
static void coded_rows(const float *x, int64_t stride, const uint8_t *from, float *sums) {
  const float *factors = (const float *)from;
  const uint8_t *codes = (const uint8_t *)(factors + parts_of(KIND) * part_floats(KIND));
  for (int first = 0; first < STRIDE; ++first) {
    Floats total[ROWS][AT_ONCE];
    for (int r = 0; r < ROWS; ++r)
      for (int j = 0; j < AT_ONCE; ++j) total[r][j] = every(0.0f);
    for (int part = 0; part < parts_of(KIND); ++part) {
      const Factors<KIND> by(factors + part * part_floats(KIND), first);
      by.each_column(codes, part, [&](int k, const Floats(&w)[AT_ONCE]) {
        if (first == 0) fetch(from + AHEAD + k * group_bytes(KIND) / GROUP);
        for (int r = 0; r < ROWS; ++r) {
          const Floats value = every(x[r * stride + k]);
          for (int j = 0; j < AT_ONCE; ++j) total[r][j] = fma(value, w[j], total[r][j]);
        }
      });
    }
    for (int r = 0; r < ROWS; ++r)
      for (int j = 0; j < AT_ONCE; ++j) {
        float *at = sums + r * PANEL + (first + j * STRIDE) * LANES;
        store(at, add(load(at), total[r][j]));
      }
  }
}

template <int KIND>
static void few_rows(int rows, const float *x, int64_t stride, const uint8_t *from, float *sums) {
  switch (rows) {
    case 1: return coded_rows<1, KIND>(x, stride, from, sums);
    case 2: return coded_rows<2, KIND>(x, stride, from, sums);
    case 3: return coded_rows<3, KIND>(x, stride, from, sums);
    default: return coded_rows<4, KIND>(x, stride, from, sums);
  }
}

static void few_rows(int kind, int rows, const float *x, int64_t stride, const uint8_t *from, float *sums) {
  switch (kind) {
    case Q8: return few_rows<Q8>(rows, x, stride, from, sums);
    case Q4: return few_rows<Q4>(rows, x, stride, from, sums);
    case A8: return few_rows<A8>(rows, x, stride, from, sums);
    case H8: return few_rows<H8>(rows, x, stride, from, sums);
    case X8: return few_rows<X8>(rows, x, stride, from, sums);
    default: return few_rows<F8>(rows, x, stride, from, sums);
  }
}

// In tiles of nearly the same height.
static void all_rows(const float *x, int64_t stride, int64_t rows, const float *w, int count, float *sums) {
  int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, some = 0;
  for (int64_t r = 0; r < rows; r += some, --tiles) {
    some = (rows - r + tiles - 1) / tiles;
    some_rows((int)some, x + r * stride, stride, w, count, sums + r * PANEL);
  }
}

// What one thread does at a time: the product with one panel of W, `number` of those that W has.
struct Matrix {
  int kind;
  int64_t width, columns;

  int64_t panels() const { return (width + PANEL - 1) / PANEL; }
  bool coded() const { return kind != F32 && kind != BF16; }
  int64_t column_bytes() const { return kind == F32 ? PANEL * 4 : PANEL * 2; }  // where groups mean nothing
  int64_t panel_bytes() const { return coded() ? columns / GROUP * group_bytes(kind) : columns * column_bytes(); }

  bool in_whole(int arithmetic) const { return arithmetic != FLOATS && is_whole(kind); }

  void multiply_panel(int64_t number, const uint8_t *panels, const float *x, int64_t rows, const float *bias,
                      float *out) const {
    float *sums = no_sums(rows);
    add_products(panels + number * panel_bytes(), x, rows, sums);
    finish(number, sums, rows, bias, out);
  }

  void multiply_panel(int64_t number, const uint8_t *panels, const WholeRows &x, int64_t rows, int arithmetic,
                      const float *bias, float *out) const {
    float *sums = no_sums(rows);
    multiply_whole(kind, x, rows, columns, panels + number * panel_bytes(), arithmetic, sums);
    finish(number, sums, rows, bias, out);
  }

 private:
  static float *no_sums(int64_t rows) {
    static thread_local std::vector<float> sums;
    sums.assign(rows * PANEL, 0.0f);
    return sums.data();
  }

  void add_products(const uint8_t *at, const float *x, int64_t rows, float *sums) const {
    alignas(64) float buffer[GROUP * PANEL];
    for (int64_t k = 0; k < columns; k += GROUP) {
      const int some = (int)std::min<int64_t>(GROUP, columns - k);
      if (coded() && rows <= FEW_ROWS)
        few_rows(kind, (int)rows, x + k, columns, at, sums);
      else
        all_rows(x + k, columns, rows, widen(kind, at, some, buffer), some, sums);
      at += coded() ? group_bytes(kind) : some * column_bytes();
    }
  }

  void finish(int64_t number, const float *sums, int64_t rows, const float *bias, float *out) const {
    const int64_t first = number * PANEL, here = std::min<int64_t>(PANEL, width - first);
    if (here == PANEL && !bias) {
      for (int64_t r = 0; r < rows; ++r) std::memcpy(out + r * width + first, sums + r * PANEL, PANEL * sizeof(float));
      return;
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < here; ++j)
        out[r * width + first + j] = sums[r * PANEL + j] + (bias ? bias[first + j] : 0.0f);
  }
};

}  // namespace headrace

using namespace headrace;

// x [rows, columns], panels of W [width, columns], bias [width] or null -> out [rows, width].
HEADRACE_API void headrace_linear(const float *x, int64_t rows, int64_t columns, const uint8_t *panels, int kind,
                                int64_t width, const float *bias, int arithmetic, float *out, int threads) {
  if (rows == 0) return;
  const Matrix matrix{kind, width, columns};
  if (matrix.in_whole(arithmetic)) {
    arithmetic = possible(arithmetic);
    const WholeRows whole = round_rows(x, rows, columns, kind, arithmetic, threads);
    // Of many rows a part at a time, whose sums stay in the first-level cache; parts also make threads end together.
    const int64_t parts = (rows + PART_ROWS - 1) / PART_ROWS, some = ((rows + parts - 1) / parts + 3) / 4 * 4;
    each(matrix.panels() * parts, threads, [&](int64_t i) {
      const int64_t first = i % parts * some;
      matrix.multiply_panel(i / parts, panels, whole.from(first), std::min(some, rows - first), arithmetic, bias,
                            out + first * width);
    });
    return;
  }
  each(matrix.panels(), threads, [&](int64_t i) { matrix.multiply_panel(i, panels, x, rows, bias, out); });
}

// The same with a W and a bias for each of `experts`, whose rows of x and out begin at starts[expert] and end where the
// next one's begin.
HEADRACE_API void headrace_linear_of_experts(const float *x, const int64_t *starts, int64_t experts, int64_t columns,
                                           const uint8_t *panels, int kind, int64_t width, const float *bias,
                                           int arithmetic, float *out, int threads) {
  const Matrix matrix{kind, width, columns};
  const int64_t count = matrix.panels();
  std::vector<int64_t> busy;
  for (int64_t e = 0; e < experts; ++e)
    if (starts[e] < starts[e + 1]) busy.push_back(e);
  const bool in_whole = matrix.in_whole(arithmetic);
  arithmetic = possible(arithmetic);
  const WholeRows whole = in_whole ? round_rows(x, starts[experts], columns, kind, arithmetic, threads) : WholeRows{};
  each((int64_t)busy.size() * count, threads, [&](int64_t i) {
    const int64_t e = busy[i / count], first = starts[e], rows = starts[e + 1] - first;
    const uint8_t *at = panels + e * count * matrix.panel_bytes();
    const float *more = bias ? bias + e * width : nullptr;
    if (in_whole)
      matrix.multiply_panel(i % count, at, whole.from(first), rows, arithmetic, more, out + first * width);
    else
      matrix.multiply_panel(i % count, at, x + first * columns, rows, more, out + first * width);
  });
}
