// libFuzzer target: what a peer may send once the handshake is over. To a receiving comm any bytes on two streams; to a
// sending one anything as acknowledgements. Memory beyond a receive is never touched, and no message is longer than it.
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "fuzz/fuzz_input.h"
#include "support/comm_parts.h"
#include "transport/comm/recv_comm.h"
#include "transport/comm/send_comm.h"
#include "wire/frames.h"

namespace bagua_net {
namespace {

constexpr std::size_t kStreams = 2;

// Ours, and the peer's ends.
EstablishedConnection make_connection(std::vector<OwnedFd>* peers) {
  EstablishedConnection connection;
  connection.max_chunk_bytes = 4096;
  connection.peer = "the peer";
  connection.same_host = true;
  connection.acknowledges = true;
  for (std::size_t i = 0; i < kStreams; ++i) {
    int ends[2];
    require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "no socket pair");
    connection.sockets.emplace_back(OwnedFd(ends[0]));
    peers->emplace_back(ends[1]);
  }
  return connection;
}

WorkerPool& no_workers() {
  static auto& pool = *new WorkerPool(0, 0, any_cpu());
  return pool;
}

// A message under way: memory of exactly its size, so that a byte beyond it is a finding.
struct Message {
  std::unique_ptr<std::uint8_t[]> memory;
  std::size_t bytes;
  Request* request = nullptr;
};

// False: the comm has failed.
bool test_all(std::vector<Message>& messages) {
  for (Message& message : messages) {
    if (message.request == nullptr) continue;
    bool done = false;
    std::size_t bytes = 0;
    if (!message.request->test(&done, &bytes).is_ok()) return false;
    require(!done || bytes <= message.bytes, "a message is longer than its receive");
    if (done) message.request = nullptr;
  }
  return true;
}

void send_some(const OwnedFd& socket, const std::uint8_t* bytes, std::size_t count) {
  [[maybe_unused]] const ssize_t ignored = ::send(socket.get(), bytes, count, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void receive(FuzzInput& input) {
  std::vector<OwnedFd> peers;
  std::vector<Message> messages;
  std::unique_ptr<RecvComm> comm;
  require(RecvComm::create(make_connection(&peers), {}, &no_workers(), &comm).is_ok(), "no comm");
  std::uint64_t number = 0;
  for (int step = 0; step < 40 && !input.is_empty(); ++step) {
    const OwnedFd& peer = peers[input.byte() % kStreams];
    std::array<std::uint8_t, 512> bytes{};
    switch (input.byte() % 5) {
      case 0: {
        const std::size_t room = input.number(1000);
        messages.push_back({std::make_unique<std::uint8_t[]>(room), room});
        if (!comm->irecv(messages.back().memory.get(), room, nullptr, &messages.back().request).is_ok()) return;
        break;
      }
      case 1: send_some(peer, bytes.data(), input.take(bytes.data(), input.byte())); break;
      case 2:
      case 3: {  // a frame that may fit, and some bits of it changed
        FrameHeader header;
        header.payload_bytes = static_cast<std::uint32_t>(input.number(400));
        header.message_number = number + input.byte() % 3;
        header.offset = input.number(400);
        header.message_bytes = header.offset + header.payload_bytes + input.number(100);
        header.acknowledge = input.byte() % 2 == 1;
        number += input.byte() % 2;
        encode_frame_header(header, bytes.data());
        if (input.byte() % 4 == 3) input.disturb(bytes.data(), kFrameHeaderBytes);
        send_some(peer, bytes.data(), kFrameHeaderBytes + header.payload_bytes);
        break;
      }
      default:
        if (input.byte() % 8 == 0) ::shutdown(peer.get(), SHUT_WR);
        break;
    }
    if (!test_all(messages)) return;
  }
}

void send(FuzzInput& input) {
  std::vector<OwnedFd> peers;
  std::vector<Message> messages;
  std::unique_ptr<SendComm> comm;
  SendPolicy policy;
  policy.inline_bytes = 256;
  policy.min_chunk_bytes = 512;
  policy.max_chunk_bytes = 4096;
  require(SendComm::create(make_connection(&peers), std::move(policy), &no_workers(), &comm).is_ok(), "no comm");
  for (int step = 0; step < 40 && !input.is_empty(); ++step) {
    const OwnedFd& peer = peers[input.byte() % kStreams];
    std::array<std::uint8_t, 512> bytes{};
    switch (input.byte() % 4) {
      case 0: {
        const std::size_t count = input.number(3000);
        messages.push_back({std::make_unique<std::uint8_t[]>(count), count});
        if (!comm->isend(messages.back().memory.get(), count, nullptr, &messages.back().request).is_ok()) return;
        break;
      }
      case 1: send_some(peer, bytes.data(), input.take(bytes.data(), input.byte())); break;
      case 2:
        encode_acknowledgement(
            {input.number(8000), input.byte() % 4 == 3, static_cast<std::uint16_t>(input.number(0xffff))},
            bytes.data());
        if (input.byte() % 4 == 3) input.disturb(bytes.data(), kAcknowledgementBytes);
        send_some(peer, bytes.data(), kAcknowledgementBytes);
        break;
      default:
        while (::recv(peer.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
        }
        break;
    }
    if (!test_all(messages)) return;
  }
}

}  // namespace
}  // namespace bagua_net

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  bagua_net::FuzzInput input(data, size);
  if (input.byte() % 4 == 0) {
    bagua_net::send(input);
  } else {
    bagua_net::receive(input);
  }
  return 0;
}
