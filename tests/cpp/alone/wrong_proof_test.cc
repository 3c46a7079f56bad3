// Peers that know all that is said on the network, but not the token: replayed and reflected proofs, and those of
// others, at both ends of a connection. Proofs with another key: connection_join_test.cc.
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "support/check.h"
#include "support/connection_ends.h"
#include "support/raw_handshake.h"
#include "support/test_clock.h"
#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

HandshakeProof connectors(const ListeningService& listening, const Said& said) {
  return connector_proof(*handshake_key(listening.handle.token), said.hello.data(), said.challenge.data());
}

HandshakeVerdict verdict(const OwnedFd& socket, const ListeningService& listening, const HandshakeProof& proof) {
  send_bytes(socket, proof.data(), proof.size());
  return read_reply(socket, *handshake_key(listening.handle.token), {}).verdict;
}

}  // namespace

TEST_CASE(a_replayed_handshake_is_refused) {
  ListeningService listening;
  Hello hello = listening.hello();
  hello.streams_wanted = 2;
  Said said;
  const OwnedFd real = listening.challenged(hello, &said);
  const HandshakeProof proof = connectors(listening, said);
  send_bytes(real, proof.data(), proof.size());
  CHECK(read_reply(real, *handshake_key(listening.handle.token), said).verdict == HandshakeVerdict::kAccepted);
  // To the byte, the nonce too.
  const OwnedFd replayed = connect_to(listening.address);
  send_bytes(replayed, said.hello.data(), said.hello.size());
  Said again = said;
  Reply reply;
  CHECK(read_challenge(replayed, &again, &reply));
  CHECK(again.challenge != said.challenge);
  CHECK(verdict(replayed, listening, proof) == HandshakeVerdict::kWrongProof);
  // And it took nobody's place.
  CHECK(!has_ended_now(real.get()));
  listening.check_open();
}

TEST_CASE(a_proof_of_another_role_stream_or_listen_is_refused) {
  ListeningService listening;
  Said said;
  {
    const OwnedFd socket = listening.challenged(listening.hello(), &said);
    std::array<std::uint8_t, kReplyBytes> reply;
    encode_reply({}, reply.data());
    const HandshakeProof listeners = listener_proof(*handshake_key(listening.handle.token), said.hello.data(),
                                                    said.challenge.data(), reply.data(), kReplyBytes);
    CHECK(verdict(socket, listening, listeners) == HandshakeVerdict::kWrongProof);
  }
  {
    const OwnedFd socket = listening.challenged(listening.hello(), &said);
    Hello other;
    decode_hello(said.hello.data(), &other);
    other.stream_index = 1;
    encode_hello(other, said.hello.data());
    CHECK(verdict(socket, listening, connectors(listening, said)) == HandshakeVerdict::kWrongProof);
  }
  {
    ListeningService elsewhere;
    const OwnedFd socket = listening.challenged(listening.hello(), &said);
    CHECK(verdict(socket, listening, connectors(elsewhere, said)) == HandshakeVerdict::kWrongProof);
  }
  listening.check_open();
}

namespace {

// Connects to a listener that is not ours; `answer` says what it says.
template <typename Answer>
Status status_of_connect_to(Answer answer) {
  RawListener listener;
  HandshakeSettings settings = settings_with(1);
  settings.connect_timeout_ms = kConnectAgainMs - 1;
  ConnectingService connecting(listener.handle.data(), settings);
  test_clock::stop();
  CHECK_OK(connecting.ask());
  const OwnedFd socket = listener.next();
  Hello hello;
  Said said = read_hello(socket, &hello);
  answer(socket, said);
  // Until the deadline it might be another that answers. It may not pass before this answer was read.
  wait_until([&] { return has_ended(socket.get()); }, "the refusal");
  test_clock::pass_ms(settings.connect_timeout_ms);
  Status status = connecting.error();
  test_clock::go_on();
  return status;
}

void reply_with_proof(const OwnedFd& socket, const HandshakeProof& proof) {
  std::array<std::uint8_t, kReplyBytes + kProofBytes> bytes;
  encode_reply({kProtocolVersion, HandshakeVerdict::kAccepted, 1, 1, 1, 0, {}}, bytes.data());
  std::copy(proof.begin(), proof.end(), bytes.begin() + kReplyBytes);
  send_bytes(socket, bytes.data(), bytes.size());
}

bool is_about_the_token(const Status& status) {
  return status.message().find("does not know the token") != std::string::npos;
}

}  // namespace

TEST_CASE(a_listener_that_reflects_the_proof_or_the_nonce_is_refused) {
  for (const bool of_nonce : {false, true}) {
    CHECK(is_about_the_token(status_of_connect_to([of_nonce](const OwnedFd& socket, Said& said) {
      Hello hello;
      decode_hello(said.hello.data(), &hello);
      encode_challenge({of_nonce ? hello.nonce : RandomId{4}}, said.challenge.data());
      send_bytes(socket, said.challenge.data(), said.challenge.size());
      HandshakeProof reflected;
      read_bytes(socket, reflected.data(), reflected.size());
      reply_with_proof(socket, reflected);
    })));
  }
}

TEST_CASE(a_listener_that_accepts_without_a_challenge_is_refused) {
  CHECK(is_about_the_token(
      status_of_connect_to([](const OwnedFd& socket, Said&) { reply_with_proof(socket, HandshakeProof{}); })));
}

TEST_CASE(a_listener_that_changes_its_reply_is_refused) {
  CHECK(is_about_the_token(status_of_connect_to([](const OwnedFd& socket, Said& said) {
    challenge(socket, &said);
    HandshakeProof theirs;
    read_bytes(socket, theirs.data(), theirs.size());
    std::array<std::uint8_t, kReplyBytes> other;
    encode_reply({kProtocolVersion, HandshakeVerdict::kAccepted, 1, 2, 1, 0, {}}, other.data());
    reply_with_proof(socket, listener_proof(*handshake_key(Token{1, 2, 3}), said.hello.data(), said.challenge.data(),
                                            other.data(), kReplyBytes));
  })));
}

}  // namespace bagua_net
