// ConnectionService where a comm has several paths, or a device several interfaces. All of them lead over loopback.
#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/monotonic_clock.h"
#include "support/check.h"
#include "support/connection_ends.h"
#include "support/cut_connections.h"
#include "support/kept_log.h"
#include "support/wire_relay.h"
#include "transport/connect/handshake_ends.h"
#include "transport/connect/outbound_handshakes.h"
#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

constexpr in_addr_t kElsewhere = INADDR_LOOPBACK + 1;

// A comm of one stream, and a ticket for another one instead.
struct Connected {
  HandshakeSettings settings;
  std::shared_ptr<PathStates> states = settings.paths;
  ListeningService listening;
  ConnectingService connecting{listening.handle_bytes.data(), settings};
  EstablishedConnection accepted = listening.accept_from(&connecting);
  std::shared_ptr<StreamArrivals> arrivals = std::make_shared<StreamArrivals>();

  explicit Connected(const HandshakeSettings& own = settings_with(1)) : Connected(own, own) {}
  Connected(const HandshakeSettings& own, const HandshakeSettings& listeners) : settings(own), listening(listeners) {}

  JoinTicket ticket(std::vector<NicPath> paths, std::size_t first_path) const {
    JoinTicket ticket = connecting.connection.ticket;
    ticket.paths = std::move(paths);
    ticket.first_path = first_path;
    ticket.hello.stream_index = kReplacingStream;
    return ticket;
  }
  void replace(std::vector<NicPath> paths, std::size_t first_path) {
    connecting.service.join(ticket(std::move(paths), first_path), 1, arrivals);
  }
  void prepare_until(const JoinTicket& ticket, Prepared wanted) {
    wait_until([&] { return connecting.service.prepare(ticket, 3, arrivals) == wanted; }, "the prepared connection");
  }
  StreamArrivals::Arrival arrival() const {
    std::vector<StreamArrivals::Arrival> arrived;
    wait_until(
        [&] {
          arrived = arrivals->take();
          return !arrived.empty();
        },
        "the replacement");
    return std::move(arrived[0]);
  }
  std::size_t path_of_arrival() const { return arrival().path; }
};

// The other end drops all packets.
struct SilentListener {
  SocketAddress address = loopback(kElsewhere).address;
  OwnedFd socket;

  SilentListener() {
    CHECK_OK(tcp_listen(&address, &socket));
    silence(socket.get());
  }
};

}  // namespace

TEST_CASE(a_replacement_is_tried_over_its_path_and_then_over_the_others) {
  Connected comm;
  const PortOfNobody refusing;
  for (const std::size_t first : {0u, 1u, 2u}) {
    comm.replace({path_to(refusing.address), path_to(comm.listening.address), path_to(refusing.address)}, first);
    CHECK_EQ(comm.path_of_arrival(), std::size_t{1});
  }
}

// A path that is cut off in the middle of a handshake, before or after the peer's kernel has the hello.
TEST_CASE(a_handshake_that_is_not_answered_is_tried_over_another_path) {
  for (const std::uint32_t arrives : {60u, 1000u}) {
    Connected comm;
    const RawListener silent;
    lose_packets(silent.socket.get(), arrives);
    const std::int64_t begin_ms = monotonic_ms();
    comm.replace({path_to(silent.address), path_to(comm.listening.address)}, 0);
    CHECK_EQ(comm.path_of_arrival(), std::size_t{1});
    CHECK(monotonic_ms() - begin_ms < settings_with(1).handshake_timeout_ms);
  }
}

TEST_CASE(a_process_that_is_late_to_answer_a_handshake_gets_twice_the_time_each_time) {
  Connected comm;
  const RawListener late;
  // Not the time between two that we see: each may be seen late, but none before it comes.
  const std::int64_t begin_ms = monotonic_ms();
  comm.replace({path_to(late.address), path_to(late.address)}, 0);
  std::vector<OwnedFd> accepted;
  std::vector<std::int64_t> after_ms;
  wait_until(
      [&] {
        SocketAddress peer;
        OwnedFd next;
        CHECK_OK(tcp_accept(late.socket.get(), &next, &peer));
        if (next.is_open()) {
          accepted.push_back(std::move(next));
          after_ms.push_back(monotonic_ms() - begin_ms);
        }
        return after_ms.size() == 3;
      },
      "the third attempt");
  CHECK(after_ms[1] > kLongConnectAnswerMs - 100);
  CHECK(after_ms[2] > 3 * kLongConnectAnswerMs - 200);
  // The listener knows which of them is the last one, in whatever order their proofs arrive.
  std::uint32_t last = 0;
  for (const OwnedFd& attempt : accepted) {
    make_blocking(attempt);
    Hello hello;
    read_hello(attempt, &hello);
    CHECK(hello.serial > last);
    last = hello.serial;
  }
}

