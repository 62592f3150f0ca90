// Threads that help with a call, and are never needed for it.
//
// The caller works through the items itself; helpers that are awake take items too. So a helper whose core is taken away,
// or that was asleep, costs nothing: only one in the middle of an item is waited for. Between two calls a helper stays
// awake for a while, since the calls of a decode step are shorter than waking up takes.
#pragma once

#include <cstdint>

namespace headrace {

// work(context, i) once for each i of [0, count), in any order, on up to `threads` threads. While another thread of this
// process is in here, the caller works alone.
void share_out(int64_t count, int threads, void (*work)(void *, int64_t), void *context);

template <typename Work>
void each(int64_t count, int threads, Work work) {
  share_out(count, threads, [](void *context, int64_t i) { (*(Work *)context)(i); }, &work);
}

// The same for items so small that some are taken together.
template <typename Work>
void each_row(int64_t rows, int threads, Work work) {
  constexpr int64_t TOGETHER = 16;
  each((rows + TOGETHER - 1) / TOGETHER, threads, [&](int64_t i) {
    for (int64_t r = i * TOGETHER; r < rows && r < (i + 1) * TOGETHER; ++r) work(r);
  });
}

}  // namespace headrace
