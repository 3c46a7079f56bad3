// ConnectionService on the loopback interface: connects that are tried again, at both ends for want of descriptors.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "os/tcp_socket.h"
#include "support/check.h"
#include "support/cut_connections.h"
#include "support/listening_service.h"
#include "support/process_limits.h"
#include "support/raw_handshake.h"
#include "support/service_parts.h"
#include "transport/connect/connection_service.h"
#include "wire/connect_handle.h"
#include "wire/handshake_message.h"

namespace bagua_net {
namespace {

// A listener closes the oldest connection that has not said hello where it can keep no more, or the process ends.
struct ClosingListener {
  SocketAddress address = loopback().address;
  OwnedFd socket;
  Token token{1, 2, 3};
  std::array<std::uint8_t, 128> handle{};

  ClosingListener() {
    CHECK_OK(tcp_listen(&address, &socket));
    ConnectHandle encoded;
    encoded.token = token;
    encoded.port = address.port();
    encoded.max_streams = 4;
    encoded.address = {127, 0, 0, 1};
    encode_connect_handle(encoded, handle.data());
  }
  OwnedFd next() const {
    OwnedFd accepted;
    SocketAddress peer;
    wait_until(
        [&] {
          CHECK_OK(tcp_accept(socket.get(), &accepted, &peer));
          return accepted.is_open();
        },
        "a connection");
    return accepted;
  }
  // It stays open as long as what is returned.
  OwnedFd reply_to_next() const {
    OwnedFd accepted = next();
    reply_to(accepted, 1);
    return accepted;
  }
  void reply_to(const OwnedFd& accepted, std::uint16_t streams) const {
    make_blocking(accepted);
    answer_handshake(accepted, token, {kProtocolVersion, HandshakeVerdict::kAccepted, streams, 1, 1, 0});
  }
};

// Asked again and again, as NCCL does.
struct Connect {
  ConnectionService& service;
  std::uint8_t* handle;
  bool ready = false;
  EstablishedConnection connection = {};

