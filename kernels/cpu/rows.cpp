// What a step computes of each row alone: RMS norm of a sum, and the gate of the feed-forward layer.

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
                              int64_t width, float *out) {
  for (int64_t r = 0; r < rows; ++r, x += width, out += width) {
    if (delta) {
      int64_t i = 0;
      for (; i + LANES <= width; i += LANES) store(x + i, add(load(x + i), load(delta + i)));
      for (; i < width; ++i) x[i] += delta[i];
      delta += width;
    }
    const float inverse = inverse_rms(x, width, eps);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
      store(out + i, mul(mul(load(x + i), every(inverse)), load(weight + i)));
    for (; i < width; ++i) out[i] = x[i] * inverse * weight[i];
  }
}

// gate_up [rows, 2 * width], the gate first -> silu(gate) * up [rows, width].
HEADRACE_API void headrace_gate(const float *gate_up, int64_t rows, int64_t width, float *out) {
  const Floats one = every(1.0f);
  for (int64_t r = 0; r < rows; ++r, gate_up += 2 * width, out += width) {
    const float *gate = gate_up, *up = gate_up + width;
    for (int64_t i = 0; i < width; i += LANES) {
      const int64_t some = width - i < LANES ? width - i : LANES;
      float g[LANES] = {0}, u[LANES] = {0}, o[LANES];
      if (some < LANES) {
        std::memcpy(g, gate + i, some * sizeof(float));
        std::memcpy(u, up + i, some * sizeof(float));
      }
      const Floats value = load(some < LANES ? g : gate + i), other = load(some < LANES ? u : up + i);
      const Floats answer = mul(div(value, add(one, exponential(sub(every(0.0f), value)))), other);
      store(some < LANES ? o : out + i, answer);
      if (some < LANES) std::memcpy(out + i, o, some * sizeof(float));
    }
  }
}
