// StallReport: what a process says in the log when its comms wait for peers unusually long: one line for whom, and one
// when all go on. Shared by all comms of a process; each reports for itself from the thread that calls it, once a
// second at most. Any thread; the clock is passed in.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace bagua_net {

class StallReport {
 public:
  // after_ms: from then on a request waits long; 0: nothing is reported.
  explicit StallReport(int after_ms) : after_ms_(after_ms) {}

  int after_ms() const { return after_ms_; }

  struct Wait {
    std::string peer;
    bool receives = false;
    std::int64_t ms = 0;  // of its oldest request
    std::string why;      // what is outstanding, and what the kernel says of the connections
  };

  // A comm waits, and still does. Returns the line that is due now; "": none.
  std::string waits(const void* comm, Wait wait, std::int64_t now_ms);
  // It waits no more. A comm that never waited may say so, too.
  std::string goes_on(const void* comm);

 private:
  std::string line() const;

  const int after_ms_;
  std::mutex mutex_;  // guards everything below
  std::map<const void*, Wait> waiting_;
  std::int64_t due_ms_ = 0;      // when to write a line; 0: nobody waits
  std::int64_t longest_ms_ = 0;  // that a comm has waited in this stall
  bool is_written_ = false;      // there was a line
};

}  // namespace bagua_net