  Status ask() { return service.connect(loopback(), handle, &ready, &connection); }
  void finish() {
    wait_until(
        [&] {
          CHECK_OK(ask());
          return ready;
        },
        "the connection");
  }
};

}  // namespace

// The unauthenticated peers of a process that may open few files give theirs back after a while.
TEST_CASE(a_connect_without_free_descriptors_is_tried_again) {
  ConnectionService listening(settings_with({}));
  ConnectionService connecting(settings_with({}));
  CHECK_OK(listening.start());
  CHECK_OK(connecting.start());
  RandomId id;
  std::array<std::uint8_t, 128> handle{};
  CHECK_OK(listening.listen(loopback(), handle.data(), &id));
  Connect connect{connecting, handle.data()};
  {
    const DescriptorLimit none(3);
    CHECK_OK(connect.ask());
  }
  connect.finish();
}

TEST_CASE(a_connection_that_the_listener_could_not_keep_is_tried_again) {
  ClosingListener listener;
  ConnectionService connecting(settings_with(1));
  CHECK_OK(connecting.start());
  Connect connect{connecting, listener.handle.data()};
  CHECK_OK(connect.ask());
  for (int i = 0; i < 3; ++i) listener.next().reset();
  const OwnedFd accepted = listener.reply_to_next();
  connect.finish();
}

// Whoever has the port for now, or can answer in the listener's place, cannot prove anything.
TEST_CASE(what_nothing_proves_to_come_from_the_listener_is_tried_again) {
  ClosingListener listener;
  ConnectionService connecting(settings_with(1));
  CHECK_OK(connecting.start());
  Connect connect{connecting, listener.handle.data()};
  CHECK_OK(connect.ask());
  const auto say = [](const OwnedFd& socket, const Reply& reply) {
    std::array<std::uint8_t, kReplyBytes> bytes;
    encode_reply(reply, bytes.data());
    send_bytes(socket, bytes.data(), bytes.size());
  };
  Reply refusal;
  refusal.verdict = HandshakeVerdict::kUnknownListen;
  Hello hello;
  for (int peer = 0; peer < 4; ++peer) {
    const OwnedFd socket = listener.next();
    make_blocking(socket);
    Said said = read_hello(socket, &hello);
    if (peer == 0) send_bytes(socket, "HTTP/1.1 400 Bad Request\r\n\r\n....", kReplyBytes);
    if (peer == 1) say(socket, refusal);
    if (peer >= 2) challenge(socket, &said);
    if (peer == 2) say(socket, refusal);
    if (peer == 3) send_reply(socket, Token{4}, said, refusal);
  }
  const OwnedFd accepted = listener.reply_to_next();
  connect.finish();
}

TEST_CASE(a_listener_that_proves_its_refusal_is_heeded_at_once) {
  ClosingListener listener;
  ConnectionService connecting(settings_with(1));
  CHECK_OK(connecting.start());
  Connect connect{connecting, listener.handle.data()};
  CHECK_OK(connect.ask());
  const OwnedFd socket = listener.next();
  make_blocking(socket);
  Reply refusal;
  refusal.verdict = HandshakeVerdict::kUnknownStream;
  answer_handshake(socket, listener.token, refusal);
  Status status;
  wait_until(
      [&] {
        status = connect.ask();
        return !status.is_ok();
      },
      "the error");
  CHECK(status.message().find("the data stream fits no connection") != std::string::npos);
}

// It asks where it sees the connector, once it has lost all connections: perhaps before the connector fetches them.
TEST_CASE(a_listener_may_ask_for_a_comm_from_its_first_connection_on) {
  ClosingListener listener;
  HandshakeSettings settings = settings_with(1);
  settings.recovery = Recovery::kOn;
  ConnectionService connecting(settings);
  CHECK_OK(connecting.start());
  Connect connect{connecting, listener.handle.data()};
  CHECK_OK(connect.ask());
  const OwnedFd socket = listener.next();
  make_blocking(socket);
  Hello hello = answer_handshake(socket, listener.token,
                                 {kProtocolVersion, HandshakeVerdict::kAccepted, 1, 1, 1, kFeatureRecovery});
  SocketAddress connector = loopback().address;
  connector.set_port(hello.port);
  hello.stream_index = kAskingStream;
  const auto is_there = [&] {
    const OwnedFd asking = connect_to(connector);
    Said said = say_hello(asking, hello);
    Reply refusal;
    return read_challenge(asking, &said, &refusal);
  };
  CHECK(is_there());
  connect.finish();
  CHECK(is_there());
  connect.connection = {};
  CHECK(!is_there());

  // Nobody listens at the address of a connection that leaves by another than its interface's.
  NetworkInterface other = loopback();
  reinterpret_cast<sockaddr_in*>(other.address.data())->sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
  ClosingListener another;
  bool ready = false;
  CHECK_OK(connecting.connect(other, another.handle.data(), &ready, &connect.connection));
  const OwnedFd from_elsewhere = another.next();
  make_blocking(from_elsewhere);
  read_hello(from_elsewhere, &hello);
  CHECK_EQ(hello.port, 0);
}

// As before a firewall has its rules, or a switch has learned where the peer is: the kernel's next attempt can be half
// a minute away.
TEST_CASE(a_connect_that_is_not_answered_begins_anew) {
  ListeningService listening;
  ConnectionService connecting(settings_with(1));
  CHECK_OK(connecting.start());
  Connect connect{connecting, listening.handle_bytes.data()};
  const int listener = sockets_in_state(TcpState::kListen).at(0);
  silence(listener);
  CHECK_OK(connect.ask());
  std::uint16_t first_port = 0;
  wait_until(
      [&] {
        ::usleep(20000);
        for (const int fd : sockets_in_state(TcpState::kSynSent)) {
          const std::uint16_t port = local_address(fd).port();
          if (first_port == 0) first_port = port;
          if (port != 0 && port != first_port) return true;
        }
        return false;
      },
      "another attempt");
  hear_again(listener);
  connect.finish();
}

// The number of an attempt comes with the handle, from a rank that may misbehave.
TEST_CASE(a_handle_with_another_attempts_number_gets_no_connection) {
  ListeningService listening;
  ConnectionService connecting(settings_with(1));
  CHECK_OK(connecting.start());
  Connect connect{connecting, listening.handle_bytes.data()};
  CHECK_OK(connect.ask());
  ListeningService other;
  store_connect_state(other.handle_bytes.data(), load_connect_state(listening.handle_bytes.data()));
  Connect stolen{connecting, other.handle_bytes.data()};
  for (int asked = 0; asked < 100; ++asked) {
    CHECK(!stolen.ask().is_ok());
    CHECK(!stolen.ready);
    ::usleep(1000);
  }
  connect.finish();
}

namespace {

std::string error_of(ConnectionService& service, const NetworkInterface& interface, const SocketAddress& to) {
  ConnectHandle handle;
  handle.port = to.port();
  handle.address_family = to.is_ipv6() ? 6 : 4;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(to.data()) + (to.is_ipv6() ? 8 : 4);
  std::copy_n(bytes, to.is_ipv6() ? 16 : 4, handle.address.begin());
  std::array<std::uint8_t, 128> encoded{};
  encode_connect_handle(handle, encoded.data());
  bool ready = false;
  EstablishedConnection connection;
  Status status;
  wait_until(
      [&] {
        status = service.connect(interface, encoded.data(), &ready, &connection);
        return !status.is_ok();
      },
      "the error");
  return status.message();
}

SocketAddress port_of_nobody() {
  SocketAddress address = loopback().address;
  OwnedFd socket;
  CHECK_OK(tcp_listen(&address, &socket));
  return address;
}

bool tells(const std::string& message, const std::string& part) {
  if (message.find(part) != std::string::npos) return true;
  check::fail(__FILE__, __LINE__, "\"" + message + "\" does not say \"" + part + "\"");
  return false;
}

}  // namespace

TEST_CASE(a_failed_connect_names_its_cause) {
  HandshakeSettings settings = settings_with(1);
  settings.connect_timeout_ms = 300;
  settings.handshake_timeout_ms = 100;
  ConnectionService service(settings);
  CHECK_OK(service.start());
  NetworkInterface elsewhere;  // of which the rank at the other end is not
  elsewhere.name = "eth7";
  const sockaddr_in of_documentation{AF_INET, 0, {htonl(0xc0000207)}, {}};  // 192.0.2.7
  elsewhere.address = {reinterpret_cast<const sockaddr*>(&of_documentation), sizeof of_documentation};
  tells(error_of(service, elsewhere, port_of_nobody()), "an address of this host itself");
  sockaddr_in6 ipv6{};
  ipv6.sin6_family = AF_INET6;
  ipv6.sin6_port = htons(9);
  ipv6.sin6_addr.s6_addr[0] = 0x20;  // 2000::, which nobody has
  tells(error_of(service, elsewhere, {reinterpret_cast<const sockaddr*>(&ipv6), sizeof ipv6}), "NCCL_SOCKET_FAMILY");
  ListeningService silent;
  silence(sockets_in_state(TcpState::kListen).at(0));
  tells(error_of(service, loopback(), silent.address), "an address of this host itself");
  const ClosingListener mute;  // it answers nothing
  tells(error_of(service, loopback(), mute.address), "says nothing");
  {
    const DescriptorLimit none(3);
    tells(error_of(service, loopback(), mute.address), "ulimit -n");
  }
}

TEST_CASE(a_listener_that_closes_and_goes_is_an_error_long_before_the_deadline) {
  ClosingListener listener;
  ConnectionService connecting(settings_with(1));
  CHECK_OK(connecting.start());
  Connect connect{connecting, listener.handle.data()};
  CHECK_OK(connect.ask());
  listener.next().reset();
  listener.socket.reset();
  Status status;
  wait_until(
      [&] {
        status = connect.ask();
        return !status.is_ok();
      },
      "the error");
  CHECK(status.code() == StatusCode::kRemoteError);
  CHECK(status.message().find("closed the connection during the handshake") != std::string::npos);
}

// It answered the first stream, and its process ends before the others.
TEST_CASE(a_listener_that_dies_between_streams_is_an_error_long_before_the_deadline) {
  ClosingListener listener;
  ConnectionService connecting(settings_with(4));
  CHECK_OK(connecting.start());
  Connect connect{connecting, listener.handle.data()};
  CHECK_OK(connect.ask());
  OwnedFd accepted = listener.next();
  listener.socket.reset();
  listener.reply_to(accepted, 4);
  Status status;
  wait_until(
      [&] {
        status = connect.ask();
        return !status.is_ok();
      },
      "the error");
  CHECK(status.code() == StatusCode::kRemoteError);
  CHECK(status.message().find("is gone") != std::string::npos);
}

// More connections at once than a listener that may open few files keeps while their hello is on its way.
TEST_CASE(many_peers_reach_a_listener_that_may_open_few_files) {
  constexpr int kPeers = 8;
  constexpr int kEach = 16;
  // It looks once how many it may open, when it is made.
  const auto listening = [] {
    const DescriptorLimit few(64);
    return std::make_unique<ConnectionService>(settings_with(1));
  }();
  CHECK_OK(listening->start());
  std::vector<std::array<std::uint8_t, 128>> handles(kPeers * kEach);
  RandomId id;
  for (auto& handle : handles) CHECK_OK(listening->listen(loopback(), handle.data(), &id));
  std::vector<std::string> failures(kPeers);
  std::vector<std::thread> peers;
  for (int peer = 0; peer < kPeers; ++peer) {
    peers.emplace_back([&, peer] {
      try {
        ConnectionService connecting(settings_with(1));
        CHECK_OK(connecting.start());
        std::vector<EstablishedConnection> connections(kEach);
        for (int i = 0; i < kEach; ++i) {
          bool ready = false;
          auto& handle = handles[static_cast<std::size_t>(peer * kEach + i)];
          CHECK_OK(connecting.connect(loopback(), handle.data(), &ready, &connections[static_cast<std::size_t>(i)]));
        }
        for (int i = 0; i < kEach; ++i) {
          bool ready = false;
          auto& handle = handles[static_cast<std::size_t>(peer * kEach + i)];
          wait_until(
              [&] {
                CHECK_OK(
                    connecting.connect(loopback(), handle.data(), &ready, &connections[static_cast<std::size_t>(i)]));
                return ready;
              },
              "a connection");
        }
      } catch (const std::exception& error) {
        failures[static_cast<std::size_t>(peer)] = error.what();
      }
    });
  }
  for (std::thread& peer : peers) peer.join();
  for (const std::string& failure : failures) CHECK_EQ(failure, "");
}

}  // namespace bagua_net

CHECK_MAIN
