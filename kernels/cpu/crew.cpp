#include "crew.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

namespace headrace {

constexpr auto AWAKE = std::chrono::microseconds(200);

static inline void breathe() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// What a helper may read lies still from before `open` is set until `inside` is 0 again after it was cleared.
class Crew {
 public:
  void share_out(int64_t count, int threads, void (*work)(void *, int64_t), void *context) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn) {
      for (int64_t i = 0; i < count; ++i) work(context, i);
      return;
    }
    hire(threads - 1);
    count_ = count, wanted_ = threads - 1, work_ = work, context_ = context;
    next_ = 0;
    open_ = true;
    ++calls_;
    if (asleep_ > 0) {
      std::lock_guard<std::mutex> bed(bed_);
      rise_.notify_all();
    }
    take();
    open_ = false;
    while (inside_ > 0) breathe();
  }

 private:
  // As many as the system allows.
  void hire(int helpers) try {
    for (; hired_ < helpers; ++hired_) std::thread([this, who = hired_] { help(who); }).detach();
  } catch (const std::exception &) {
  }

  void take() {
    for (int64_t i; (i = next_.fetch_add(1)) < count_;) work_(context_, i);
  }

  void help(int who) {
    for (uint32_t seen = 0;; seen = calls_) {
      wait(seen);
      ++inside_;
      if (open_ && who < wanted_) take();
      --inside_;
    }
  }

  // Until there has been another call than `seen`.
  void wait(uint32_t seen) {
    const auto tired = std::chrono::steady_clock::now() + AWAKE;
    for (int spin = 1; calls_ == seen; ++spin) {
      // To whoever else wants this core, perhaps the caller itself.
      spin % 64 ? breathe() : std::this_thread::yield();
      if (spin % 64 || std::chrono::steady_clock::now() < tired) continue;
      std::unique_lock<std::mutex> bed(bed_);
      ++asleep_;
      rise_.wait(bed, [&] { return calls_ != seen; });
      --asleep_;
      return;
    }
  }

  std::mutex turn_, bed_;
  std::condition_variable rise_;
  int hired_ = 0, wanted_ = 0;
  int64_t count_ = 0;
  void (*work_)(void *, int64_t) = nullptr;
  void *context_ = nullptr;
  // Sequentially consistent, all of them: a helper says that it is inside, then looks whether it may be; the caller
  // closes, then looks whether anybody is inside.
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> calls_{0};
  std::atomic<int> asleep_{0};
  alignas(64) std::atomic<int> inside_{0};
  std::atomic<bool> open_{false};
};

// Helpers outlive everything. But a fork's child has none, nor anybody to leave a lock or an item that was theirs.
static Crew *crew = new Crew;
[[maybe_unused]] static const int at_forks = pthread_atfork(nullptr, nullptr, [] { crew = new Crew; });

void share_out(int64_t count, int threads, void (*work)(void *, int64_t), void *context) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) work(context, i);
    return;
  }
  crew->share_out(count, threads, work, context);
}

}  // namespace headrace
