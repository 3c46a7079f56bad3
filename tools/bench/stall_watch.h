// StallWatch: the idle passes of a busy loop that drives a transport. Main thread only.
#pragma once

#include <cstdint>

namespace bagua_net::bench {

class StallWatch {
 public:
  explicit StallWatch(std::int64_t timeout_ms) : timeout_ms_(timeout_ms) {}

  void progressed() { idle_passes_ = idle_since_ms_ = 0; }
  // A pass in which nothing moved: gives the CPU away, in a long stall for a while. True once nothing has
  // moved for the timeout.
  bool idle();

 private:
  const std::int64_t timeout_ms_;
  std::int64_t idle_passes_ = 0;
  std::int64_t idle_since_ms_ = 0;
};

}  // namespace bagua_net::bench
