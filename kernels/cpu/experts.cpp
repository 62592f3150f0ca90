// A mixture of experts beside its products (those are in linear.cpp): which experts a row goes to, rows by expert and back,
// and the sum of what a row's experts answer. Like there, a row's bits depend on nothing but that row.

#include <algorithm>
#include <vector>

#include "crew.h"
#include "vector.h"

namespace headrace {

// e^(x - largest) of every value, and their sum, first to last.
static float exponentials(const float *x, int64_t count, float *out) {
  float most = x[0], total = 0.0f;
  for (int64_t i = 1; i < count; ++i) most = most > x[i] ? most : x[i];
  for (int64_t i = 0; i < count; i += LANES) {
    const int64_t some = std::min<int64_t>(LANES, count - i);
    float values[LANES] = {0};
    std::memcpy(values, x + i, some * sizeof(float));
    store(values, exponential(sub(load(values), every(most))));
    std::memcpy(out + i, values, some * sizeof(float));
  }
  for (int64_t i = 0; i < count; ++i) total += out[i];
  return total;
}

}  // namespace headrace

using namespace headrace;

// logits [rows, experts] -> the `chosen` largest of each row, of equal ones the first, and their weights [rows, chosen]: a
// softmax over all experts, or with `over_chosen` over those; with `normalise` divided by their sum.
HEADRACE_API void headrace_route(const float *logits, int64_t rows, int64_t experts, int64_t chosen, int over_chosen,
                               int normalise, int64_t *numbers, float *weights, int threads) {
  each_row(rows, threads, [=](int64_t r) {
    const float *row = logits + r * experts;
    int64_t *found = numbers + r * chosen;
    float *weight = weights + r * chosen;
    static thread_local std::vector<char> taken;
    static thread_local std::vector<float> shares;
    taken.assign(experts, 0);
    for (int64_t s = 0; s < chosen; ++s) {
      int64_t best = -1;
      for (int64_t e = 0; e < experts; ++e)
        if (!taken[e] && (best < 0 || row[e] > row[best])) best = e;
      taken[best] = 1;
      found[s] = best;
    }
    shares.resize(experts);
    if (over_chosen) {
      for (int64_t s = 0; s < chosen; ++s) weight[s] = row[found[s]];
      const float total = exponentials(weight, chosen, shares.data());
      for (int64_t s = 0; s < chosen; ++s) weight[s] = shares[s] / total;
    } else {
      const float total = exponentials(row, experts, shares.data());
      for (int64_t s = 0; s < chosen; ++s) weight[s] = shares[found[s]] / total;
    }
    if (normalise) {
      float total = 0.0f;
      for (int64_t s = 0; s < chosen; ++s) total += weight[s];
      for (int64_t s = 0; s < chosen; ++s) weight[s] /= total;
    }
  });
}

// numbers [rows, chosen] -> where each expert's rows begin, starts [experts + 1]; which row lies there, sources [pairs]; and
// where each of a row's experts finds it, places [rows, chosen]. Rows of one expert keep their order.
HEADRACE_API void headrace_by_expert(const int64_t *numbers, int64_t rows, int64_t chosen, int64_t experts,
                                   int64_t *starts, int64_t *sources, int64_t *places) {
  std::fill(starts, starts + experts + 1, 0);
  for (int64_t pair = 0; pair < rows * chosen; ++pair) ++starts[numbers[pair] + 1];
  for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
  std::vector<int64_t> next(starts, starts + experts);
  for (int64_t pair = 0; pair < rows * chosen; ++pair) {
    places[pair] = next[numbers[pair]]++;
    sources[places[pair]] = pair / chosen;
  }
}

// gate_up [rows, 2 * width], the gate first -> (up + 1) * gate * sigmoid(alpha * gate) [rows, width], where the gate is at
// most `limit` and up between -limit and limit.
HEADRACE_API void headrace_clamped_gate(const float *gate_up, int64_t rows, int64_t width, float alpha, float limit,
                                      float *out, int threads) {
  const Floats one = every(1.0f), most = every(limit), least = every(-limit);
  each_row(rows, threads, [=](int64_t r) {
    const float *gate = gate_up + r * 2 * width, *up = gate + width;
    for (int64_t i = 0; i < width; i += LANES) {
      const int64_t some = std::min<int64_t>(LANES, width - i);
      float g[LANES] = {0}, u[LANES] = {0}, o[LANES];
      std::memcpy(g, gate + i, some * sizeof(float));
      std::memcpy(u, up + i, some * sizeof(float));
      // Of two operands that do not compare, the second is taken: what is no number stays none.
      const Floats value = smaller(most, load(g)), other = larger(least, smaller(most, load(u)));
      const Floats share = add(one, exponential(sub(every(0.0f), mul(every(alpha), value))));
      store(o, mul(add(other, one), div(value, share)));
      std::memcpy(out + r * width + i, o, some * sizeof(float));
    }
  });
}

// answers [pairs, width] by expert -> out [rows, width]: the sum over a row's experts, first to last, each times its weight.
HEADRACE_API void headrace_combine(const float *answers, const int64_t *places, const float *weights, int64_t rows,
                                 int64_t chosen, int64_t width, float *out, int threads) {
  each_row(rows, threads, [=](int64_t r) {
    float *to = out + r * width;
    std::fill(to, to + width, 0.0f);
    for (int64_t s = 0; s < chosen; ++s) {
      const float *from = answers + places[r * chosen + s] * width, weight = weights[r * chosen + s];
      int64_t i = 0;
      for (; i + LANES <= width; i += LANES) store(to + i, fma(every(weight), load(from + i), load(to + i)));
      for (; i < width; ++i) to[i] = __builtin_fmaf(weight, from[i], to[i]);
    }
  });
}
