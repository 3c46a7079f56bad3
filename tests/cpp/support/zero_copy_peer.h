// A send comm whose peer is the test, frame by frame.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/zero_copy_connection.h"
#include "wire/acknowledgement.h"
#include "wire/frame_header.h"

namespace bagua_net {

// A send comm with one stream for workers, of which the test is the peer.
struct Sender {
  Buffers buffers;
  WorkerPool pool{1, 50, any_cpu()};
  std::array<OwnedFd, 2> peers;  // by stream index
  WrittenBytes written;
  std::unique_ptr<SendComm> comm;

  explicit Sender(const SendPolicy& policy = referring()) {
    std::vector<std::unique_ptr<ByteStream>> streams;
    for (OwnedFd& peer : peers) {
      auto [near, far] = connected();
      if (&peer == &peers[1]) written.watch(near);
      streams.push_back(make_tcp_byte_stream(std::move(near)));
      peer = std::move(far);
    }
    CHECK_OK(SendComm::create(std::move(streams), "that host", nullptr, policy, &pool, &comm));
  }
  ~Sender() {
    comm.reset();
    pool.stop();
  }
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  Request* send(const std::vector<std::uint8_t>& message) {
    Request* request = nullptr;
    CHECK_OK(comm->isend(message.data(), message.size(), nullptr, &request));
    CHECK(request != nullptr);
    return request;
  }
};

inline std::vector<std::uint8_t> read_exactly(int socket, std::size_t count) {
  std::vector<std::uint8_t> bytes(count);
  std::size_t received = 0;
  const Deadline deadline;
  while (received < count) {
    deadline.check("bytes");
    pollfd readable{socket, POLLIN, 0};
    ::poll(&readable, 1, 1000);
    const ssize_t got = ::recv(socket, bytes.data() + received, count - received, MSG_DONTWAIT);
    CHECK(got > 0 || (got < 0 && errno == EAGAIN));
    if (got > 0) received += static_cast<std::size_t>(got);
  }
  return bytes;
}

struct Frame {
  FrameHeader header;
  std::vector<std::uint8_t> payload;
};

inline Frame read_frame(int socket) {
  Frame frame;
  const std::vector<std::uint8_t> header = read_exactly(socket, kFrameHeaderBytes);
  CHECK_OK(decode_frame_header(header.data(), &frame.header));
  frame.payload = read_exactly(socket, frame.header.payload_bytes);
  return frame;
}

inline void write_all(int socket, const std::vector<std::uint8_t>& bytes) {
  CHECK_EQ(::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

inline std::vector<std::uint8_t> acknowledgement(std::uint64_t chunks) {
  std::vector<std::uint8_t> bytes(kAcknowledgementBytes);
  encode_acknowledgement({chunks, false}, bytes.data());
  return bytes;
}

inline void close_with_reset(OwnedFd& socket) {
  const linger at_once{1, 0};
  CHECK_EQ(::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once), 0);
  socket.reset();
}

inline void check_names(const Status& status, const std::string& what) {
  CHECK(status.code() == StatusCode::kRemoteError);
  if (status.message().find(what) == std::string::npos) {
    check::fail(__FILE__, __LINE__, "no \"" + what + "\" in: " + status.message());
  }
}

}  // namespace bagua_net