// With one interface down, a killed process is noticed as soon as with all.
TEST_CASE(a_process_that_has_ended_is_noticed_though_another_path_is_silent) {
  Connected comm;
  const SilentListener silent;
  const PortOfNobody refusing;
  comm.states->on_connected(path_to(refusing.address), 0, 0);
  comm.replace({path_to(silent.address), path_to(refusing.address)}, 0);
  std::vector<StreamArrivals::Failure> failures;
  wait_until(
      [&] {
        failures = comm.arrivals->take_failures();
        return !failures.empty();
      },
      "the failure");
  CHECK(failures[0].why.find("the peer's process has ended") != std::string::npos);
}

// The path that works is interrupted for longer than a process that has ended takes to be noticed: real time, and the
// firewall has refused for as long.
TEST_CASE(a_firewall_that_refuses_over_a_path_that_never_worked_ends_no_comm) {
  Connected comm;
  const SilentListener silent;
  const PortOfNobody refusing;
  comm.states->on_connected(path_to(silent.address), 0, 0);
  comm.replace({path_to(silent.address), path_to(refusing.address)}, 0);
  const std::int64_t begin_ms = monotonic_ms();
  wait_until([&] { return monotonic_ms() - begin_ms > 4 * kRefusedMs; }, "the time");
  CHECK(comm.arrivals->take_failures().empty());
}

TEST_CASE(a_connection_that_is_prepared_joins_when_it_is_asked_for) {
  const std::vector<std::uint8_t> secret(64, 's');
  for (const bool encrypts : {false, true}) {
    HandshakeSettings settings = settings_with(1);
    settings.encrypts = encrypts;
    if (encrypts) settings.secret = JobSecret::derive(secret.data(), secret.size());
    Connected comm(settings);
    const JoinTicket ticket = comm.ticket({path_to(comm.listening.address), path_to(comm.listening.address)}, 1);
    std::atomic<int> told{0};
    comm.arrivals->set_on_change([&] { ++told; });
    CHECK(comm.connecting.service.prepare(ticket, 3, comm.arrivals) == Prepared::kWaiting);
    wait_until([&] { return told == 1; }, "the challenge");
    CHECK(comm.connecting.service.prepare(ticket, 3, comm.arrivals) == Prepared::kReady);
    CHECK(!comm.arrivals->any());
    if (comm.accepted.arrivals != nullptr) CHECK(!comm.accepted.arrivals->any());
    const std::vector<int> open = open_connections();
    comm.connecting.service.join(ticket, 1, comm.arrivals);
    const StreamArrivals::Arrival arrived = comm.arrival();
    CHECK_EQ(arrived.path, std::size_t{1});
    CHECK(std::count(open.begin(), open.end(), arrived.socket.get()) == 1);
    CHECK(open_connections() == open);
    // It is used up.
    CHECK(comm.connecting.service.prepare(ticket, 3, comm.arrivals) == Prepared::kWaiting);
  }
}

TEST_CASE(a_connection_that_cannot_be_prepared_is_tried_over_no_other_path_and_fails_no_comm) {
  Connected comm;
  const PortOfNobody refusing;
  const SilentListener silent;
  const RawListener late;  // its process does not answer
  for (const SocketAddress& address : {refusing.address, silent.address, late.address}) {
    const JoinTicket ticket = comm.ticket({path_to(address), path_to(comm.listening.address)}, 0);
    CHECK(comm.connecting.service.prepare(ticket, 3, comm.arrivals) == Prepared::kWaiting);
    comm.prepare_until(ticket, Prepared::kFailed);
    CHECK(!comm.arrivals->any());
  }
}

