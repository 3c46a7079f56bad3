// PathLoad: what all comms of a process have under way over one path ([Note: pairs of interfaces] in
// transport/connect/nic_paths.h), and how fast it delivers that. NCCL sends over several comms at the same time, and
// one that knew only its own part would take a busy path for a free one. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/mutex.h"
#include "transport/tuning/path_rate.h"
#include "transport/tuning/rate_estimator.h"

namespace bagua_net {

// The bytes that a stream has taken and the peer has not received yet.
struct Backlog {
  std::size_t under_way = 0;  // in all
  std::size_t unsent = 0;     // of these, what has not left the socket
};

class PathLoad {
 public:
  // told_rate: what the kernel says of the interface; 0: nothing. It says nothing about the way beyond.
  explicit PathLoad(double told_rate = 0) : told_rate_(told_rate) {}

  // Rates in bytes per ns; 0: unknown.
  struct State {
    double told = 0;
    double most = 0;          // what the path may reach
    bool is_limit = false;    // and it reaches no more: as much was queued
    double certain = 0;       // what it reaches again, most probably
    bool is_old = false;      // that was measured so long ago that it may be faster now
    bool is_held_up = false;  // a connection has delivered nothing for much longer than its bytes take
    double round_trip_ns = 0;
    // What is left if the path has reached `most` since the last look at it, and if it has reached `certain`.
    Backlog least_left;
    Backlog most_left;
  };
  State state(std::int64_t now_ns);

  std::size_t add_connection();
  void remove_connection(std::size_t connection);
  // What was found out about a connection. pace: that it alone would have, bytes per ns. at_once: if nothing is under
  // way any more, that is so since now, and not since an unknown time.
  void look(std::size_t connection, const Delivery& delivery, const Backlog& backlog, double pace, bool at_once,
            std::int64_t now_ns);
  // It takes these bytes.
  void take(std::size_t connection, std::size_t bytes, std::int64_t now_ns);

 private:
  struct Connection {
    bool is_open = false;
    bool was_seen = false;
    Delivery delivery;
    std::int64_t busy_since_ns = 0;  // not looked at, and something under way; 0: nothing is
    Backlog backlog;                 // taken, and not seen to have been delivered
    std::int64_t progress_ns = 0;    // when it was seen to have delivered more, or began
    double pace = 0;
  };
  // What of the known backlog is left at `now_ns`, if the path is empty at `ends_ns`.
  Backlog left(double ends_ns, double rate, std::int64_t now_ns) const REQUIRES(mutex_);
  void set_backlog(Connection* connection, const Backlog& backlog) REQUIRES(mutex_);
  // The path has so many bytes to deliver now, behind all others or among them.
  void expect(std::size_t bytes, bool behind, std::int64_t now_ns) REQUIRES(mutex_);
  void find_least_round_trip() REQUIRES(mutex_);
  struct Rates {
    double most = 0;
    double certain = 0;
  };
  Rates rates() const REQUIRES(mutex_);
  double permitted_rate() const REQUIRES(mutex_);
  bool holds_up(const State& state, std::int64_t now_ns) const REQUIRES(mutex_);

  const double told_rate_;
  Mutex mutex_;
  PathRate rate_ GUARDED_BY(mutex_);
  static constexpr std::int64_t kFirstOldNs = 1'000'000'000;
  std::int64_t old_after_ns_ GUARDED_BY(mutex_) = kFirstOldNs;  // a rate that was measured longer ago is old
  std::vector<Connection> connections_ GUARDED_BY(mutex_);
  // Of all connections. Kept and not summed up when it is asked for: who pulls a chunk asks several times.
  Backlog known_ GUARDED_BY(mutex_);
  std::int64_t least_round_trip_us_ GUARDED_BY(mutex_) = 0;
  // When the path has delivered all that it took: its connections share it, so together they deliver at its rate.
  double ends_at_most_ns_ GUARDED_BY(mutex_) = 0;
  double ends_at_certain_ns_ GUARDED_BY(mutex_) = 0;
  bool is_held_up_ GUARDED_BY(mutex_) = false;
  std::int64_t held_up_at_ns_ GUARDED_BY(mutex_) = 0;  // when that was looked up
};

}  // namespace bagua_net
