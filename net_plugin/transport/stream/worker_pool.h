// WorkerPool: the I/O threads of this process, shared by all comms. They are started with the first comm and joined by
// stop(). Their number does not depend on the number of comms. With size 0, the calling threads do all I/O. If the
// system cannot start a thread, the pool is smaller, or has size 0.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "crypto/cipher_state.h"
#include "transport/recovery/recovery_thread.h"
#include "transport/stream/event_loop_worker.h"

namespace bagua_net {

// How many workers connections between hosts keep busy. It follows from the speed of the interface and from the time
// that a core needs for a byte that is sent and one that is received:
//
//   what is done with them                          ps    Gb/s each way that keep a worker busy
//   copied (measured: docs/design/performance.md)   640   12.5
//   and sealed and opened with AES-256-GCM        1,000    8
//   and with ChaCha20-Poly1305                    2,000    4
//
// One core seals or opens 5.0 GB/s with AES and 1.6 GB/s with ChaCha20 on an AMD Zen 4 at 32 KiB a record; older cores
// with AES take up to half as long again, so 300 and 800 ps are counted for each of the two.
// fastest_mbps: of the interfaces; 0: unknown, taken for 100 Gb/s, or encrypted for 80. At least as many as for 50
// Gb/s, or encrypted for 48, because the interface of a virtual machine may tell a wrong speed. cpus: of the rank; what
// only copies takes at most half of them. joins: fastest_mbps is the sum of joined interfaces; half as many again,
// since messages are cut into more chunks there, and the slower path is waited for (25 + 25 Gb/s: six carry the whole
// rate in each of six starts, four did in five of eighteen). The pool may have fewer (os/cpu_budget.h).
int network_workers(int fastest_mbps, Cipher cipher, int cpus, bool joins = false);

enum class Direction { kSend, kReceive };

class WorkerPool {
 public:
  // A comm's position in the pool.
  struct Lane {
    std::size_t first = 0;
    PeerLocation location = PeerLocation::kWithinHost;
  };

  // most_between_hosts: the number of workers, from the first on, that serve connections between hosts. A network is
  // slower than memory: with more workers, each would sleep and wake up for every chunk.
  // links: for the recovery thread.
  WorkerPool(int size, int spin_us, const cpu_set_t& affinity, int most_between_hosts = kAll, WatchedLinks links = {})
      : wanted_(size),
        most_between_hosts_(most_between_hosts),
        spin_us_(spin_us),
        size_(size),
        affinity_(affinity),
        links_(std::move(links)) {}

  // Does not change while there are comms.
  int size() const { return size_.load(std::memory_order_relaxed); }
  // The lane of the comm whose listen or connect was the `turn`th of this process, for assign(). The comms of each
  // direction are distributed evenly, because a collective may use one direction only. They are opened in NCCL's order
  // of channels, and small messages use the first channels. In the order in which handshakes end, two of these would
  // meet: all-reduce of 1 MiB over two channels took 218 to 228 us in starts where four workers had its four busy
  // streams, and 260 to 306 where three had.
  Lane open_lane(Direction direction, PeerLocation location, std::size_t turn);
  // The worker for the stream with this index in its comm. A comm's streams get different workers, and so do streams of
  // equal index in neighbouring lanes, because the first streams are used most. The pool keeps ownership.
  Status assign(const Lane& lane, int stream_index, EventLoopWorker** worker);
  // Started if it does not run; nullptr: the system cannot start it.
  RecoveryThread* recovery();
  // Closes a comm, which may have to wait for its peer. If it does, the recovery thread closes it.
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
  const WatchedLinks links_;
  Mutex mutex_;
  bool has_started_ GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<EventLoopWorker>> workers_ GUARDED_BY(mutex_);
  bool has_started_recovery_ GUARDED_BY(mutex_) = false;
  std::unique_ptr<RecoveryThread> recovery_ GUARDED_BY(mutex_);
  std::array<std::vector<std::optional<PeerLocation>>, 2> turns_ GUARDED_BY(mutex_);  // by direction; none: not known
};

}  // namespace bagua_net
