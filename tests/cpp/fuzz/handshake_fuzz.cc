// libFuzzer target: both sides of the handshake, against a peer that says anything: noise, or valid messages with some
// bits changed before or after their proof. Only who proves the token gets in.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "fuzz/fuzz_input.h"
#include "os/epoll_poller.h"
#include "support/connection_ends.h"
#include "transport/connect/inbound_handshakes.h"
#include "transport/connect/outbound_handshakes.h"
#include "wire/frames.h"
#include "wire/handshake_message.h"

namespace bagua_net {
namespace {

template <typename Handshakes>
void pump(EpollPoller& poller, Handshakes& handshakes) {
  std::vector<EpollPoller::Event> events;
  for (int turn = 0; turn < 50; ++turn) {
    poller.wait(0, &events);
    if (events.empty()) return;
    for (const EpollPoller::Event& event : events) handshakes.handle_event(event.id);
  }
}

// Ports of connections that end with a reset are free at once.
void end_with_reset(const OwnedFd& socket) {
  const linger reset{1, 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
}
void say(const OwnedFd& socket, const std::uint8_t* bytes, std::size_t count) {
  [[maybe_unused]] const ssize_t ignored = ::send(socket.get(), bytes, count, MSG_NOSIGNAL | MSG_DONTWAIT);
}
bool hear(const OwnedFd& socket, std::uint8_t* bytes, std::size_t count) {
  return ::recv(socket.get(), bytes, count, MSG_DONTWAIT) == static_cast<ssize_t>(count);
}

struct Inbound {
  HandshakeSettings settings = settings_with({});
  EpollPoller poller;
  HandshakeLoop loop{&poller};
  InboundHandshakes handshakes{settings, &loop};

  Inbound() { require(poller.open().is_ok(), "no poller"); }

  void run(FuzzInput& input) {
    std::array<std::uint8_t, 128> bytes{};
    RandomId id{};
    // Their addresses fit into the handle, or not all.
    require(
        handshakes.listen(std::vector<NetworkInterface>(1 + input.byte() % 9, loopback()), bytes.data(), &id).is_ok(),
        "cannot listen");
    ConnectHandle handle;
    require(decode_connect_handle(bytes.data(), &handle).is_ok(), "our own handle is not one");
    SocketAddress address = loopback().address;
    address.set_port(handle.port);
    bool has_proved = false;
    std::vector<OwnedFd> sockets;
    for (int i = 0; i < 4 && !input.is_empty(); ++i) {
      OwnedFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      end_with_reset(socket);
      if (::connect(socket.get(), address.data(), address.length()) != 0) break;  // no port is free now
      sockets.push_back(std::move(socket));
      has_proved = speak(sockets.back(), handle, input) || has_proved;
      if (input.byte() % 4 == 0) sockets.pop_back();
      pump(poller, handshakes);
      bool ready = false;
      EstablishedConnection connection;
      const Status status = handshakes.accept(id, &ready, &connection);
      require(!ready || has_proved, "a peer that proved nothing was accepted");
      if (!status.is_ok() || ready) break;
    }
    handshakes.stop_listening(id);
    sockets.clear();
    pump(poller, handshakes);
    loop.log.take();
  }

 private:
  // True: the proof was right.
  bool speak(const OwnedFd& socket, const ConnectHandle& handle, FuzzInput& input) {
    std::array<std::uint8_t, kHelloBytes> said;
    if (input.byte() % 4 == 0) {  // noise
      say(socket, said.data(), input.take(said.data(), said.size()));
      pump(poller, handshakes);
      return false;
    }
    Hello hello;
    hello.listen_id = handle.listen_id;
    hello.comm_id = {1};
    hello.streams_wanted = 2;
    hello.max_chunk_bytes = 65536;
    hello.stream_index = input.byte() % 4 == 3 ? kJoiningStream : input.byte() % 3;
    encode_hello(hello, said.data());
    if (input.byte() % 4 == 3) input.disturb(said.data(), said.size());
    const std::size_t first = input.byte() % 4 == 3 ? input.number(said.size()) : said.size();
    say(socket, said.data(), first);
    pump(poller, handshakes);
    say(socket, said.data() + first, said.size() - first);
    pump(poller, handshakes);
    std::array<std::uint8_t, kChallengeBytes> challenge;
    if (!hear(socket, challenge.data(), challenge.size())) return false;
    const HandshakeProof right = connector_proof(*handshake_key(handle.token), said.data(), challenge.data());
    HandshakeProof proof = right;
    if (input.byte() % 4 == 3) input.disturb(proof.data(), proof.size());
    say(socket, proof.data(), proof.size());
    pump(poller, handshakes);
    return proof == right;
  }
};

struct Outbound {
  HandshakeSettings settings = settings_with(2);
  EpollPoller poller;
  OwnedFd listener;
  SocketAddress address = loopback().address;

  Outbound() {
    require(poller.open().is_ok(), "no poller");
    require(tcp_listen(&address, &listener).is_ok(), "cannot listen");
  }

  void run(FuzzInput& input) {
    HandshakeLoop loop{&poller};
    OutboundHandshakes handshakes(settings, &loop);
    ConnectHandle handle;
    handle.address = {127, 0, 0, 1};
    handle.port = address.port();
    handle.max_streams = 4;
    handle.token = {1, 2, 3};
    handle.further.resize(input.byte() % 4 == 3 ? max_handle_addresses(4) - 1 : 0);
    if (!handle.further.empty()) handle.unnamed = 1 + input.number(kMaxAddresses - 2 - handle.further.size());
    std::array<std::uint8_t, 128> bytes{};
    encode_connect_handle(handle, bytes.data());
    if (input.byte() % 4 == 3) input.disturb(bytes.data() + 14, 2);  // of the handle, what is no address
    bool has_proved = true;
    bool ready = false;
    EstablishedConnection connection;
    std::vector<OwnedFd> sockets;
    for (int i = 0; i < 4 && !ready; ++i) {
      if (!handshakes.connect({loopback()}, {}, bytes.data(), &ready, &connection).is_ok()) break;
      pump(poller, handshakes);
      OwnedFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket.is_open()) continue;
      end_with_reset(socket);
      has_proved = answer(socket, handle, handshakes, input) && has_proved;
      sockets.push_back(std::move(socket));
      pump(poller, handshakes);
    }
    require(!ready || has_proved, "a listener that proved nothing was connected to");
    require(!ready || (!connection.sockets.empty() && connection.sockets.size() <= 2), "more streams than asked for");
    // Connections that wait in the queue would be the next run's.
    sockets.clear();
    for (OwnedFd rest; (rest = OwnedFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC))).is_open();) {
      end_with_reset(rest);
    }
  }

