#include "transport/unacknowledged_chunks.h"

#include <algorithm>

namespace bagua_net {

std::uint64_t UnacknowledgedChunks::first_message() const { return chunks_[first_ % chunks_.size()].request->number_; }

void UnacknowledgedChunks::add(const Chunk& chunk) {
  chunks_[end_++ % chunks_.size()] = chunk;
  added_bytes_ += chunk.bytes;
}

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
  while (first_ != end_) {
    const Chunk& chunk = chunks_[first_ % chunks_.size()];
    if (received_bytes - acknowledged_bytes_ < chunk.bytes) break;
    acknowledged_bytes_ += chunk.bytes;
    ++first_;
    chunk.request->chunk_moved(chunk.bytes, chunk.request->capacity_);
  }
  if (received_bytes == acknowledged_bytes_) return Status::ok();
  return Status::remote_error("the receiver acknowledged " + std::to_string(received_bytes) + " bytes, but chunks end at " +
                              std::to_string(acknowledged_bytes_) + " of " + std::to_string(added_bytes_) +
                              " sent: it broke the protocol or the stream is corrupt");
}

}  // namespace bagua_net
