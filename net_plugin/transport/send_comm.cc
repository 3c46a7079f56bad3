#include "transport/send_comm.h"

#include <algorithm>

#include "base/monotonic_clock.h"
#include "transport/send_stream.h"
#include "transport/thread_load.h"

namespace bagua_net {

SendComm::SendComm(std::string peer, const SendPolicy& policy, std::size_t max_chunk_bytes, std::size_t streams,
                   bool has_workers)
    : Comm(std::move(peer)),
      policy_(policy),
      stripes_elsewhere_(has_workers && streams > 1),
      own_chunks_(
          {stripes_elsewhere_ ? 1 : streams, std::min(policy.min_chunk_bytes, max_chunk_bytes), max_chunk_bytes}),
      striped_chunks_({std::max<std::size_t>(streams - 1, 1), std::min(policy.min_chunk_bytes, max_chunk_bytes),
                       max_chunk_bytes}) {}

Status SendComm::create(EstablishedConnection connection, const SendPolicy& policy, WorkerPool* pool,
                        std::unique_ptr<SendComm>* comm) {
  std::vector<std::unique_ptr<ByteStream>> streams;
  for (OwnedFd& socket : connection.sockets) streams.push_back(make_tcp_byte_stream(std::move(socket)));
  return create(std::move(streams), std::move(connection.peer), connection.max_chunk_bytes, policy, pool, comm);
}

Status SendComm::create(std::vector<std::unique_ptr<ByteStream>> streams, std::string peer, std::size_t max_chunk_bytes,
                        const SendPolicy& policy, WorkerPool* pool, std::unique_ptr<SendComm>* comm) {
  std::unique_ptr<SendComm> created(
      new SendComm(std::move(peer), policy, max_chunk_bytes, streams.size(), pool->size() > 0));
  std::vector<std::unique_ptr<DataStream>> data_streams;
  for (std::size_t index = 0; index < streams.size(); ++index) {
    ChunkScheduler* scheduler =
        created->stripes_elsewhere_ && index > 0 ? &created->striped_chunks_ : &created->own_chunks_;
    data_streams.push_back(
        std::make_unique<SendStream>(std::move(streams[index]), created.get(), static_cast<int>(index), scheduler));
  }
  BAGUA_NET_RETURN_IF_ERROR(created->start_streams(std::move(data_streams), pool));
  *comm = std::move(created);
  return Status::ok();
}

bool SendComm::should_stripe(std::size_t bytes) const {
  if (!stripes_elsewhere_) return false;
  if (bytes > policy_.inline_bytes) return true;
  return bytes > policy_.inline_bytes / 4 && ThreadLoad::of_this_thread().is_saturated();
}

Status SendComm::isend(const void* data, std::size_t bytes, MemoryRegistration* registration, Request** request) {
  *request = nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_failed()) return failure();
  Request* posted = free_request();
  if (posted == nullptr) return Status::ok();
  // The schedulers only read through this pointer.
  posted->start(this, next_number_++, const_cast<void*>(data), bytes, registration);
  posted->striped_ = should_stripe(bytes);
  if (!posted->striped_) {
    own_chunks_.push(posted);
    drive_own_streams();
  } else {
    striped_chunks_.push(posted);
    ThreadLoad::of_this_thread().add_handed_over(bytes, monotonic_ns());
    // No more streams than can get a chunk; blocked ones come back by themselves.
    std::size_t wanted = (bytes + policy_.min_chunk_bytes - 1) / policy_.min_chunk_bytes;
    for (std::size_t offset = 0; offset < streams_.size() - 1 && wanted > 0; ++offset) {
      const std::size_t index = 1 + (posted->number_ + offset) % (streams_.size() - 1);
      if (streams_[index].stream->is_blocked()) continue;
      kick(static_cast<int>(index));
      --wanted;
    }
  }
  *request = posted;
  return Status::ok();
}

bool SendComm::has_own_work(const Request& request) const { return !request.striped_; }

std::size_t SendComm::message_bytes(const Request& request) const { return request.capacity_; }

}  // namespace bagua_net
