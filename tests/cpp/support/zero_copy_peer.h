// A send comm with workers that send by reference, whose peer is the test: it reads frame by frame, and acknowledges.
#pragma once

#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "support/comm_pair.h"
#include "support/raw_handshake.h"
#include "wire/acknowledgement.h"
#include "wire/frame_header.h"

namespace bagua_net {

constexpr std::size_t kMinChunk = 65536;
constexpr std::size_t kReferred = 1u << 20;  // large enough a message to go out by reference

inline SendPolicy referring() {
  SendPolicy policy;
  policy.inline_bytes = 0;
  policy.max_chunk_bytes = 4 * kMinChunk;
  policy.zero_copy = true;
  return policy;
}

// Bytes of the streams from the second on that are in the kernel, or were, as its sending ends see it. From then on
// the sockets are the comm's alone.
inline void wait_until_written(std::vector<OwnedFd>* senders, std::size_t bytes) {
  wait_until(
      [&] {
        std::size_t written = 0;
        for (std::size_t index = 1; index < senders->size(); ++index) {
          const std::uint64_t acknowledged = tcp_info_of((*senders)[index].get()).tcpi_bytes_acked;
          int queued = 0;
          CHECK_EQ(::ioctl((*senders)[index].get(), SIOCOUTQ, &queued), 0);
          // What was acknowledged in between is missed, and seen the next time. The first "byte" is the SYN.
          written += acknowledged - 1 + static_cast<std::size_t>(queued);
        }
        return written >= bytes;
      },
      "bytes of the sender");
  senders->clear();
}

struct Frame {
  FrameHeader header;
  std::vector<std::uint8_t> payload;
};

struct SenderToTest {
  std::vector<std::uint8_t> message = make_message(0, kReferred);  // as long as the comm
  WorkerPool pool{1, 50, any_cpu()};
  std::vector<OwnedFd> peers;  // by stream index; the second takes what workers send
  std::vector<OwnedFd> watched;
  std::unique_ptr<SendComm> comm;

  explicit SenderToTest(const SendPolicy& policy = referring(), std::size_t streams_count = 2) {
    std::vector<std::unique_ptr<ByteStream>> streams;
    for (std::size_t i = 0; i < streams_count; ++i) {
      auto [near, far] = tcp_pair();
      watched.emplace_back(::fcntl(near.get(), F_DUPFD_CLOEXEC, 0));
      streams.push_back(make_tcp_byte_stream(std::move(near)));
      make_blocking(far);
      peers.push_back(std::move(far));
    }
    CHECK_OK(SendComm::create(std::move(streams), "that host", nullptr, policy, &pool, &comm));
  }
  ~SenderToTest() {
    comm.reset();
    pool.stop();
  }
  SenderToTest(const SenderToTest&) = delete;
  SenderToTest& operator=(const SenderToTest&) = delete;

  Request* send() { return send(message.data(), message.size()); }
  Request* send(const void* data, std::size_t bytes) const {
    Request* request = nullptr;
    CHECK_OK(comm->isend(data, bytes, nullptr, &request));
    CHECK(request != nullptr);
    return request;
  }
  FrameHeader read_header(std::size_t stream = 1) const {
    FrameHeader header;
    std::array<std::uint8_t, kFrameHeaderBytes> bytes;
    read_bytes(peers[stream], bytes.data(), bytes.size());
    CHECK_OK(decode_frame_header(bytes.data(), &header));
    return header;
  }
  Frame read_frame(std::size_t stream = 1) const {
    Frame frame{read_header(stream), {}};
    frame.payload.resize(frame.header.payload_bytes);
    if (!frame.payload.empty()) read_bytes(peers[stream], frame.payload.data(), frame.payload.size());
    return frame;
  }
  void acknowledge(std::uint64_t chunks) const {
    std::array<std::uint8_t, kAcknowledgementBytes> bytes;
    encode_acknowledgement({chunks, false}, bytes.data());
    send_bytes(peers[1], bytes.data(), bytes.size());
  }
  void end(bool resets) { resets ? reset_connection(&peers[1]) : peers[1].reset(); }
};

}  // namespace bagua_net
