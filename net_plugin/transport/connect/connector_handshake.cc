#include "transport/connect/connector_handshake.h"

#include <algorithm>

#include "transport/connect/handshake_io.h"

namespace bagua_net {

// A listener answers a hello with one or the other.
static_assert(kChallengeBytes == kReplyBytes);

int ConnectorHandshake::send_hello(int socket, const Hello& hello) {
  received_ = 0;
  has_proved_ = false;
  encode_hello(hello, hello_.data());
  return write_handshake(socket, hello_.data(), hello_.size());
}

ConnectorHandshake::Answer ConnectorHandshake::read(int socket) {
  // A listener that does not have the token sends no proof, and closes the connection instead.
  const std::size_t bytes = has_proved_ ? kReplyBytes + kProofBytes : kReplyBytes;
  const HandshakeStep step = read_handshake(socket, answer_.data(), bytes, &received_);
  Challenge challenge;
  if (!has_proved_ && step == HandshakeStep::kDone && decode_challenge(answer_.data(), &challenge)) {
    return Answer::kChallenge;
  }
  Reply ignored;
  const bool is_of_other_protocol = received_ >= kReplyBytes && !reply(&ignored).is_ok();
  if (step == HandshakeStep::kDone || is_of_other_protocol) return Answer::kReply;
  return step == HandshakeStep::kWaiting ? Answer::kWaiting : Answer::kClosed;
}

int ConnectorHandshake::send_proof(int socket, const HandshakeKey& key) {
  std::copy_n(answer_.begin(), kChallengeBytes, challenge_.begin());
  received_ = 0;
  has_proved_ = true;
  const HandshakeProof proof = connector_proof(key, hello_.data(), challenge_.data());
  return write_handshake(socket, proof.data(), proof.size());
}

bool ConnectorHandshake::is_proven(const HandshakeKey& key) const {
  return has_proved_ && received_ == answer_.size() &&
         is_same_mac(listener_proof(key, hello_.data(), challenge_.data(), answer_.data()),
                     answer_.data() + kReplyBytes);
}

std::string ConnectorHandshake::refusal() const {
  Reply refusing;
  if (received_ < kReplyBytes || !reply(&refusing).is_ok() || refusing.verdict == HandshakeVerdict::kAccepted) {
    return {};
  }
  std::string text = std::string("the listener refuses the connection: ") + handshake_verdict_name(refusing.verdict);
  if (refusing.verdict != HandshakeVerdict::kWrongVersion) return text;
  return text + " (it speaks version " + std::to_string(refusing.protocol_version) + ", this rank speaks version " +
         std::to_string(kProtocolVersion) + ")";
}

}  // namespace bagua_net
