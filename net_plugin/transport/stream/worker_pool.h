// WorkerPool: the I/O threads of this process, shared by all comms. Started with the first comm, joined by stop();
// never more than its size, however many comms there are. Size 0: the calling threads do all I/O. So it is as well
// where the system has no threads for it, and it makes do with fewer.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "transport/recovery/recovery_thread.h"
#include "transport/stream/event_loop_worker.h"

namespace bagua_net {

enum class Direction { kSend, kReceive };

class WorkerPool {
 public:
  // A comm's place in the pool.
  struct Lane {
    std::size_t first = 0;
    PeerLocation location = PeerLocation::kWithinHost;
  };

  // most_between_hosts: workers that serve connections between hosts, the first of the pool. A network is slower than
  // memory: with more, each sleeps and wakes for a chunk at a time.
  WorkerPool(int size, int spin_us, const cpu_set_t& affinity, int most_between_hosts = kAll)
      : wanted_(size), most_between_hosts_(most_between_hosts), spin_us_(spin_us), size_(size), affinity_(affinity) {}

  // Does not change while there are comms.
  int size() const { return size_.load(std::memory_order_relaxed); }
  // For the next comm of this direction, to be given to assign(). The comms of one direction are spread evenly: a
  // collective may use only these.
  Lane open_lane(Direction direction, PeerLocation location);
  // A worker for the stream with this index in its comm: a comm's streams get different workers, and so do the streams
  // of equal index in neighbouring lanes, since the first are used most. The pool keeps
  // ownership.
  Status assign(const Lane& lane, int stream_index, EventLoopWorker** worker);
  // Started if it does not run; nullptr: the system has no thread for it.
  RecoveryThread* recovery();
  // Closes what may have to wait for its peer, in the recovery thread if that takes more than a look.
  void close(std::unique_ptr<Recoverable> closing);
  bool is_closing();
  // Waits until all of that is closed. Not while stop() may be called.
  void wait_until_closed();
  // Joins the threads. Every stream must be detached.
  void stop();

 private:
  static constexpr int kAll = 1 << 30;

  RecoveryThread* running_recovery();
  std::size_t width(PeerLocation location) const {
    return static_cast<std::size_t>(location == PeerLocation::kWithinHost ? size()
                                                                          : std::min(size(), most_between_hosts_));
  }
  void start() REQUIRES(mutex_);

  const int wanted_;
  const int most_between_hosts_;
  const int spin_us_;
  std::atomic<int> size_;  // written with mutex_ held
  const cpu_set_t affinity_;
  Mutex mutex_;
  bool has_started_ GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<EventLoopWorker>> workers_ GUARDED_BY(mutex_);
  bool has_started_recovery_ GUARDED_BY(mutex_) = false;
  std::unique_ptr<RecoveryThread> recovery_ GUARDED_BY(mutex_);
  std::array<std::array<std::size_t, 2>, 2> lanes_ GUARDED_BY(mutex_){};  // opened, by location and direction
};

}  // namespace bagua_net
