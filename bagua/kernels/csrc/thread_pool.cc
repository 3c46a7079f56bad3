#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace bagua_kernels {
namespace {

// Rounding and subnormals as our formulas assume, whatever the caller has set, e.g. torch.set_flush_denormal(True).
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&before_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t before_{};
};

class ThreadPool {
 public:
  // False if it is busy: nothing was done.
  bool run(size_t pieces, size_t threads, const std::function<void(size_t)>& work) {
    const std::unique_lock<std::mutex> owner(in_use_, std::try_to_lock);
    if (!owner.owns_lock()) return false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      start_workers(threads - 1);
      work_ = &work;
      pieces_ = pieces;
      next_.store(0, std::memory_order_relaxed);  // published by the mutex
      invited_ = std::min(threads - 1, workers_);
      working_ = invited_;
    }
    begin_.notify_all();
    take_pieces(work, pieces);
    std::unique_lock<std::mutex> lock(mutex_);
    // Those that have not woken up by now are not needed any more.
    working_ -= invited_;
    invited_ = 0;
    done_.wait(lock, [this] { return working_ == 0; });
    return true;
  }

 private:
  // With mutex_ held. Fewer threads than asked for, or none, only cost time.
  void start_workers(size_t wanted) {
    while (workers_ < wanted) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        return;
      }
      ++workers_;
    }
  }

  void serve() {
    const DefaultFloatingPoint floating_point;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      begin_.wait(lock, [this] { return invited_ > 0; });
      --invited_;
      const std::function<void(size_t)>& work = *work_;
      const size_t pieces = pieces_;
      lock.unlock();
      take_pieces(work, pieces);
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  void take_pieces(const std::function<void(size_t)>& work, size_t pieces) {
    for (;;) {
      const size_t piece = next_.fetch_add(1, std::memory_order_relaxed);  // the order of pieces does not matter
      if (piece >= pieces) return;
      work(piece);
    }
  }

  // Held by the caller whose work is being done.
  std::mutex in_use_;
  // Guards everything below but next_.
  std::mutex mutex_;
  std::condition_variable begin_;
  std::condition_variable done_;
  size_t workers_ = 0;
  size_t invited_ = 0;  // workers that this call still wants
  size_t working_ = 0;  // workers that have come or may still come
  size_t pieces_ = 0;
  const std::function<void(size_t)>* work_ = nullptr;  // the caller's, valid until working_ is 0
  std::atomic<size_t> next_{0};
};

std::atomic<ThreadPool*> pool{nullptr};

// In the child of a fork: the pool's threads are not here, and its mutexes may be held by threads that are not here. It
// is left as it is; a pool is small.
void forget_pool() { pool.store(nullptr, std::memory_order_relaxed); }

ThreadPool& the_pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  static_cast<void>(registered);
  ThreadPool* current = pool.load(std::memory_order_acquire);
  if (current == nullptr) {
    auto* created = new ThreadPool;  // never deleted: its threads use it until the process ends
    if (pool.compare_exchange_strong(current, created, std::memory_order_acq_rel)) return *created;
    delete created;
  }
  return *current;
}

}  // namespace

void run_in_parallel(size_t pieces, size_t threads, const std::function<void(size_t)>& work) {
  const DefaultFloatingPoint floating_point;
  const size_t useful = std::min(threads, pieces);
  if (useful > 1 && the_pool().run(pieces, useful, work)) return;
  for (size_t piece = 0; piece < pieces; ++piece) work(piece);
}

}  // namespace bagua_kernels
