// Request: one isend or irecv, from posting until test() reports it done; then the pointer is dead. Requests live in a
// ring inside their comm, so posting allocates nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/status.h"

namespace bagua_net {

class Comm;
struct MemoryRegistration;

class Request {
 public:
  // Called by one thread at a time per comm (NCCL's progress thread). Drives the comm's I/O as well.
  // *bytes is the size of the message, written when *done is.
  Status test(bool* done, std::size_t* bytes);

  // Under the mutex of whatever publishes the request to the streams (scheduler or receive table), or before it.
  void start(Comm* comm, std::uint64_t number, void* data, std::size_t capacity, MemoryRegistration* registration) {
    comm_ = comm;
    number_ = number;
    data_ = static_cast<std::uint8_t*>(data);
    capacity_ = capacity;
    registration_ = registration;
    size_known_ = false;
    moved_.store(0, std::memory_order_relaxed);
    done_.store(false, std::memory_order_relaxed);
    in_use_ = true;
  }

 private:
  friend class ChunkScheduler;
  friend class Comm;
  friend class ReceiveTable;
  friend class RecvComm;
  friend class RecvStream;
  friend class SendComm;
  friend class SendStream;
  friend class UnacknowledgedChunks;

  // Any thread, once a chunk has been moved whole. The last one completes the request: release, so that whoever sees
  // `done_` also sees every byte that the other threads wrote (acquire-release on `moved_` chains them).
  void chunk_moved(std::size_t bytes, std::size_t message_bytes) {
    if (moved_.fetch_add(bytes, std::memory_order_acq_rel) + bytes == message_bytes) {
      done_.store(true, std::memory_order_release);
    }
  }
  bool is_done() const { return done_.load(std::memory_order_acquire); }

  Comm* comm_ = nullptr;
  std::uint64_t number_ = 0;
  std::uint8_t* data_ = nullptr;
  std::size_t capacity_ = 0;  // send: size of the message; receive: room for it
  // Receive: size of the message once its first chunk came (guarded by the receive table's mutex until done).
  std::size_t message_bytes_ = 0;
  bool size_known_ = false;
  MemoryRegistration* registration_ = nullptr;
  std::atomic<std::size_t> moved_{0};
  std::atomic<bool> done_{false};
  bool in_use_ = false;   // calling thread only
  bool striped_ = false;  // calling thread only; send: workers move it
  // Send: when workers with nothing else to do were given it; 0: others were before it, or no socket had room. Before
  // it is published.
  std::int64_t handed_over_ns_ = 0;
};

}  // namespace bagua_net
