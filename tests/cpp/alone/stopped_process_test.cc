// A process that stands still, as SIGSTOP or a paused machine makes it: its clock is set forward. What came meanwhile
// counts, and what it was about to do has the time that it had left.
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/monotonic_clock.h"
#include "support/check.h"
#include "support/comm_pair.h"
#include "support/connection_ends.h"
#include "support/cut_connections.h"
#include "support/raw_handshake.h"
#include "support/test_clock.h"
#include "support/wire_relay.h"
#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

constexpr std::int64_t kHourMs = 3'600'000;

// What a receiver asks of its sender's process once no connection is left.
struct Receiver {
  CommPair pair;
  std::vector<std::uint8_t> room = std::vector<std::uint8_t>(1000);
  Request* request;
  static inline bool is_asked;  // to replace what was lost

  static CommPair::Settings settings(const PeerContact& contact) {
    CommPair::Settings settings = over_tcp(1, 0);
    is_asked = false;
    settings.sending.replace_stream = [](Joining, std::size_t) { is_asked = true; };
    settings.receiving.recovers = true;
    settings.receiving.max_silence_s = 1;
    settings.receiving.contact = contact;
    return settings;
  }
  explicit Receiver(const PeerContact& contact = {}) : pair(settings(contact)), request(pair.receive(room)) {
    cut_all(Cut::kReset);
    for (int look = 0; look < 3; ++look) CHECK(!is_done(request));
  }
};

}  // namespace

// More of them than epoll reports in one turn.
TEST_CASE(a_listener_that_was_stopped_reads_proofs_before_their_deadline_counts) {
  ListeningService listening;
  const HandshakeKeyRef key = handshake_key(listening.handle.token);
  struct Peer {
    Said said;
    OwnedFd socket;
  };
  std::vector<Peer> peers(100);
  for (Peer& peer : peers) peer.socket = listening.challenged(listening.hello(), &peer.said);
  test_clock::skip_ms(kHourMs);
  listening.check_open();  // it has looked at its deadlines
  for (const Peer& peer : peers) prove(peer.socket, *key, peer.said);
  int accepted = 0;
  for (const Peer& peer : peers) {
    accepted += read_reply(peer.socket, *key, peer.said).verdict == HandshakeVerdict::kAccepted ? 1 : 0;
  }
  CHECK_EQ(accepted, 100);
  // Time that passes counts.
  Said said;
  const OwnedFd late = listening.challenged(listening.hello(), &said);
  test_clock::pass_ms(settings_with(1).handshake_timeout_ms);
  wait_until([&] { return has_ended(late.get()); }, "the deadline");
}

TEST_CASE(a_listener_that_was_stopped_accepts_streams_that_have_come_meanwhile) {
  ListeningService listening(settings_with(2));
  const HandshakeKeyRef key = handshake_key(listening.handle.token);
  Hello hello = listening.hello();
  hello.streams_wanted = 2;
  const OwnedFd first = connect_to(listening.address);
  CHECK_EQ(shake_hands(first, *key, hello).streams, 2);
  EstablishedConnection connection;
  CHECK(!listening.accept(&connection));
  test_clock::skip_ms(kHourMs);
  CHECK(!listening.accept(&connection));
  listening.check_open();
  CHECK(!listening.accept(&connection));
  hello.stream_index = 1;
  const OwnedFd second = connect_to(listening.address);
  CHECK(shake_hands(second, *key, hello).verdict == HandshakeVerdict::kAccepted);
  CHECK_EQ(listening.accepted().sockets.size(), 2u);
}

TEST_CASE(a_connector_that_was_stopped_goes_on_with_its_handshake) {
  RawListener listener;
  ConnectingService connecting(listener.handle.data());
  CHECK_OK(connecting.ask());
  const OwnedFd peer = listener.next();
  const HandshakeKeyRef key = handshake_key(listener.token);
  Hello hello;
  Said said = read_hello(peer, &hello);
  test_clock::skip_ms(kHourMs);
  challenge(peer, &said);
  read_proof(peer, *key, said);
  test_clock::skip_ms(kHourMs);
  send_reply(peer, *key, said, acceptance(1));
  connecting.finish();
}

