// StallWatch: the idle passes of a busy loop that drives a transport. Main thread only.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

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

// Lets `work` pass until it has finished. It has finished(), pass(bool* progressed) and describe(). `where` names the
// rank and its neighbours for the error.
template <typename Work>
Status pass_until_finished(Work* work, std::int64_t timeout_ms, const std::string& where) {
  StallWatch watch(timeout_ms);
  while (!work->finished()) {
    bool progressed = false;
    BAGUA_NET_RETURN_IF_ERROR(work->pass(&progressed));
    if (progressed) {
      watch.progressed();
    } else if (watch.idle()) {
      return Status::remote_error("no message completed for " + std::to_string(timeout_ms) + " ms at " + where + "; " +
                                  work->describe() +
                                  ": see whether the other ranks run the same command, or raise --timeout-ms");
    }
  }
  return Status::ok();
}

}  // namespace bagua_net::bench
