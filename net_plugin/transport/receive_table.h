// ReceiveTable: the posted receives of a comm, found by message number. Data streams look up where a chunk belongs;
// a stream whose receive is not posted yet parks and is named to the next post.
//
// [Note: parked streams cannot deadlock] A scheduler hands out chunks in message order, so the message numbers on one
// stream never decrease. Let m be the lowest message that is posted and incomplete. Every chunk of m that is still to
// come either stands at the front of its stream, and is read because m is posted, or stands behind chunks of messages
// below m only, which are posted and complete and hence already read. So m completes; by induction all posted
// messages do, and streams park only on messages that are not posted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "base/status.h"
#include "transport/chunk_scheduler.h"
#include "transport/request.h"
#include "wire/frame_header.h"

namespace bagua_net {

class ReceiveTable {
 public:
  // Starts *request as receive `number` and makes it findable; returns the bit mask of the streams that parked since
  // the last post.
  std::uint64_t post(Request* request, Comm* comm, std::uint64_t number, void* data, std::size_t capacity,
                     MemoryRegistration* registration);

  // *request == nullptr: not posted yet, and the stream counts as parked; else the chunk has begun: once for each.
  // Every number in `header` comes from the peer: an error when it fits no receive.
  Status find(const FrameHeader& header, int stream_index, Request** request);

  // Streams that bring nothing more for what is posted now.
  std::size_t parked_count();

 private:
  std::mutex mutex_;  // guards everything below
  std::array<Request*, kMaxRequestsPerComm> posted_{};
  std::uint64_t posted_count_ = 0;
  std::uint64_t parked_streams_ = 0;
};

}  // namespace bagua_net
