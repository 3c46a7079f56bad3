// ConnectionService on the loopback interface: connects that are tried again, at both ends for want of descriptors.
#include <sys/socket.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "os/tcp_socket.h"
#include "support/check.h"
#include "support/connection_ends.h"
#include "support/cut_connections.h"
#include "support/denied_calls.h"
#include "support/kept_log.h"
#include "support/process_limits.h"
#include "support/raw_handshake.h"
#include "transport/connect/connection_service.h"
#include "wire/connect_handle.h"
#include "wire/handshake_message.h"

namespace bagua_net {

// Otherwise the listener is silent, and its thread spins.
TEST_CASE(a_listener_that_may_not_accept_says_so) {
  const KeptLog log;
  std::thread([] {
    deny_calls(SYS_accept4, 3, SOCK_NONBLOCK | SOCK_CLOEXEC, EACCES);
    ListeningService listening(settings_with({}));
    const OwnedFd socket = connect_to(listening.address);
    wait_until([] { return KeptLog::has("accept: Permission denied"); }, "the listener's line");
  }).join();
  CHECK(KeptLog::has("a security policy (SELinux, AppArmor, seccomp) forbids it"));
}

TEST_CASE(a_connection_that_the_listener_could_not_keep_is_tried_again) {
  RawListener listener;
  ConnectingService connecting(listener.handle.data());
  CHECK_OK(connecting.ask());
  for (int i = 0; i < 3; ++i) listener.next().reset();
  const OwnedFd accepted = listener.answer_next(acceptance(1));
  connecting.finish();
}

// Whoever has the port for now, or can answer in the listener's place, cannot prove anything.
TEST_CASE(what_nothing_proves_to_come_from_the_listener_is_tried_again) {
  RawListener listener;
  ConnectingService connecting(listener.handle.data());
  CHECK_OK(connecting.ask());
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
    Said said = read_hello(socket, &hello);
    if (peer == 0) send_bytes(socket, "HTTP/1.1 400 Bad Request\r\n\r\n....", kReplyBytes);
    if (peer == 1) say(socket, refusal);
    if (peer >= 2) challenge(socket, &said);
    if (peer == 2) say(socket, refusal);
    if (peer == 3) send_reply(socket, HandshakeKey{4}, said, refusal);
  }
  const OwnedFd accepted = listener.answer_next(acceptance(1));
  connecting.finish();
}

TEST_CASE(a_listener_that_proves_its_refusal_is_heeded_at_once) {
  RawListener listener;
  ConnectingService connecting(listener.handle.data());
  CHECK_OK(connecting.ask());
  Reply refusal;
  refusal.verdict = HandshakeVerdict::kUnknownStream;
  const OwnedFd socket = listener.answer_next(refusal);
  const Status status = connecting.error();
  check_contains(status.message(), "the data stream fits no connection");
}

// It asks where it sees the connector, once it has lost all connections: perhaps before the connector fetches them.
TEST_CASE(a_listener_may_ask_for_a_comm_from_its_first_connection_on) {
  RawListener listener;
  HandshakeSettings settings = settings_with(1);
  settings.recovery = Recovery::kOn;
  ConnectingService connecting(listener.handle.data(), settings);
  CHECK_OK(connecting.ask());
  Hello hello;
  const OwnedFd socket = listener.answer_next(acceptance(1, kFeatureRecovery), &hello);
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
  connecting.finish();
  CHECK(is_there());
  connecting.connection = {};
  CHECK(!is_there());

  // Nobody listens at the address of a connection that leaves by another than its interface's.
  RawListener another;
  bool ready = false;
  const NetworkInterface other = loopback(INADDR_LOOPBACK + 1);
  CHECK_OK(connecting.service.connect({other}, another.handle.data(), &ready, &connecting.connection));
  read_hello(another.next(), &hello);
  CHECK_EQ(hello.port, 0);
}

// As before a firewall has its rules, or a switch has learned where the peer is: the kernel's next attempt can be half
// a minute away.
TEST_CASE(a_connect_that_is_not_answered_begins_anew) {
  ListeningService listening;
  ConnectingService connecting(listening.handle_bytes.data());
  const int listener = sockets_in_state(TcpState::kListen).at(0);
  silence(listener);
  CHECK_OK(connecting.ask());
  wait_for_another_attempt();
  hear_again(listener);
  connecting.finish();
}

