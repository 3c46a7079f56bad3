// CommGrowth: what one send comm reports to the StreamGrowth of its interface, and the connections that it requests and
// gives back in return. Not thread-safe: the comm's mutex guards every call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "transport/chunks/limits.h"
#include "transport/comm/send_policy.h"

namespace bagua_net {

class CommGrowth {
 public:
  // policy: of the comm; outlives this. first_streams: that the comm began with; it never has fewer.
  CommGrowth(const SendPolicy& policy, std::size_t first_streams) : policy_(policy), first_streams_(first_streams) {}

  // The number of streams is not fixed, and a message of this size would be more than one chunk if each connection were
  // limited. Only such messages are reported.
  bool counts(std::size_t bytes) const {
    return policy_.growth != nullptr && bytes > policy_.min_chunk_bytes / kLimitedFlowShare;
  }
  // A message is under way for longer than two round trips: the path's rate keeps it there, and not its length. 0: the
  // round trip is unknown.
  bool is_held_up(double round_trip_ns, std::int64_t now_ns) const;
  // waits: more connections might move it sooner.
  void add_posted(bool waits, std::int64_t now_ns);
  void add_sent(std::size_t bytes, std::int64_t now_ns);
  // The comm is closed: what is in flight will not be reported.
  void stop(std::int64_t now_ns);

  // How many streams the comm should use, and how many it should keep open.
  std::size_t target() const;
  std::size_t kept() const;

  // The comm has this many streams: requests those that are missing, unless it has done so recently.
  void request(std::size_t streams, std::int64_t now_ns);
  // Whether to look, with this many streams, for some that can be given back.
  bool is_give_back_due(std::size_t streams, std::int64_t now_ns);
  // A stream was closed; this many are left.
  void gave_back(std::size_t streams);

 private:
  void keep_optional(std::size_t streams);

  const SendPolicy& policy_;
  const std::size_t first_streams_;
  std::size_t posted_ = 0;  // messages, ever
  std::size_t sent_ = 0;
  // Of the last ones; they are sent in about the order in which they were posted.
  std::array<std::int64_t, kMaxRequestsPerComm> posted_ns_{};
  std::size_t requested_ = 0;          // streams in all, including those that the comm has
  std::int64_t request_again_ns_ = 0;  // when to stop waiting for those that did not join
  std::int64_t give_back_ns_ = 0;      // when to look for streams to close; 0: there are none
};

}  // namespace bagua_net
