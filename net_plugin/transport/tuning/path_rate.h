// PathRate: how fast the connections over one path deliver together. They share its network interfaces: alone, each may
// be as fast as all of them, so neither the largest of their rates nor the sum is the rate of the path.
//
// What was delivered is divided by the time in which something was under way, which gives two bounds. The kernel says
// how long that was for each connection, and not for how long several were under way together. And if nothing was
// queued, short bursts have waited for the round trip: the path may be faster, and is certainly as fast as that for who
// sends little over it. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bagua_net {

class PathRate {
 public:
  // A connection has delivered so many bytes since it was looked at last, and was busy for so long. queued: it has more
  // to send than the path takes at once. In the order of time.
  void add(std::size_t connection, std::uint64_t bytes, std::int64_t busy_us, bool queued, std::int64_t now_ns);

  // Bytes per ns; 0: unknown.
  double least() const { return least_; }                    // with what was sent lately
  double most() const { return most_; }                      // with more
  std::int64_t measured_ns() const { return measured_ns_; }  // when that was last

 private:
  struct Sample {
    std::uint64_t bytes = 0;
    std::int64_t busy_us = 0;
  };

  double least_ = 0;
  double most_ = 0;
  std::int64_t measured_ns_ = 0;
  // The sample that is being taken.
  std::int64_t begin_ns_ = 0;
  std::uint64_t bytes_ = 0;
  int looks_ = 0;
  int queued_looks_ = 0;
  std::int64_t busy_us_ = 0;     // of all connections together
  std::vector<Sample> samples_;  // of each connection
};

}  // namespace bagua_net
