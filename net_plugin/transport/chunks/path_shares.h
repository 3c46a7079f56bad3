// PathLoad: what all comms of a process have under way over one path ([Note: pairs of interfaces] in
// transport/connect/nic_paths.h), and how fast it delivers that. NCCL sends over several comms at the same time, and
// one that knew only its own part would take a busy path for a free one. Any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "transport/chunks/limits.h"
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
    // [Note: what holds up has to pay]; 0 once it may be tried again.
    double held_up_ns = 0;
    double delivered = 0;      // bytes
    bool is_on_trial = false;  // after that
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
    std::uint64_t retransmits = 0;   // until then
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
  // A connection delivered so many bytes, and since then nothing else. sent_again: packets were, in that time.
  void account(double bytes, std::int64_t since_ns, bool sent_again, std::int64_t now_ns) REQUIRES(mutex_);

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
  // The account of [Note: what holds up has to pay], as it was at accounted_ns_.
  double held_up_ns_ GUARDED_BY(mutex_) = 0;
  double delivered_ GUARDED_BY(mutex_) = 0;
  std::int64_t accounted_ns_ GUARDED_BY(mutex_) = 0;
  std::int64_t held_up_until_ns_ GUARDED_BY(mutex_) = 0;  // what was before has been counted
  std::int64_t left_until_ns_ GUARDED_BY(mutex_) = 0;
  double trial_bytes_ GUARDED_BY(mutex_) = 0;  // to deliver until the trial has ended
};

// PathShares: how much of what waits each path may take, where the streams of a comm go over several.
//
// [Note: never later than the best path alone]
// The best path is the one that would deliver the rest of a message first. It may take all of it. Another path gets
// what it certainly delivers before the best one could have delivered the remainder of all messages that wait, and
// nothing if that is too little to pay. So the end of what waits is never later than over the best path alone, if rates
// are what they were. To count only the first message would keep bursts over the other path so short that round trips
// limit its measured rate, and with it the next bursts. A path whose rate is unknown, or may have risen, counts as much
// slower than the best one: it is measured with bytes that nobody waits for. Nothing is shared until the rate of the
// best one is known, because that says how much time there is.
//
// [Note: what holds up has to pay]
// Where a fifth of the packets is lost, a path still has a rate, but its last chunk waits for the kernel's timers, for
// 0.2 s or several times that, and all messages wait with it. So each path has an account of the time for which its
// connections delivered nothing while packets were sent again, and of what it delivered; both are forgotten with time.
// If the best path needs less time for those bytes than they have held up, the path is left out for ten times as long
// as it held up, so that finding out again costs a tenth. Then it is tried with a small chunk, one at a time. The
// nearest healthy situations: a packet that is lost now and then on a path that carries much, which pays; and a peer
// that does not read, to which no packet is sent again.
//
// Which of the streams over a path takes the chunk is decided as with one network interface. Not thread-safe.
class PathShares {
 public:
  // loads: of each path, shared by the comms of the process. Below two, there is no choice.
  explicit PathShares(std::vector<std::shared_ptr<PathLoad>> loads = {})
      : loads_(std::move(loads)), streams_on_(loads_.size()) {}
  PathShares(const PathShares&) = delete;
  PathShares& operator=(const PathShares&) = delete;
  ~PathShares();

  // The streams that send, the path of every stream, and the path to begin with.
  void set_streams(const std::vector<int>& streams, const std::array<std::size_t, kMaxStreams>& path_of,
                   std::size_t first);
  // The streams go over more than one path.
  bool has_choice() const { return has_choice_; }
  std::size_t path_of(int stream) const { return streams_[static_cast<std::size_t>(stream)].path; }

  // Also while there is no choice, because another path may return.
  void look(int stream, const Delivery& delivery, const Backlog& backlog, double pace, bool at_once,
            std::int64_t now_ns);
  void take(int stream, std::size_t bytes, std::int64_t now_ns);

  // The path that would deliver so many bytes first, behind what it has to send. By what the kernel says of interfaces,
  // until the path that it says that of was measured; and the one to begin with counts as no slower than another of its
  // speed, until something was queued over it.
  std::size_t best(std::size_t bytes, std::int64_t now_ns) const;
  // Of so many bytes that wait, how many this path may take now if the best one is that. 0: none.
  std::size_t share(std::size_t path, std::size_t best, std::size_t bytes, std::int64_t now_ns) const;
  // The paths that may take some of what waits, a bit mask: `bytes` in all, `first` of them of the first message.
  std::uint64_t taking(std::size_t first, std::size_t bytes, std::int64_t now_ns) const;

 private:
  struct Stream {
    std::size_t path = 0;
    std::optional<std::size_t> connection;  // in the load of its path; nullopt: it does not send
  };
  void remove(Stream* stream);

  const std::vector<std::shared_ptr<PathLoad>> loads_;
  std::vector<std::size_t> streams_on_;  // by path, how many send
  std::array<Stream, kMaxStreams> streams_;
  std::size_t first_ = 0;
  bool has_choice_ = false;
};

}  // namespace bagua_net
