// StallReport: the lines that a process logs when its comms wait unusually long: one line that names the peers, and one
// when all comms continue. Shared by all comms of a process, those that are being accepted included. Each comm reports
// from the thread that calls it, at most once a second; one that no longer reports, as after an abort, is dropped. Any
// thread; the clock is passed in.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include "base/mutex.h"

namespace bagua_net {

class StallReport {
 public:
  // after_ms: from then on a request waits long; 0: nothing is reported.
  // rank: of this process; -1: unknown.
  explicit StallReport(int after_ms, int rank = -1) : after_ms_(after_ms), rank_(rank) {}

  int after_ms() const { return after_ms_; }
  // How long nobody needs to look whether it waits long.
  int look_again_ms() const { return std::min(1000, after_ms_); }

  // In the order in which the line names them: receives come first, because a peer may not take a send while it waits
  // itself.
  enum class Waits { kToReceive, kToBeConnected, kToSend };

  struct Wait {
    std::string peer;  // kToBeConnected: the address at which this process listens
    Waits what = Waits::kToReceive;
    std::int64_t ms = 0;       // of its oldest request
    std::string why;           // what is outstanding, and what the kernel says of the connections
    std::int64_t said_ms = 0;  // of the report; set by waits()
  };

  // The comm waits. Returns a line that is due now; "": none.
  std::string waits(const void* comm, Wait wait, std::int64_t now_ms);
  // The comm does not wait any more, if it did. Returns a line, if this ends a stall that was logged.
  std::string goes_on(const void* comm);
  // The same, without allocating. Returns the length of the stall that was logged and ends; 0: none.
  std::int64_t forget(const void* comm) noexcept;

 private:
  std::string line() const REQUIRES(mutex_);

  const int after_ms_;
  const int rank_;
  Mutex mutex_;
  std::map<const void*, Wait> waiting_ GUARDED_BY(mutex_);
  std::int64_t due_ms_ GUARDED_BY(mutex_) = 0;      // when to write a line; 0: nobody waits
  std::int64_t longest_ms_ GUARDED_BY(mutex_) = 0;  // that a comm has waited in this stall
  bool is_written_ GUARDED_BY(mutex_) = false;      // there was a line
};

}  // namespace bagua_net
