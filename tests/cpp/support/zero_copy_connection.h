// A send and a receive comm of one process, over TCP on the loopback interface, with workers that send by reference.
#pragma once

#include <fcntl.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/monotonic_clock.h"
#include "support/check.h"
#include "support/comm_parts.h"
#include "support/tcp_pair.h"
#include "transport/comm/recv_comm.h"
#include "transport/comm/send_comm.h"
#include "wire/frame_header.h"

namespace bagua_net {

constexpr std::size_t kMinChunk = 65536;
constexpr std::size_t kReferred = 1u << 20;  // large enough a message to go out by reference

inline void set_buffer(const OwnedFd& socket, int option, int bytes) {
  CHECK_EQ(::setsockopt(socket.get(), SOL_SOCKET, option, &bytes, sizeof bytes), 0);
}

inline std::pair<OwnedFd, OwnedFd> connected(int buffer_bytes = 0) {
  auto pair = tcp_pair();
  const int one = 1;
  for (const OwnedFd* end : {&pair.first, &pair.second}) {
    CHECK_EQ(::setsockopt(end->get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one), 0);
    if (buffer_bytes == 0) continue;
    set_buffer(*end, SO_SNDBUF, buffer_bytes);
    set_buffer(*end, SO_RCVBUF, buffer_bytes);
  }
  return pair;
}

// The sending ends of the streams for workers, as far as the kernel is concerned.
class WrittenBytes {
 public:
  void watch(const OwnedFd& near) { duplicates_.emplace_back(::fcntl(near.get(), F_DUPFD_CLOEXEC, 0)); }
  // Of all streams together, since the connection began; then the sockets are the comm's alone.
  void wait_for(std::size_t bytes) {
    wait_until(
        [&] {
          std::size_t written = 0;
          for (const OwnedFd& socket : duplicates_) {
            tcp_info info{};
            socklen_t length = sizeof info;
            CHECK_EQ(::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &length), 0);
            int queued = 0;
            CHECK_EQ(::ioctl(socket.get(), SIOCOUTQ, &queued), 0);
            // What was acknowledged in between is missed, and seen the next time. The first "byte" is the SYN.
            written += info.tcpi_bytes_acked - 1 + static_cast<std::size_t>(queued);
          }
          return written >= bytes;
        },
        "bytes of the sender");
    duplicates_.clear();
  }

 private:
  std::vector<OwnedFd> duplicates_;
};

inline SendPolicy referring() {
  SendPolicy policy;
  policy.inline_bytes = 0;
  policy.max_chunk_bytes = 4 * kMinChunk;
  policy.zero_copy = true;
  return policy;
}

inline bool is_done(Request* request) {
  bool done = false;
  std::size_t bytes = 0;
  CHECK_OK(request->test(&done, &bytes));
  return done;
}

inline Status test_until_done(Request* request) {
  Status status;
  wait_until(
      [&] {
        bool done = false;
        std::size_t bytes = 0;
        status = request->test(&done, &bytes);
        return done || !status.is_ok();
      },
      "a request");
  return status;
}

// Memory of messages, which threads may touch until the comms are gone.
class Buffers {
 public:
  std::vector<std::uint8_t>& keep(std::vector<std::uint8_t> bytes) { return kept_.emplace_back(std::move(bytes)); }
  std::vector<std::uint8_t>& room(std::size_t bytes) { return keep(std::vector<std::uint8_t>(bytes)); }

 private:
  std::deque<std::vector<std::uint8_t>> kept_;
};

// Stream 0 and as many for workers, between two comms of one process.
struct Connection {
  struct Settings {
    std::size_t worker_streams = 2;
    int receiving_workers = 2;
    int buffer_bytes = 0;
    int receive_buffer_bytes = 0;
    SendPolicy policy = referring();
  };

  Buffers buffers;
  WorkerPool sending_pool;
  WorkerPool receiving_pool;
  WrittenBytes written;
  std::vector<OwnedFd> fars;  // duplicates of the receiving ends, where their buffers are set
  bool has_large_receive_buffers = true;
  std::unique_ptr<SendComm> sender;
  std::unique_ptr<RecvComm> receiver;

  Connection() : Connection(Settings()) {}
  explicit Connection(Settings settings)
      : sending_pool(2, 50, any_cpu()), receiving_pool(settings.receiving_workers, 50, any_cpu()) {
    std::vector<std::unique_ptr<ByteStream>> sending;
    std::vector<std::unique_ptr<ByteStream>> receiving;
    for (std::size_t i = 0; i <= settings.worker_streams; ++i) {
      auto [near, far] = connected(settings.buffer_bytes);
      if (i > 0) written.watch(near);
      if (settings.receive_buffer_bytes > 0) {
        set_buffer(far, SO_RCVBUF, settings.receive_buffer_bytes);
        int granted = 0;
        socklen_t length = sizeof granted;
        CHECK_EQ(::getsockopt(far.get(), SOL_SOCKET, SO_RCVBUF, &granted, &length), 0);
        has_large_receive_buffers &= granted >= settings.receive_buffer_bytes;
        fars.emplace_back(::fcntl(far.get(), F_DUPFD_CLOEXEC, 0));
      }
      sending.push_back(make_tcp_byte_stream(std::move(near)));
      receiving.push_back(make_tcp_byte_stream(std::move(far)));
    }
    CHECK_OK(SendComm::create(std::move(sending), "receiver", nullptr, settings.policy, &sending_pool, &sender));
    CHECK_OK(RecvComm::create(std::move(receiving), "sender", nullptr, &receiving_pool, &receiver));
  }
  ~Connection() {
    sender.reset();
    receiver.reset();
    sending_pool.stop();
    receiving_pool.stop();
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  Request* send(const void* data, std::size_t bytes, MemoryRegistration* registration = nullptr) {
    Request* request = nullptr;
    CHECK_OK(sender->isend(data, bytes, registration, &request));
    CHECK(request != nullptr);
    return request;
  }
  Request* receive(void* data, std::size_t bytes) {
    Request* request = nullptr;
    CHECK_OK(receiver->irecv(data, bytes, nullptr, &request));
    CHECK(request != nullptr);
    return request;
  }
};

// Every large message is one chunk.
inline Connection::Settings one_worker_stream(int receiving_workers = 2) {
  Connection::Settings settings;
  settings.worker_streams = 1;
  settings.receiving_workers = receiving_workers;
  return settings;
}

}  // namespace bagua_net
