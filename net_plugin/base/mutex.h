// Mutex and its locks: std::mutex, with attributes for clang's thread-safety analysis, which is part of `make lint`.
// Code that uses a member marked GUARDED_BY must hold its mutex, and so must the callers of functions marked REQUIRES.
// A function marked EXCLUDES takes the mutex itself. Other compilers see no attributes. The mutexes, and the order in
// which they are taken: docs/design/threads-and-messages.md.
#pragma once

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>

#ifdef __clang__
#define BAGUA_NET_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define BAGUA_NET_THREAD_SAFETY(attribute)
#endif
#define CAPABILITY(name) BAGUA_NET_THREAD_SAFETY(capability(name))
#define SCOPED_CAPABILITY BAGUA_NET_THREAD_SAFETY(scoped_lockable)
#define GUARDED_BY(mutex) BAGUA_NET_THREAD_SAFETY(guarded_by(mutex))
#define PT_GUARDED_BY(mutex) BAGUA_NET_THREAD_SAFETY(pt_guarded_by(mutex))  // what it points to
#define REQUIRES(mutex) BAGUA_NET_THREAD_SAFETY(requires_capability(mutex))
#define EXCLUDES(mutex) BAGUA_NET_THREAD_SAFETY(locks_excluded(mutex))
#define ACQUIRE(...) BAGUA_NET_THREAD_SAFETY(acquire_capability(__VA_ARGS__))
#define RELEASE(...) BAGUA_NET_THREAD_SAFETY(release_capability(__VA_ARGS__))
#define NO_THREAD_SAFETY_ANALYSIS BAGUA_NET_THREAD_SAFETY(no_thread_safety_analysis)

namespace bagua_net {

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  ~MutexLock() RELEASE() = default;

  void unlock() RELEASE() { lock_.unlock(); }
  void lock() ACQUIRE() { lock_.lock(); }
  // Releases the mutex until `condition` is notified, or until a spurious wake-up: to be called in a loop.
  void wait(std::condition_variable& condition) { condition.wait(lock_); }

 private:
  std::unique_lock<std::mutex> lock_;
};

// A mutex that a thread takes in each turn of its loop, with a MutexLock. The thread would retake it before a waiting
// caller wakes up. So callers use a CallersLock, and the thread calls step_aside() between two turns.
class CAPABILITY("mutex") LoopMutex : public Mutex {
 public:
  // By the looping thread, without the mutex.
  void step_aside() const {
    while (callers_.load() > 0) sched_yield();
  }

 private:
  friend class CallersLock;
  std::atomic<int> callers_{0};  // that wait for the mutex
};

class SCOPED_CAPABILITY CallersLock {
 public:
  explicit CallersLock(LoopMutex& mutex) ACQUIRE(mutex) : mutex_(mutex) {
    mutex_.callers_.fetch_add(1);
    mutex_.lock();
    mutex_.callers_.fetch_sub(1);
  }
  ~CallersLock() RELEASE() { mutex_.unlock(); }
  CallersLock(const CallersLock&) = delete;
  CallersLock& operator=(const CallersLock&) = delete;

 private:
  LoopMutex& mutex_;
};

}  // namespace bagua_net
