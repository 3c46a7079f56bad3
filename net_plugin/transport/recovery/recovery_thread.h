// RecoveryThread: replaces lost connections of comms, whether or not the application calls these comms. A small send is
// done once it is written. The rank may then wait for the answer on another comm, and if the connection is lost, only
// this thread sends the message again. There is one per process, in the worker pool. It sleeps until a stream is lost
// or joins, and checks the senders once a second.
//
// It also closes comms whose last messages are not delivered yet. It closes all of them at the same time, because many
// comms may have lost the same peer. And it reports network interfaces that cannot be used any more, and their return.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/log_sink.h"
#include "base/mutex.h"
#include "base/status.h"
#include "os/epoll_poller.h"
#include "os/link_watch.h"

namespace bagua_net {

// A comm, as the recovery thread sees it. It calls these functions without holding a lock that a caller may hold.
class Recoverable {
 public:
  virtual ~Recoverable() = default;
  // Replaces what was lost, as far as that is possible now. Returns lines for the log, each of which is left out if a
  // similar one was written recently.
  virtual std::vector<RareLog::Line> recover() = 0;
  // recover() is to be called again soon, and not only after a second.
  virtual bool looks_again() { return false; }
  // The kernel has announced something of interfaces or routes (WatchedLinks says what).
  virtual void on_links_changed() {}
  // The thread has ended with this failure.
  virtual void fail(Status status) = 0;
  // Does a step of closing. True: the comm is closed.
  virtual bool is_closed(std::int64_t /*now_ms*/) { return true; }
};

// Network interfaces in use, and who is told of their states and of routes, before the comms are. By the recovery
// thread, or whoever starts it.
struct WatchedLinks {
  std::vector<NetworkInterface> interfaces;
  std::function<void(const NetworkInterface&, LinkState)> on_state;
  std::function<void()> on_routes;  // has_route_over() may have another answer than before
};

class RecoveryThread {
 public:
  RecoveryThread() = default;
  ~RecoveryThread();  // joins; everything must be removed
  RecoveryThread(const RecoveryThread&) = delete;
  RecoveryThread& operator=(const RecoveryThread&) = delete;

  Status start(const WatchedLinks& watched = {});

  // What a comm that is being built gives to those that notify. They have no effect before add().
  std::uint64_t new_id();
  // recover() may be called until remove() returned: after each notify(), and once a second if it ticks, or sooner if
  // it asks for that. Once at once, because of what happened before.
  void add(std::uint64_t id, Recoverable* recoverable, bool ticks);
  // Waits until the thread has left recover(). The caller must not hold a lock that recover() takes.
  void remove(std::uint64_t id);
  // Any thread, with any lock held.
  void notify(std::uint64_t id);
  // recover() is called after these events of epoll, edge-triggered, and if the connection breaks. 0: no events.
  Status watch(int fd, std::uint64_t id, std::uint32_t flags);
  void unwatch(int fd);
  // Takes ownership until the comm is closed, and then destroys it. It stays added until its destructor removes it.
  void close(std::unique_ptr<Recoverable> closing);
  bool is_closing();
  // Waits until nothing is being closed any more.
  void wait_until_closed();

 private:
  struct Entry {
    Recoverable* recoverable;
    bool ticks;
    bool is_new = true;  // it may have missed a change of links while it was built
  };

  void run();
  void fail(const Status& failure);
  // True: some comms need another step.
  bool close_some();
  // Calls recover() of those that are there.
  void recover(std::vector<std::uint64_t> due) EXCLUDES(run_mutex_);
  void watch_links(const WatchedLinks& watched);
  void tell_of_links() EXCLUDES(run_mutex_);
  void look_at_links(std::int64_t now_ms);
  void report_link(std::size_t index, std::int64_t now_ms);
  void write_log();

  EpollPoller poller_;
  RareLog log_;      // the thread's
  LinkWatch links_;  // the thread's, once it runs
  std::function<void(const NetworkInterface&, LinkState)> on_link_state_;
  std::function<void()> on_routes_;
  std::vector<std::int64_t> unusable_since_ms_;  // of links_; 0: usable
  std::vector<std::uint64_t> again_;             // whose recover() is to be called again, at again_ms_; the thread's
  std::int64_t again_ms_ = LinkWatch::kNever;
  std::thread thread_;
  Mutex run_mutex_;  // held while a comm recovers
  std::map<std::uint64_t, Entry> entries_ GUARDED_BY(run_mutex_);
  Status failure_ GUARDED_BY(run_mutex_);  // the thread has ended with it
  Mutex mutex_;
  std::vector<std::uint64_t> notified_ GUARDED_BY(mutex_);
  std::uint64_t next_id_ GUARDED_BY(mutex_) = 1;
  int ticking_ GUARDED_BY(mutex_) = 0;
  bool stopping_ GUARDED_BY(mutex_) = false;
  bool has_ended_ GUARDED_BY(mutex_) = false;                             // by an exception: it closes nothing any more
  std::vector<std::unique_ptr<Recoverable>> closing_ GUARDED_BY(mutex_);  // only the thread removes entries
  std::condition_variable closed_;                                        // closing_ is empty
};

}  // namespace bagua_net
