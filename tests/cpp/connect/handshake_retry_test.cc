// Handshakes whose connection is lost between the listener's admission and the reply: the stream comes again, wherever
// the connection stands by then.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "support/check.h"
#include "support/connection_ends.h"
#include "support/raw_handshake.h"
#include "support/wire_relay.h"
#include "transport/connect/connection_service.h"

namespace bagua_net {
namespace {

// A connector by hand.
struct RetriedListening : ListeningService {
  explicit RetriedListening(std::optional<int> most_streams = {}) : ListeningService(settings_with(most_streams)) {}

  Hello hello(std::uint16_t index, std::uint16_t streams) const {
    Hello hello = ListeningService::hello();
    hello.comm_id = {9, 9};
    hello.stream_index = index;
    hello.streams_wanted = streams;
    return hello;
  }
  OwnedFd join(const Hello& hello, Reply* reply) const {
    OwnedFd socket = connect_to(address);
    *reply = shake_hands(socket, *handshake_key(handle.token), hello);
    return socket;
  }
  OwnedFd join(std::uint16_t index, std::uint16_t streams) const {
    Reply reply;
    OwnedFd socket = join(hello(index, streams), &reply);
    CHECK(reply.verdict == HandshakeVerdict::kAccepted);
    CHECK_EQ(reply.streams, is_joining(index) ? 1 : streams);
    CHECK_EQ(reply.max_chunk_bytes, 65536u);
    return socket;
  }
  void check_refused(const Hello& hello, HandshakeVerdict verdict = HandshakeVerdict::kUnknownStream) const {
    Reply reply;
    join(hello, &reply);
    CHECK(reply.verdict == verdict);
  }
  // As a connector does that did not see the reply.
  void lose(std::uint16_t index, std::uint16_t streams) const {
    OwnedFd socket = join(index, streams);
    reset_connection(&socket);
  }
};

void check_joined(const OwnedFd& near, const OwnedFd& far) {
  send_bytes(near, "x", 1);
  make_blocking(far);
  char byte = 0;
  read_bytes(far, &byte, 1);
  CHECK_EQ(byte, 'x');
}

}  // namespace

TEST_CASE(a_stream_that_is_lost_while_others_join_comes_again) {
  RetriedListening listening;
  listening.lose(0, 2);
  EstablishedConnection connection;
  CHECK(!listening.accept(&connection));
  listening.lose(0, 2);
  const OwnedFd first = listening.join(0, 2);
  CHECK(!listening.accept(&connection));
  const OwnedFd second = listening.join(1, 2);
  connection = listening.accepted();
  CHECK_EQ(connection.sockets.size(), 2u);
  check_joined(first, connection.sockets[0]);
  check_joined(second, connection.sockets[1]);
}

// Its connector has finished, and notices the loss before anybody accepts.
TEST_CASE(a_stream_that_is_lost_before_the_accept_is_replaced) {
  RetriedListening listening;
  OwnedFd first = listening.join(0, 2);
  OwnedFd second = listening.join(1, 2);
  reset_connection(&first);
  const OwnedFd replacing_first = listening.join(kReplacingFirstStream, 2);
  reset_connection(&second);
  const OwnedFd replacing_second = listening.join(kReplacingStream, 2);
  // Lost as well, but the listener has not heard of it; and one more.
  const OwnedFd replacing_another = listening.join(kReplacingStream, 2);
  const OwnedFd one_more = listening.join(kJoiningStream, 2);
  const EstablishedConnection connection = listening.accepted();
  CHECK_EQ(connection.sockets.size(), 4u);
  check_joined(replacing_first, connection.sockets[0]);
  check_joined(replacing_second, connection.sockets[1]);
  check_joined(replacing_another, connection.sockets[2]);
  check_joined(one_more, connection.sockets[3]);
}

// All places of a listener that allows no more streams are taken, one of them by a connection that is lost.
TEST_CASE(a_first_stream_comes_again_to_a_comm_that_is_full) {
  RetriedListening listening(2);
  const OwnedFd first = listening.join(0, 2);
  listening.lose(1, 2);
  const EstablishedConnection connection = listening.accepted();
  const OwnedFd second = listening.join(1, 2);
  for (const std::uint16_t index : {std::uint16_t{1}, std::uint16_t{2}, kJoiningStream}) {
    listening.check_refused(listening.hello(index, 2));
  }
  std::vector<StreamArrivals::Arrival> arrived;
  wait_until([&] { return arrived = connection.arrivals->take(), !arrived.empty(); }, "the stream");
  CHECK_EQ(arrived.size(), 1u);
  check_joined(first, connection.sockets[0]);
  check_joined(second, arrived[0].socket);
}

TEST_CASE(only_the_same_comm_takes_a_streams_place) {
  RetriedListening listening;
  const OwnedFd first = listening.join(0, 2);
  Hello other = listening.hello(0, 2);
  other.comm_id[0] ^= 1;
  listening.check_refused(other);
  // Nor a stream beyond those that its first one named.
  listening.check_refused(listening.hello(2, 2));
  const OwnedFd second = listening.join(1, 2);
  check_joined(first, listening.accepted().sockets[0]);
}

// A connector opens the next connection over a shorter path: it has joined before the proof of the former one arrives.
TEST_CASE(a_connection_that_its_connector_has_given_up_takes_no_place_of_a_later_one) {
  for (const std::uint32_t before : {std::uint32_t{1}, ~std::uint32_t{0}}) {  // they wrap
    RetriedListening listening;
    const HandshakeKeyRef key = handshake_key(listening.handle.token);
    const auto check_later_stays = [&](std::uint16_t index) {
      Hello hello = listening.hello(index, 2);
      hello.serial = before;
      Said said;
      const OwnedFd former = listening.challenged(hello, &said);
      hello.serial += 2;
      Reply reply;
      OwnedFd later = listening.join(hello, &reply);
      CHECK(reply.verdict == HandshakeVerdict::kAccepted);
      prove(former, *key, said);
      CHECK(read_reply(former, *key, said).verdict == HandshakeVerdict::kNoPlace);
      return later;
    };
    const OwnedFd lost = check_later_stays(0);
    const OwnedFd second = check_later_stays(1);
    Hello hello = listening.hello(kReplacingFirstStream, 2);
    hello.serial = before + 3;
    Reply reply;
    const OwnedFd first = listening.join(hello, &reply);
    CHECK(reply.verdict == HandshakeVerdict::kAccepted);
    // Of those that came before the accept, and of those that come after it.
    listening.check_refused(hello, HandshakeVerdict::kNoPlace);
    const EstablishedConnection connection = listening.accepted();
    listening.check_refused(hello, HandshakeVerdict::kNoPlace);
    hello.stream_index = 0;
    listening.check_refused(hello, HandshakeVerdict::kNoPlace);
    CHECK_EQ(connection.sockets.size(), 2u);
    check_joined(first, connection.sockets[0]);
    check_joined(second, connection.sockets[1]);
    CHECK(!connection.arrivals->any());
    hello.stream_index = kReplacingFirstStream;
    for (const std::uint32_t serial : {before + 4, std::uint32_t{0}}) {  // a connector without numbers is believed
      hello.serial = serial;
      const OwnedFd next = listening.join(hello, &reply);
      CHECK(reply.verdict == HandshakeVerdict::kAccepted);
    }
  }
}

TEST_CASE(a_connect_survives_the_loss_of_every_reply_once) {
  for (const int losses : {0, 1, 3}) {
    RetriedListening listening;
    HandleBytes handle = listening.handle_bytes;
    std::atomic<int> lost{0};
    WireRelay relay(handle.data(), [&](const WireRelay::Passing& passing) {
      if (passing.forth || passing.offset < kChallengeBytes || lost == losses) return WireRelay::Fate::kPass;
      ++lost;
      return WireRelay::Fate::kCut;
    });
    ConnectingService connecting(handle.data(), settings_with(2));
    const EstablishedConnection accepted = listening.accept_from(&connecting);
    CHECK_EQ(lost, losses);
    CHECK_EQ(connecting.connection.sockets.size(), 2u);
    CHECK_EQ(accepted.sockets.size(), 2u);
    relay.stop();
    const Token& token = listening.handle.token;
    for (const auto& connection : relay.seen()) {
      const auto& [forth, back] = connection;
      CHECK(std::search(forth.begin(), forth.end(), listening.id.begin(), listening.id.end()) != forth.end());
      for (const WireRelay::Bytes& seen : connection) {
        CHECK(std::search(seen.begin(), seen.end(), token.begin(), token.end()) == seen.end());
      }
    }
  }
}

}  // namespace bagua_net