TEST_CASE(a_receiver_that_was_stopped_waits_for_a_connection_as_long_as_before) {
  Receiver receiver;
  test_clock::skip_ms(kHourMs);
  CHECK(!is_done(receiver.request));
  const auto is_noticed = [&] {
    receiver.pair.sender->recover();
    return Receiver::is_asked;
  };
  wait_until(is_noticed, "the sender to notice the loss");
  auto [near, far] = tcp_pair();
  receiver.pair.receiver_arrivals->hand_in(std::move(far), Joining::kReplacesFirst);
  receiver.pair.sender_arrivals->hand_in(std::move(near), Joining::kReplacesFirst);
  const std::vector<std::uint8_t> message = make_message(0, 1000);
  CHECK_OK(outcome({receiver.request, receiver.pair.send(message)}));
  CHECK(receiver.room == message);
}

// One that came or was under way before the pause is no answer to what was asked after it.
TEST_CASE(a_receiver_that_was_stopped_asks_its_sender_again) {
  for (const bool is_refused : {true, false}) {
    PortOfNobody port;
    if (!is_refused) port.listen();
    PeerContact contact;
    contact.add(port.address);
    Receiver receiver(contact);
    for (int pause = 0; pause < 3; ++pause) {
      test_clock::skip_ms(kHourMs);
      CHECK(!is_done(receiver.request));
    }
    std::string error;
    wait_until(
        [&] {
          bool done = false;
          std::size_t bytes = 0;
          error = receiver.request->test(&done, &bytes).message();
          return !error.empty();
        },
        "the error");
    check_contains(error, is_refused ? "the peer's port refuses connections" : "the peer has not answered");
    check_contains(error, is_refused ? "its process ended" : "its host, the network between");
  }
}

// What is lost with a connection is sent again until the comm has closed.
TEST_CASE(closing_has_its_time_in_a_process_that_was_stopped) {
  CommPair pair(Receiver::settings({}));
  CHECK_OK(outcome(pair.send(make_message(0, 1000))));
  cut_all(Cut::kReset);
  const auto is_closed_after = [&](std::int64_t ms) {
    test_clock::skip_ms(ms);
    return pair.sender->is_closed(monotonic_ms());
  };
  CHECK(!is_closed_after(0));
  CHECK(!is_closed_after(kHourMs));
  wait_until([&] { return is_closed_after(50); }, "the end");
}

// A peer that was stopped sends its challenge when the time for an answer is nearly over. If the connector then went
// over a shorter path, that connection would be there before the proof, which would take its place.
TEST_CASE(a_proof_has_the_time_of_a_hello_however_late_the_challenge_was) {
  ListeningService listening;
  ConnectingService connecting(listening.handle_bytes.data());
  const EstablishedConnection accepted = listening.accept_from(&connecting);
  HandleBytes handle = listening.handle_bytes;
  std::atomic<bool> has_challenge{false};
  std::atomic<bool> passes_challenge{false};
  std::atomic<bool> has_proof{false};
  std::atomic<bool> passes_proof{false};
  WireRelay relay(handle.data(), [&](const WireRelay::Passing& passing) {
    if (!passing.forth && passing.offset == 0) {
      has_challenge = true;
      wait_until([&] { return passes_challenge.load(); }, "the end of the delay");
    } else if (passing.forth && passing.offset >= kHelloBytes) {
      has_proof = true;
      wait_until([&] { return passes_proof.load(); }, "the end of the way");
    }
    return WireRelay::Fate::kPass;
  });
  const auto arrivals = std::make_shared<StreamArrivals>();
  JoinTicket ticket = connecting.connection.ticket;
  ticket.paths = {path_to(relay.address()), path_to(listening.address)};
  ticket.hello.stream_index = kReplacingFirstStream;
  JoinTicket other = ticket;
  other.first_path = 1;
  // The connection thread has looked at its deadlines.
  const auto look = [&](std::size_t place) {
    wait_until([&] { return connecting.service.prepare(other, place, arrivals) == Prepared::kReady; }, "a turn");
  };

  test_clock::stop();
  connecting.service.join(ticket, 1, arrivals);
  wait_until([&] { return has_challenge.load(); }, "the challenge");
  test_clock::pass_ms(kLongConnectAnswerMs - 1);
  look(1);
  passes_challenge = true;
  wait_until([&] { return has_proof.load(); }, "the proof");
  test_clock::skip_ms(2);
  look(2);
  test_clock::skip_ms(kConnectAgainMs);
  look(3);
  passes_proof = true;
  std::vector<StreamArrivals::Arrival> arrived;
  wait_until(
      [&] {
        arrived = arrivals->take();
        return !arrived.empty();
      },
      "the replacement");
  test_clock::go_on();
  CHECK_EQ(arrived[0].path, std::size_t{0});
}

}  // namespace bagua_net