// The number of an attempt comes with the handle, from a rank that may misbehave.
TEST_CASE(a_handle_with_another_attempts_number_gets_no_connection) {
  ListeningService listening;
  ConnectingService connecting(listening.handle_bytes.data());
  CHECK_OK(connecting.ask());
  ListeningService other;
  store_connect_state(other.handle_bytes.data(), load_connect_state(listening.handle_bytes.data()));
  bool ready = false;
  EstablishedConnection stolen;
  CHECK(!connecting.service.connect({loopback()}, other.handle_bytes.data(), &ready, &stolen).is_ok());
  connecting.finish();
  CHECK(!ready);
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
        status = service.connect({interface}, encoded.data(), &ready, &connection);
        return !status.is_ok();
      },
      "the error");
  return status.message();
}

}  // namespace

TEST_CASE(a_failed_connect_names_its_cause) {
  HandshakeSettings settings = settings_with(1);
  settings.connect_timeout_ms = 1000;  // after so long again an outcome that nobody has fetched is forgotten
  settings.handshake_timeout_ms = 100;
  ConnectionService service(settings);
  CHECK_OK(service.start());
  const NetworkInterface elsewhere = interface_at("eth7", 0xc0000207);  // 192.0.2.7, as in documentation
  const PortOfNobody refusing;
  check_contains(error_of(service, elsewhere, refusing.address), "an address of this host itself");
  sockaddr_in6 ipv6{};
  ipv6.sin6_family = AF_INET6;
  ipv6.sin6_port = htons(9);
  ipv6.sin6_addr.s6_addr[0] = 0x20;  // 2000::, which nobody has
  check_contains(error_of(service, elsewhere, {reinterpret_cast<const sockaddr*>(&ipv6), sizeof ipv6}),
                 "NCCL_SOCKET_FAMILY");
  ListeningService silent;
  silence(sockets_in_state(TcpState::kListen).at(0));
  check_contains(error_of(service, loopback(), silent.address), "an address of this host itself");
  const RawListener mute;  // it answers nothing
  check_contains(error_of(service, loopback(), mute.address), "says nothing");
  {
    const DescriptorLimit none(3);
    check_contains(error_of(service, loopback(), mute.address), "ulimit -n");
  }
}

TEST_CASE(a_listener_that_closes_and_goes_is_an_error_long_before_the_deadline) {
  RawListener listener;
  ConnectingService connecting(listener.handle.data());
  CHECK_OK(connecting.ask());
  listener.next().reset();
  listener.socket.reset();
  const Status status = connecting.error();
  check_names(status, "closed the connection during the handshake");
}

// It answered the first stream, and its process ends before the others.
TEST_CASE(a_listener_that_dies_between_streams_is_an_error_long_before_the_deadline) {
  RawListener listener;
  ConnectingService connecting(listener.handle.data(), settings_with(4));
  CHECK_OK(connecting.ask());
  const OwnedFd accepted = listener.next();
  listener.socket.reset();
  answer_handshake(accepted, *handshake_key(listener.token), acceptance(4));
  const Status status = connecting.error();
  check_names(status, "is gone");
}

// More connections at once than a listener that may open few files keeps while their hello is on its way.
TEST_CASE(many_peers_reach_a_listener_that_may_open_few_files) {
  constexpr std::size_t kPeers = 8;
  constexpr std::size_t kEach = 16;
  // It looks once how many it may open, when it is made.
  const auto listening = [] {
    const DescriptorLimit few(64);
    return std::make_unique<ConnectionService>(settings_with(1));
  }();
  CHECK_OK(listening->start());
  std::vector<HandleBytes> handles(kPeers * kEach);
  RandomId id;
  for (HandleBytes& handle : handles) CHECK_OK(listening->listen({loopback()}, handle.data(), &id));
  std::vector<std::string> failures(kPeers);
  std::vector<std::thread> peers;
  for (std::size_t peer = 0; peer < kPeers; ++peer) {
    peers.emplace_back([&, peer] {
      try {
        ConnectionService connecting(settings_with(1));
        CHECK_OK(connecting.start());
        std::array<EstablishedConnection, kEach> connections;
        std::array<bool, kEach> ready{};
        wait_until(
            [&] {
              for (std::size_t i = 0; i < kEach; ++i) {
                HandleBytes& handle = handles[peer * kEach + i];
                if (!ready[i]) CHECK_OK(connecting.connect({loopback()}, handle.data(), &ready[i], &connections[i]));
              }
              return std::all_of(ready.begin(), ready.end(), [](bool is_ready) { return is_ready; });
            },
            "connections");
      } catch (const std::exception& error) {
        failures[peer] = error.what();
      }
    });
  }
  for (std::thread& peer : peers) peer.join();
  for (const std::string& failure : failures) CHECK_EQ(failure, "");
}

}  // namespace bagua_net
