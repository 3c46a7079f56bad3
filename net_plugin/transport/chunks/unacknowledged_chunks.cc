#include "transport/chunks/unacknowledged_chunks.h"

#include <algorithm>
#include <utility>

namespace bagua_net {

std::uint64_t UnacknowledgedChunks::first_message() const {
  for (std::uint64_t position = first_; position != end_; ++position) {
    if (entry(position).chunk.request != nullptr) return entry(position).chunk.message_number;
  }
  return entry(first_).chunk.message_number;
}

void UnacknowledgedChunks::count(const Chunk& chunk, int sign) {
  if (chunk.request != nullptr) requests_ += static_cast<std::size_t>(sign);
  if (chunk.by_reference) references_ += static_cast<std::size_t>(sign);
  if (chunk.copy.bytes != nullptr) copied_bytes_ += chunk.bytes * static_cast<std::size_t>(sign);
}

void UnacknowledgedChunks::add(Chunk chunk) {
  if (size() == entries_.size()) {
    std::vector<Entry> larger(2 * entries_.size());
    for (std::uint64_t position = first_; position != end_; ++position) {
      larger[position % larger.size()] = std::move(entry(position));
    }
    entries_ = std::move(larger);
  }
  count(chunk, 1);
  Entry& added = entry(end_++);
  added.ordinal = ++written_;
  added.chunk = std::move(chunk);
}

Status UnacknowledgedChunks::take(const std::uint8_t* bytes, std::size_t count, BlockPool* pool) {
  while (count > 0) {
    const std::size_t taken = std::min(count, partial_.size() - partial_bytes_);
    std::copy(bytes, bytes + taken, partial_.begin() + static_cast<std::ptrdiff_t>(partial_bytes_));
    partial_bytes_ += taken;
    bytes += taken;
    count -= taken;
    if (partial_bytes_ < partial_.size()) break;
    partial_bytes_ = 0;
    Acknowledgement acknowledgement;
    BAGUA_NET_RETURN_IF_ERROR(decode_acknowledgement(partial_.data(), &acknowledgement, checksums_));
    BAGUA_NET_RETURN_IF_ERROR(take_acknowledgement(acknowledgement, pool));
  }
  return Status::ok();
}

Status UnacknowledgedChunks::take_acknowledgement(const Acknowledgement& acknowledgement, BlockPool* pool) {
  if (acknowledgement.chunks > written_ || acknowledgement.chunks < acknowledged_) {
    return Status::remote_error("the receiver acknowledged " + std::to_string(acknowledgement.chunks) +
                                " chunks after " + std::to_string(acknowledged_) + ", where " +
                                std::to_string(written_) +
                                " were sent: it broke the protocol or the stream is corrupt");
  }
  acknowledged_ = acknowledgement.chunks;
  peer_has_closed_ |= acknowledgement.is_last;
  if (acknowledgement.lost_port != 0) lost_ports_ = with_lost_port(lost_ports_, acknowledgement.lost_port);
  for (; first_ != end_ && entry(first_).ordinal <= acknowledged_; ++first_) {
    Chunk& chunk = entry(first_).chunk;
    count(chunk, -1);
    if (chunk.request != nullptr) chunk.request->chunk_moved(chunk.bytes, chunk.message_bytes);
    pool->give_back(std::move(chunk.copy));
  }
  return Status::ok();
}

std::vector<Chunk> UnacknowledgedChunks::take_all() {
  std::vector<Chunk> chunks;
  for (; first_ != end_; ++first_) {
    count(entry(first_).chunk, -1);
    chunks.push_back(std::move(entry(first_).chunk));
  }
  return chunks;
}

}  // namespace bagua_net
