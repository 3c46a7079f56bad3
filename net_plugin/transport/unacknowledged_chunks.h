// UnacknowledgedChunks: the chunks of one stream that went out by reference, in the order in which they did. Their
// memory is being read until the peer has acknowledged them, and only then have they moved. One driver.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "transport/chunk_scheduler.h"
#include "wire/acknowledgement.h"

namespace bagua_net {

class UnacknowledgedChunks {
 public:
  bool is_empty() const { return first_ == end_; }
  // More would wait for acknowledgements that a receiver may not have room to write.
  bool is_full() const { return end_ - first_ == chunks_.size(); }
  std::uint64_t first_message() const;

  void add(const Chunk& chunk);
  // Bytes of the reverse direction, cut anywhere.
  Status take(const std::uint8_t* bytes, std::size_t count);

 private:
  Status take_acknowledgement(std::uint64_t received_bytes);

  std::array<Chunk, 64> chunks_{};
  std::uint64_t first_ = 0;
  std::uint64_t end_ = 0;
  std::uint64_t acknowledged_bytes_ = 0;  // of all chunks ever added, those that are gone
  std::array<std::uint8_t, kAcknowledgementBytes> partial_{};
  std::size_t partial_bytes_ = 0;
};

}  // namespace bagua_net
