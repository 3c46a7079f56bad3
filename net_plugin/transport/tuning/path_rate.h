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
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bagua_net {

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
