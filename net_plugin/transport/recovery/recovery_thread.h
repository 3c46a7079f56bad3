// RecoveryThread: looks after comms that lost a connection, whether or not the application calls them at that time. It
// must: a small message is done when it was written, its sender may then wait for the answer on another comm, and if
// the connection is lost nobody else would send the message again. One per process, in the worker pool; asleep unless a
// stream is lost or joins, but for a look at the senders once a second.
//
// Comms whose last messages are not delivered yet are closed here as well, all of them at the same time, so that nobody
// waits for each of many that have lost their peer.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/rare_log.h"
#include "base/status.h"
#include "os/epoll_poller.h"

namespace bagua_net {

// A comm. Called by the recovery thread, with no lock of a caller's held.
class Recoverable {
 public:
  virtual ~Recoverable() = default;
  // Replaces what was lost, as far as that is possible now. Returns what is to be logged, unless somebody else has
  // just said as much.
  virtual std::vector<std::string> recover() = 0;
  // There is no recovery any more, and never will be.
  virtual void fail(Status status) = 0;
  // Takes a step towards its end; false: another one is needed.
  virtual bool is_closed(std::int64_t /*now_ms*/) { return true; }
};

class RecoveryThread {
 public:
  RecoveryThread() = default;
  ~RecoveryThread();  // joins; everything must be removed
  RecoveryThread(const RecoveryThread&) = delete;
  RecoveryThread& operator=(const RecoveryThread&) = delete;

  Status start();

  // recover() may be called until remove() returned: after each notify(), and once a second if it ticks.
  std::uint64_t add(Recoverable* recoverable, bool ticks);
  // Waits until the thread is outside. Not while holding a lock that recover() takes.
  void remove(std::uint64_t id);
  // Any thread, with any lock held.
  void notify(std::uint64_t id);
  // Notifies of these events of epoll, and if the connection breaks; none: of nothing. Edge-triggered.
  Status watch(int fd, std::uint64_t id, std::uint32_t flags);
  void unwatch(int fd);
  // Takes it over until it is closed, and destroys it then. It stays added until its destructor removes it.
  void close(std::unique_ptr<Recoverable> closing);
  bool is_closing();
  // Waits until nothing is being closed any more.
  void wait_until_closed();

 private:
  struct Entry {
    Recoverable* recoverable;
    bool ticks;
  };

  void run();
  void fail(const Status& failure);
  // True: some need another step.
  bool close_some();

  EpollPoller poller_;
  RareLog log_;  // the thread's
  std::thread thread_;
  Mutex run_mutex_;  // held while a comm recovers
  std::map<std::uint64_t, Entry> entries_ GUARDED_BY(run_mutex_);
  Status failure_ GUARDED_BY(run_mutex_);  // the thread has ended with it
  Mutex mutex_;
  std::vector<std::uint64_t> notified_ GUARDED_BY(mutex_);
  std::uint64_t next_id_ GUARDED_BY(mutex_) = 1;
  int ticking_ GUARDED_BY(mutex_) = 0;
  bool stopping_ GUARDED_BY(mutex_) = false;
  bool has_ended_ GUARDED_BY(mutex_) = false;                             // by an exception: nothing is closed any more
  std::vector<std::unique_ptr<Recoverable>> closing_ GUARDED_BY(mutex_);  // by the thread alone removed
  std::condition_variable closed_;                                        // closing_ is empty
};

}  // namespace bagua_net