TEST_CASE(a_connection_that_the_peer_answers_late_is_prepared_all_the_same) {
  Connected comm;
  HandleBytes handle = comm.listening.handle_bytes;
  std::atomic<bool> is_late{true};
  WireRelay relay(handle.data(), [&](const WireRelay::Passing& passing) {
    if (!passing.forth) wait_until([&] { return !is_late; }, "the end of the delay");
    return WireRelay::Fate::kPass;
  });
  const JoinTicket ticket = comm.ticket({path_to(relay.address()), path_to(comm.listening.address)}, 0);
  const std::int64_t begin_ms = monotonic_ms();
  std::int64_t passed_ms = 0;
  Prepared prepared = Prepared::kWaiting;
  wait_until(
      [&] {
        prepared = comm.connecting.service.prepare(ticket, 3, comm.arrivals);
        passed_ms = monotonic_ms() - begin_ms;
        return prepared != Prepared::kWaiting || passed_ms > kConnectAnswerMs;
      },
      "a late answer");
  is_late = false;
  CHECK(prepared == Prepared::kWaiting || passed_ms >= kLongConnectAnswerMs);
  comm.prepare_until(ticket, Prepared::kReady);
}

TEST_CASE(a_prepared_connection_whose_path_has_failed_is_replaced_over_another) {
  Connected comm;
  HandleBytes handle = comm.listening.handle_bytes;
  WireRelay relay(handle.data(), [](const WireRelay::Passing& passing) {
    if (passing.forth && passing.offset >= kHelloBytes) passing.bytes->clear();  // the proof
    return WireRelay::Fate::kPass;
  });
  const JoinTicket ticket = comm.ticket({path_to(relay.address()), path_to(comm.listening.address)}, 0);
  comm.prepare_until(ticket, Prepared::kReady);
  comm.connecting.service.join(ticket, 1, comm.arrivals);
  CHECK_EQ(comm.path_of_arrival(), std::size_t{1});
}

// The peer does not read what is under way on the stream that is to end, or has no descriptor left.
TEST_CASE(a_prepared_connection_that_its_listener_closes_is_begun_anew) {
  HandshakeSettings short_of_time = settings_with(1);
  short_of_time.handshake_timeout_ms = 300;
  Connected comm(settings_with(1), short_of_time);
  const JoinTicket ticket = comm.ticket({path_to(comm.listening.address), path_to(comm.listening.address)}, 0);
  for (int again = 0; again < 2; ++again) {
    comm.prepare_until(ticket, Prepared::kReady);
    comm.prepare_until(ticket, Prepared::kFailed);
  }
  comm.connecting.service.join(ticket, 1, comm.arrivals);
  CHECK_EQ(comm.path_of_arrival(), std::size_t{0});
}

// The comm does not ask in the pause after another one was refused, nor once its stream is lost.
TEST_CASE(what_became_of_a_prepared_connection_is_forgotten_after_its_time_limit) {
  const KeptLog log;
  HandshakeSettings settings = settings_with(1);
  settings.handshake_timeout_ms = 300;
  Connected comm(settings, settings_with(1));
  const PortOfNobody refusing;
  const JoinTicket ticket = comm.ticket({path_to(refusing.address), path_to(comm.listening.address)}, 0);
  CHECK(comm.connecting.service.prepare(ticket, 3, comm.arrivals) == Prepared::kWaiting);
  wait_until([] { return KeptLog::has("no further connection to"); }, "the end of the attempt");
  CHECK(comm.connecting.service.prepare(ticket, 3, comm.arrivals) == Prepared::kWaiting);
}

TEST_CASE(a_prepared_connection_ends_with_its_comm) {
  HandshakeSettings settings = settings_with(1);
  settings.handshake_timeout_ms = 500;
  Connected comm(settings);
  const std::size_t open = open_connections().size();
  comm.prepare_until(comm.ticket({path_to(comm.listening.address), path_to(comm.listening.address)}, 0),
                     Prepared::kReady);
  CHECK_EQ(open_connections().size(), open + 2);
  comm.arrivals.reset();
  wait_until([&] { return open_connections().size() == open; }, "the end of both its ends");
}

