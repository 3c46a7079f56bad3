// Mutex and its locks: std::mutex, with attributes by which clang checks at compile time (`make lint`) that whoever
// touches a member marked GUARDED_BY holds its mutex, and so does whoever calls a function marked REQUIRES. A function
// marked EXCLUDES takes the mutex itself. Other compilers see no attributes, and the code is that of std::mutex.
// Which mutexes there are, and in which order they are taken: docs/design/threads-and-messages.md.
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
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() RELEASE() { lock_.unlock(); }
  void lock() ACQUIRE() { lock_.lock(); }
  // Gives the mutex up until somebody notifies, or for no reason: to be called in a loop.
  void wait(std::condition_variable& condition) { condition.wait(lock_); }

 private:
  std::unique_lock<std::mutex> lock_;
};

// A mutex that one thread holds for nearly all of its loop, with a MutexLock. The loop would retake it before a caller
// that waits for it wakes. So callers take a CallersLock, and the loop steps aside for them.
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
