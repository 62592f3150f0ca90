// What a step computes of each row alone: RMS norm of a sum, and the gate of the feed-forward layer.

#include <algorithm>

#include "crew.h"
#include "vector.h"

using namespace headrace;

namespace headrace {

// 1 / sqrt(mean of squares + eps) over `width` values, a tail shorter than a vector included.
float inverse_rms(const float *x, int64_t width, float eps) {
  Floats squares = every(0.0f);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < width; ++i) total = __builtin_fmaf(x[i], x[i], total);
  return 1.0f / std::sqrt(total / (float)width + eps);
}

}  // namespace headrace

// x [rows, width] += delta (or null), in place; out = x * inverse_rms(x) * weight.
HEADRACE_API void headrace_norm(float *x, const float *delta, const float *weight, float eps, int64_t rows,
                              int64_t width, float *out, int threads) {
  each_row(rows, threads, [=](int64_t r) {
    float *sums = x + r * width, *to = out + r * width;
    if (delta) {
      const float *more = delta + r * width;
      int64_t i = 0;
      for (; i + LANES <= width; i += LANES) store(sums + i, add(load(sums + i), load(more + i)));
      for (; i < width; ++i) sums[i] += more[i];
    }
    const float inverse = inverse_rms(sums, width, eps);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
      store(to + i, mul(mul(load(sums + i), every(inverse)), load(weight + i)));
    for (; i < width; ++i) to[i] = sums[i] * inverse * weight[i];
  });
}

// gate_up [rows, 2 * width], the gate first -> activation(gate) * up [rows, width]: silu(x) = x * sigmoid(x), or GELU by
// its tanh, which is x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
HEADRACE_API void headrace_gate(const float *gate_up, int64_t rows, int64_t width, int gelu, float *out, int threads) {
  const Floats one = every(1.0f), linear = every(1.5957691216057308f), cubic = every(0.07135481282553484f);
  each_row(rows, threads, [=](int64_t r) {
    const float *gate = gate_up + r * 2 * width, *up = gate + width;
    float *to = out + r * width;
    for (int64_t i = 0; i < width; i += LANES) {
      const int64_t some = std::min<int64_t>(LANES, width - i);
      float g[LANES] = {0}, u[LANES] = {0}, o[LANES];
      if (some < LANES) {
        std::memcpy(g, gate + i, some * sizeof(float));
        std::memcpy(u, up + i, some * sizeof(float));
      }
      const Floats value = load(some < LANES ? g : gate + i), other = load(some < LANES ? u : up + i);
      const Floats inner = gelu ? mul(value, fma(cubic, mul(value, value), linear)) : value;
      const Floats answer = mul(div(value, add(one, exponential(sub(every(0.0f), inner)))), other);
      store(some < LANES ? o : to + i, answer);
      if (some < LANES) std::memcpy(to + i, o, some * sizeof(float));
    }
  });
}