TEST_CASE(interfaces_without_their_address_are_left_out_of_the_handle) {
  ConnectionService service(settings_with(1));
  CHECK_OK(service.start());
  const NetworkInterface lost = interface_at("lost", 0x0a4d4d4d);  // 10.77.77.77
  HandleBytes bytes{};
  RandomId id{};
  ConnectHandle handle;
  CHECK_OK(service.listen({lost, loopback(), lost, loopback(kElsewhere)}, bytes.data(), &id));
  CHECK_OK(decode_connect_handle(bytes.data(), &handle));
  CHECK(handle.address == loopback().address.bytes());
  CHECK_EQ(handle.further.size(), std::size_t{1});
  // None is left.
  const Status status = service.listen({lost, lost}, bytes.data(), &id);
  check_contains(status.message(), "listening on interface lost (it has lost this address");
  check_contains(status.message(), "NCCL_SOCKET_IFNAME");
}

TEST_CASE(the_reply_to_stream_0_has_the_addresses_for_which_the_handle_has_no_room) {
  const std::vector<std::uint8_t> secret(64, 's');
  for (const bool encrypts : {false, true}) {
    HandshakeSettings settings = settings_with(1);
    settings.recovery = Recovery::kOn;
    settings.encrypts = encrypts;
    if (encrypts) settings.secret = JobSecret::derive(secret.data(), secret.size());
    ConnectionService service(settings);
    CHECK_OK(service.start());
    std::vector<NetworkInterface> interfaces;
    for (unsigned nic = 0; nic < 9; ++nic) {
      interfaces.push_back(interface_at(("lo" + std::to_string(nic)).c_str(), INADDR_LOOPBACK + nic));
    }
    HandleBytes bytes{};
    RandomId id{};
    CHECK_OK(service.listen(interfaces, bytes.data(), &id));
    ConnectHandle handle;
    CHECK_OK(decode_connect_handle(bytes.data(), &handle));
    CHECK_EQ(handle.further.size(), std::size_t{6});
    CHECK_EQ(handle.unnamed, std::size_t{2});
    Hello hello;
    CHECK_OK(fill_first_hello(settings, handle, &hello));
    hello.features |= kFeatureRecovery;
    SocketAddress address = loopback().address;
    address.set_port(handle.port);
    const HandshakeKeyRef key = handshake_key(handle.token, settings.secret.get());
    std::vector<OwnedFd> sockets;
    const auto shake_hands = [&](std::size_t addresses) {
      ConnectorHandshake handshake;
      const OwnedFd& socket = sockets.emplace_back(connect_to(address));
      CHECK_OK(fill_random(hello.nonce.data(), hello.nonce.size()));
      CHECK_EQ(handshake.send_hello(socket.get(), hello, key, addresses), 0);
      auto answer = ConnectorHandshake::Answer::kWaiting;
      wait_until(
          [&] {
            answer = handshake.read(socket.get());
            if (answer == ConnectorHandshake::Answer::kChallenge) CHECK_EQ(handshake.send_proof(socket.get()), 0);
            return answer == ConnectorHandshake::Answer::kReply || answer == ConnectorHandshake::Answer::kClosed;
          },
          "the reply");
      CHECK(answer == ConnectorHandshake::Answer::kReply && handshake.is_proven());
      return handshake;
    };
    const auto check_addresses = [&] {
      const std::vector<HandleAddress> addresses = shake_hands(2).addresses();
      CHECK_EQ(addresses.size(), std::size_t{2});
      for (std::size_t index = 0; index < 2; ++index) {
        CHECK(addresses[index].bytes == interfaces[7 + index].address.bytes());
        connect_to(SocketAddress(AF_INET, addresses[index].bytes, addresses[index].port, 0));
      }
    };
    check_addresses();
    check_addresses();  // the reply was lost
    EstablishedConnection connection;
    wait_until(
        [&] {
          bool ready = false;
          CHECK_OK(service.accept(id, &ready, &connection));
          return ready;
        },
        "the connection");
    check_addresses();  // and the comm is in use
    hello.stream_index = kReplacingStream;
    shake_hands(0);
    connection.arrivals->close();
    hello.stream_index = 0;
    CHECK_EQ(shake_hands(2).refusal(), "the listener refuses the connection: the data stream fits no connection");
  }
}

}  // namespace bagua_net
