#include "transport/receive_table.h"

#include <utility>

namespace bagua_net {

std::uint64_t ReceiveTable::post(Request* request, Comm* comm, std::uint64_t number, void* data, std::size_t capacity,
                                 MemoryRegistration* registration) {
  const std::lock_guard<std::mutex> lock(mutex_);
  request->start(comm, number, data, capacity, registration);
  posted_[number % posted_.size()] = request;
  posted_count_ = number + 1;
  return std::exchange(parked_streams_, 0);
}

Status ReceiveTable::find(const FrameHeader& header, int stream_index, Request** request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  *request = nullptr;
  if (header.message_number >= posted_count_) {
    parked_streams_ |= std::uint64_t{1} << stream_index;
    return Status::ok();
  }
  Request* found = posted_[header.message_number % posted_.size()];
  if (found == nullptr || found->number_ != header.message_number || found->is_done()) {
    return Status::remote_error("chunk for message " + std::to_string(header.message_number) +
                                ", which is already complete: the peer broke the protocol");
  }
  const bool is_first = !found->size_known_;
  if (is_first) {
    if (header.message_bytes > found->capacity_) {
      return Status::invalid_usage("message " + std::to_string(header.message_number) + " of " +
                                   std::to_string(header.message_bytes) + " bytes is larger than its receive of " +
                                   std::to_string(found->capacity_) +
                                   " bytes: the ranks call different collectives, counts or data types");
    }
    found->size_known_ = true;
    found->message_bytes_ = header.message_bytes;
  }
  // A chunk counts from its header on. Otherwise a peer whose chunks overlap could complete a message while another
  // stream still writes into its memory, which then is no longer ours. A message without bytes is one chunk.
  if (header.message_bytes != found->message_bytes_ || header.payload_bytes > found->message_bytes_ - found->claimed_ ||
      (found->message_bytes_ == 0 && !is_first)) {
    return Status::remote_error("chunks of message " + std::to_string(header.message_number) +
                                " do not fit together: the peer broke the protocol");
  }
  found->claimed_ += header.payload_bytes;
  *request = found;
  return Status::ok();
}

std::size_t ReceiveTable::parked_count() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<std::size_t>(__builtin_popcountll(parked_streams_));
}

}  // namespace bagua_net
