// SendComm: the sending end of a connection. A message goes one of two ways: on stream 0, written at once by the
// thread that posts it (small messages, and everything when there is one stream); or striped, cut into chunks which
// the other streams pull.
#pragma once

#include "transport/comm.h"
#include "transport/established_connection.h"

namespace bagua_net {

struct SendPolicy {
  // Up to this size a message goes on stream 0 when workers drive the others; a quarter of it when the calling thread
  // has no time left.
  std::size_t inline_bytes = 65536;
  std::size_t min_chunk_bytes = 65536;
};

class SendComm final : public Comm {
 public:
  static Status create(EstablishedConnection connection, const SendPolicy& policy, WorkerPool* pool,
                       std::unique_ptr<SendComm>* comm);
  // The same over any byte streams: what create() does with sockets, and the tests with fakes.
  static Status create(std::vector<std::unique_ptr<ByteStream>> streams, std::string peer, std::size_t max_chunk_bytes,
                       const SendPolicy& policy, WorkerPool* pool, std::unique_ptr<SendComm>* comm);
  ~SendComm() override { stop_streams(); }

  // *request == nullptr: no room now, call again.
  Status isend(const void* data, std::size_t bytes, MemoryRegistration* registration, Request** request);

 private:
  SendComm(std::string peer, const SendPolicy& policy, std::size_t max_chunk_bytes, std::size_t streams,
           bool has_workers);

  bool has_own_work(const Request& request) const override;
  std::size_t message_bytes(const Request& request) const override;
  bool should_stripe(std::size_t bytes) const;

  const SendPolicy policy_;
  const bool stripes_elsewhere_;  // workers drive the streams from 1 on
  ChunkScheduler own_chunks_;     // pulled by the calling thread's streams
  ChunkScheduler striped_chunks_;
};

}  // namespace bagua_net
