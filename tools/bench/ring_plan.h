// RingPlan: which messages a ring all-reduce of a buffer consists of, in NCCL's order.
//
// The buffer is split over the channels. A channel walks its part in loops; a loop is one chunk per rank, a chunk is a
// few slices, a slice is a message. In step s of a loop (0 <= s < 2 * (nranks - 1)) rank r sends chunk (r - s) and
// receives chunk (r - s - 1), both modulo nranks: what it receives in step s is what it sends in step s + 1. Until
// step nranks - 2 contributions are added up, from then on finished sums go round. Both neighbours compute the same
// list, so a message carries nothing but data, and an empty chunk is no message at all.
#pragma once

#include <cstddef>

namespace bagua_net::bench {

struct RingGeometry {
  int rank = 0;
  int nranks = 2;
  int channels = 2;
  std::size_t slice_bytes = std::size_t{1} << 20;  // largest message
  int depth = 4;                                   // messages under way per connection
};

constexpr int kMaxRanks = 1024;
constexpr int kMaxChannels = 64;
constexpr int kMaxDepth = 32;  // NCCL_NET_MAX_REQUESTS
constexpr std::size_t kMaxSliceBytes = std::size_t{1} << 30;
constexpr std::size_t kMaxBufferBytes = std::size_t{1} << 40;

struct RingMessage {
  int step = 0;
  std::size_t offset = 0;  // in the whole buffer
  std::size_t bytes = 0;
};

enum class RingDirection { kSend, kReceive };

class RingPlan {
 public:
  RingPlan(const RingGeometry& geometry, std::size_t buffer_bytes);

  const RingGeometry& geometry() const { return geometry_; }
  std::size_t buffer_bytes() const { return buffer_bytes_; }
  // Channels that carry data: a small buffer does not use all.
  int active_channels() const { return active_channels_; }
  // 4 (float32) if the buffer is a whole number of them, else 1. No message cuts an element.
  std::size_t element_bytes() const { return element_bytes_; }
  std::size_t channel_begin(int channel) const;
  // A chunk has at most half as many slices as may be under way, as in NCCL (2 of 4). The first chunk of a loop leaves
  // before anything that was received is passed on, so more could fill every receive slot of the ring and stop it.
  std::size_t largest_chunk_bytes() const { return largest_chunk_bytes_; }

 private:
  RingGeometry geometry_;
  std::size_t buffer_bytes_;
  std::size_t element_bytes_;
  std::size_t channel_bytes_;
  std::size_t largest_chunk_bytes_;
  int active_channels_;
};

// Walks one channel's messages of one direction. Arithmetic only: nothing is stored per message.
class RingCursor {
 public:
  RingCursor() = default;  // at its end
  RingCursor(const RingPlan& plan, int channel, RingDirection direction);

  bool at_end() const { return loop_begin_ >= end_; }
  const RingMessage& message() const { return message_; }
  void advance();

 private:
  void begin_loop();
  bool find_message();

  int nranks_ = 0;
  int first_chunk_ = 0;  // of step 0; each later step takes the one before
  std::size_t end_ = 0;
  std::size_t element_bytes_ = 1;
  std::size_t slice_bytes_ = 0;
  std::size_t largest_chunk_bytes_ = 0;

  std::size_t loop_begin_ = 0;
  std::size_t chunk_bytes_ = 0;
  std::size_t slice_offset_ = 0;  // in the chunk
  RingMessage message_;
};

}  // namespace bagua_net::bench
