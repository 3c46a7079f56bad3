// StallReport: what a process says in the log when its comms, open or about to be, wait for peers unusually long: one
// line for whom, and one when all go on. Shared by all of them; each reports for itself from the thread that calls it,
// once a second at most. Who does not any more, as after an abort, is forgotten. Any thread; the clock is passed in.
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

  // In the order in which they are named. Who waits to send may do so because the other waits in turn.
  enum class Waits { kToReceive, kToBeConnected, kToSend };

  struct Wait {
    std::string peer;  // kToBeConnected: the address where it is waited for
    Waits what = Waits::kToReceive;
    std::int64_t ms = 0;       // of its oldest request
    std::string why;           // what is outstanding, and what the kernel says of the connections
    std::int64_t said_ms = 0;  // when it said so; set by waits()
  };

  // A comm waits, and still does. Returns the line that is due now; "": none.
  std::string waits(const void* comm, Wait wait, std::int64_t now_ms);
  // It waits no more. A comm that never waited may say so, too.
  std::string goes_on(const void* comm);
  // The same without a line, and without memory. Returns how long a comm has waited, if a reported stall ends; or 0.
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
