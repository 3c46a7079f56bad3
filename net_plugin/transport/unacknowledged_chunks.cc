#include "transport/unacknowledged_chunks.h"

#include <algorithm>

namespace bagua_net {

std::uint64_t UnacknowledgedChunks::first_message() const { return chunks_[first_ % chunks_.size()].request->number_; }

void UnacknowledgedChunks::add(const Chunk& chunk) { chunks_[end_++ % chunks_.size()] = chunk; }

Status UnacknowledgedChunks::take(const std::uint8_t* bytes, std::size_t count) {
  while (count > 0) {
    const std::size_t taken = std::min(count, partial_.size() - partial_bytes_);
    std::copy(bytes, bytes + taken, partial_.begin() + static_cast<std::ptrdiff_t>(partial_bytes_));
    partial_bytes_ += taken;
    bytes += taken;
    count -= taken;
    if (partial_bytes_ < partial_.size()) break;
    partial_bytes_ = 0;
    std::uint64_t received_bytes = 0;
    BAGUA_NET_RETURN_IF_ERROR(decode_acknowledgement(partial_.data(), &received_bytes));
    BAGUA_NET_RETURN_IF_ERROR(take_acknowledgement(received_bytes));
  }
  return Status::ok();
}

Status UnacknowledgedChunks::take_acknowledgement(std::uint64_t received_bytes) {
  std::uint64_t end = first_;
  std::uint64_t bytes = acknowledged_bytes_;
  while (end != end_ && bytes < received_bytes) bytes += chunks_[end++ % chunks_.size()].bytes;
  if (bytes != received_bytes) {
    return Status::remote_error("the receiver acknowledged " + std::to_string(received_bytes) +
                                " bytes, where chunks ended at " + std::to_string(acknowledged_bytes_) +
                                " and end at " + std::to_string(bytes) +
                                ": it broke the protocol or the stream is corrupt");
  }
  acknowledged_bytes_ = bytes;
  for (; first_ != end; ++first_) {
    const Chunk& chunk = chunks_[first_ % chunks_.size()];
    chunk.request->chunk_moved(chunk.bytes, chunk.request->capacity_);
  }
  return Status::ok();
}

}  // namespace bagua_net