 private:
  bool answer(const OwnedFd& socket, const ConnectHandle& handle, OutboundHandshakes& handshakes, FuzzInput& input) {
    std::array<std::uint8_t, kHelloBytes> hello;
    if (!hear(socket, hello.data(), hello.size())) return false;
    std::array<std::uint8_t, kChallengeBytes> challenge;
    encode_challenge({{4, 5}}, challenge.data());
    if (input.byte() % 4 == 3) input.disturb(challenge.data(), challenge.size());
    say(socket, challenge.data(), challenge.size());
    pump(poller, handshakes);
    HandshakeProof theirs;
    const bool was_heard = hear(socket, theirs.data(), theirs.size());
    require(!was_heard || is_same_mac(connector_proof(*handshake_key(handle.token), hello.data(), challenge.data()),
                                      theirs.data()),
            "our own proof is wrong");
    Reply reply;
    reply.streams = static_cast<std::uint16_t>(1 + input.byte() % 3);
    reply.max_chunk_bytes = 65536;
    Hello said;
    decode_hello(hello.data(), &said);
    if (said.stream_index == 0) reply.addresses.resize(handle.unnamed);
    std::array<std::uint8_t, kMaxReplyBytes + kProofBytes> bytes;
    const std::size_t count = encode_reply(reply, bytes.data());
    if (input.byte() % 4 == 3) input.disturb(bytes.data(), count);
    const HandshakeProof right =
        listener_proof(*handshake_key(handle.token), hello.data(), challenge.data(), bytes.data(), count);
    std::copy_n(right.begin(), kProofBytes, bytes.data() + count);
    if (input.byte() % 4 == 3) input.disturb(bytes.data(), count + kProofBytes);
    say(socket, bytes.data(), count + kProofBytes);
    return is_same_mac(
        listener_proof(*handshake_key(handle.token), hello.data(), challenge.data(), bytes.data(), count),
        bytes.data() + count);
  }
};

void decode_noise(FuzzInput& input) {
  std::array<std::uint8_t, std::max(kConnectHandleBytes, kHelloBytes)> bytes{};
  input.take(bytes.data(), bytes.size());
  ConnectHandle handle;
  static_cast<void>(decode_connect_handle(bytes.data(), &handle).is_ok());
  Hello hello;
  decode_hello(bytes.data(), &hello);
  for (const char letter : hello.host_name) require(letter > 0x20 && letter < 0x7f, "an unprintable name");
  Reply reply;
  static_cast<void>(decode_reply(bytes.data(), &reply).is_ok());
  static_cast<void>(handshake_verdict_name(reply.verdict));
  Challenge challenge;
  static_cast<void>(decode_challenge(bytes.data(), &challenge));
}

}  // namespace
}  // namespace bagua_net

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  bagua_net::FuzzInput input(data, size);
  static auto& inbound = *new bagua_net::Inbound;
  static auto& outbound = *new bagua_net::Outbound;
  switch (input.byte() % 4) {
    case 0: bagua_net::decode_noise(input); break;
    case 1: outbound.run(input); break;
    default: inbound.run(input); break;
  }
  return 0;
}
