#include "transport/connect/unauthenticated_peer.h"

#include <algorithm>

#include "os/random_bytes.h"

namespace bagua_net {

UnauthenticatedPeer::Step UnauthenticatedPeer::read_hello() {
  const Step step = read_handshake(socket.get(), hello_.data(), hello_.size(), &received_);
  if (!is_hello_prefix(hello_.data(), received_)) return Step::kOtherProtocol;
  if (received_ >= kHelloVersionBytes && other_version() != kProtocolVersion) return Step::kOtherVersion;
  return step;
}

Hello UnauthenticatedPeer::hello() const {
  Hello hello;
  decode_hello(hello_.data(), &hello);
  return hello;
}

bool UnauthenticatedPeer::send_challenge() {
  Challenge challenge;
  if (!fill_random(challenge.nonce.data(), challenge.nonce.size()).is_ok()) return false;
  encode_challenge(challenge, challenge_.data());
  is_challenged_ = true;
  received_ = 0;
  return write_handshake(socket.get(), challenge_.data(), challenge_.size()) == 0;
}

UnauthenticatedPeer::Step UnauthenticatedPeer::read_proof() {
  return read_handshake(socket.get(), proof_.data(), proof_.size(), &received_);
}

bool UnauthenticatedPeer::proves(const HandshakeKey& key) const {
  return is_same_mac(connector_proof(key, hello_.data(), challenge_.data()), proof_.data());
}

void UnauthenticatedPeer::send_reply(const Reply& reply, const HandshakeKey* key) const {
  std::array<std::uint8_t, kReplyBytes + kProofBytes> bytes;
  encode_reply(reply, bytes.data());
  std::size_t count = kReplyBytes;
  if (key != nullptr) {
    const HandshakeProof proof = listener_proof(*key, hello_.data(), challenge_.data(), bytes.data());
    std::copy(proof.begin(), proof.end(), bytes.begin() + kReplyBytes);
    count += kProofBytes;
  }
  // If that fails, the peer tries the stream again, or the comm finds the stream broken.
  [[maybe_unused]] const int ignored = write_handshake(socket.get(), bytes.data(), count);
}

}  // namespace bagua_net
