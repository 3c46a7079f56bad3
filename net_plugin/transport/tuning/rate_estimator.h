// RateEstimator: how fast one stream delivers, from samples of its TCP_INFO.
//
// Acknowledged bytes over time are the rate of the stream only while data is queued. Otherwise they are a lower bound,
// because a stream that gets little data delivers little. On a long path the bound is far too low, because each burst
// costs a round trip. There, the rate that TCP's pacing and window permit is used instead. On a short path, these
// change many times between two samples, and are not used.
//
// Called by the driver of the stream.
//
// Delivery: what the kernel reports about a connection. All estimates of speed are made from it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace bagua_net {

// Bytes and times since the connection began, and the current state of the path.
struct Delivery {
  std::uint64_t bytes = 0;
  std::int64_t busy_us = 0;        // while something was on its way or waited to go out
  std::uint64_t unsent_bytes = 0;  // written, and not gone out yet
  std::int64_t round_trip_us = 0;  // smoothed
  std::int64_t least_round_trip_us = 0;
  double permitted_bytes_per_ns = 0;  // the limit of TCP's pacing and window; 0: unknown
  std::uint64_t retransmits = 0;      // segments, ever
  std::int64_t peer_window_us = 0;    // of busy_us: the peer did not read,
  std::int64_t socket_buffer_us = 0;  // or the buffer was too small
};

// From this round trip on, a path is long. Within a data centre it takes less.
constexpr double kLongPathNs = 1e6;

// A message that is under way for longer waits for the rate of its connections, and not only for the path.
constexpr double kMaxRoundTrips = 2;

inline bool is_long(const Delivery& delivery) {
  return 1e3 * static_cast<double>(delivery.least_round_trip_us) >= kLongPathNs;
}

// Data is queued: in the socket, or in the network, where it makes the round trip longer than its minimum.
inline bool is_queued(const Delivery& delivery) {
  constexpr std::int64_t kJitterUs = 1000;
  return delivery.unsent_bytes > 0 ||
         delivery.round_trip_us > delivery.least_round_trip_us + delivery.least_round_trip_us / 4 + kJitterUs;
}

struct Pace {
  double bytes_per_ns = 0;   // 0: unknown
  double round_trip_ns = 0;  // the least of this path
  bool is_old = false;       // measured so long ago that the stream may be faster now
};

class RateEstimator {
 public:
  // Looks come in the order of time.
  void look(const Delivery& delivery, std::int64_t now_ns);
  Pace pace() const { return pace_; }
  // A stream whose pace is old has taken a chunk, so that these bytes are under way. Until the peer has them, or they
  // take as long as the old pace says, it is not old: otherwise each message would try a slow stream again.
  void begin_trial(std::size_t under_way, std::int64_t now_ns);

 private:
  void sample(const Delivery& delivery, std::int64_t now_ns);
  void judge_trial(const Delivery& delivery, std::int64_t now_ns);

  Pace pace_;
  double measured_ = 0;  // bytes per ns; 0: never
  std::int64_t measured_ns_ = 0;
  std::uint64_t delivered_ = 0;  // bytes, at the last look
  // The trial under way.
  std::uint64_t trial_end_ = 0;  // delivered bytes; 0: there is none
  std::int64_t trial_ns_ = 0;
  double trial_expected_ns_ = 0;
  // The sample that is being taken.
  std::optional<Delivery> begin_;
  bool app_limited_ = false;        // at some time in it nothing was queued
  bool began_app_limited_ = false;  // or in the one before, and the path takes long to fill
};

// PathRate: how fast the connections over one path deliver together. They share its network interfaces: alone, each may
// be as fast as all of them, so neither the largest of their rates nor the sum is the rate of the path.
//
// What was delivered is divided by the time in which something was under way over any of them. In that time, bursts
// have also waited for acknowledgements, behind what the peer sends, and for a CPU. This makes a path look slower the
// less is sent over it, so that it would get less and less. What disturbs makes samples lower, hardly ever higher, so
// the rate is the highest of the last few (as BBR does with each connection: draft-ietf-ccwg-bbr), and at least of two.
// A sample of a path that became slow takes long: what was kFreshNs before the last one counts no more. Where packets
// are lost, samples are low because bytes have waited for retransmission, and the next may wait as long: the rate is
// then the lowest of them. And if nothing was queued, short bursts have waited for the round trip: the path may be
// faster, and is not known to be slower than before. What was known before is forgotten slowly.
//
// A peer whose program reads late is no slow path. The kernel knows when the peer's kernel has everything, but it
// counts in ticks. So a burst lasts at most two ticks longer than the kernel says, and a sample at most twice as long
// as the kernel says of all connections together. Not thread-safe.
class PathRate {
 public:
  // What one connection delivered while it had something under way all the time.
  struct Burst {
    std::uint64_t bytes = 0;
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
    // What the kernel says of this time, without that in which the peer's window was full.
    std::int64_t kernel_busy_ns = 0;
    bool is_over = false;           // nothing is under way any more
    bool queued = false;            // there is more to send than the path takes at once
    std::uint64_t retransmits = 0;  // packets
  };
  // About in the order of end_ns.
  void add(const Burst& burst);

  // Bytes per ns; 0: unknown.
  double least() const { return least_; }  // with what was sent lately
  double most() const { return most_; }    // with more
  // Something was queued in one of the last samples. Otherwise the path may be faster than all of them.
  bool is_limit() const { return since_queued_ < static_cast<int>(kept_.size()); }
  std::int64_t measured_ns() const { return measured_ns_; }  // when that was last

 private:
  struct Interval {
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
    std::int64_t length_ns() const { return end_ns - begin_ns; }
  };
  // Into busy_, with its length in busy_ns_.
  void merge(Interval interval);

  struct Sample {
    double rate = 0;
    std::int64_t end_ns = 0;
    bool is_lossy = false;
  };
  std::array<Sample, 8> kept_{};  // the last ones
  std::size_t samples_ = 0;
  double least_ = 0;
  double most_ = 0;
  int since_queued_ = 8;  // samples
  std::int64_t measured_ns_ = 0;
  // The sample that is being taken.
  double bytes_ = 0;
  double lost_packets_ = 0;
  int looks_ = 0;
  int queued_looks_ = 0;
  std::int64_t counted_until_ns_ = 0;  // what was before belongs to another sample, or can grow no more
  std::vector<Interval> busy_;         // in order, and apart; not what can grow no more
  std::int64_t busy_ns_ = 0;           // of all
  std::int64_t kernel_busy_ns_ = 0;
  std::int64_t longest_ns_ = 0;  // between two looks at a connection
};

}  // namespace bagua_net
