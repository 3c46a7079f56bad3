#include "transport/connect/unauthenticated_peer.h"

#include <algorithm>

#include "os/random_bytes.h"

namespace bagua_net {

UnauthenticatedPeer::Step UnauthenticatedPeer::read_hello() {
  if (received_ < kHelloClearBytes) {
    const Step step = read_handshake(socket.get(), hello_.data(), kHelloClearBytes, &received_);
    if (!is_hello_prefix(hello_.data(), received_)) return Step::kOtherProtocol;
    if (received_ >= kHelloVersionBytes && other_version() != kProtocolVersion) return Step::kOtherVersion;
    if (step != Step::kDone) return step;
  }
  if (!is_known_cipher(hello_cipher(hello_.data()))) return Step::kOtherProtocol;
  return read_handshake(socket.get(), hello_.data(), is_sealed() ? kSealedHelloBytes : kHelloBytes, &received_);
}

Hello UnauthenticatedPeer::hello() const {
  Hello hello;
  if (is_sealed() && sealed_ == nullptr) {
    decode_clear_hello(hello_.data(), &hello);
  } else {
    decode_hello(hello_.data(), &hello);
  }
  return hello;
}

bool UnauthenticatedPeer::open_hello(const HandshakeKey& key) {
  Wiped<SealedHandshake::PrivateKey> private_key;
  if (!fill_random(private_key.key.data(), private_key.key.size()).is_ok()) return false;
  Protected<SealedHandshake> sealed = SealedHandshake::begin(
      SealedHandshake::Role::kResponder, hello_cipher(hello_.data()), key, private_key.key, hello_.data());
  std::array<std::uint8_t, kHelloBytes> opened;
  if (!sealed->open_hello(hello_.data(), opened.data())) return false;
  std::copy(opened.begin(), opened.end(), hello_.begin());
  sealed_ = std::move(sealed);
  return true;
}

bool UnauthenticatedPeer::send_challenge() {
  is_challenged_ = true;
  received_ = 0;
  if (sealed_ != nullptr) {
    std::array<std::uint8_t, kSealedChallengeBytes> message;
    return sealed_->seal_challenge(message.data()) &&
           write_handshake(socket.get(), message.data(), message.size()) == 0;
  }
  Challenge challenge;
  if (!fill_random(challenge.nonce.data(), challenge.nonce.size()).is_ok()) return false;
  encode_challenge(challenge, challenge_.data());
  return write_handshake(socket.get(), challenge_.data(), challenge_.size()) == 0;
}

UnauthenticatedPeer::Step UnauthenticatedPeer::read_proof() {
  return read_handshake(socket.get(), proof_.data(), sealed_ != nullptr ? kSealedProofBytes : kProofBytes, &received_);
}

bool UnauthenticatedPeer::proves(const HandshakeKey& key) {
  if (sealed_ != nullptr) return sealed_->open_proof(proof_.data());
  return is_same_mac(connector_proof(key, hello_.data(), challenge_.data()), proof_.data());
}

void UnauthenticatedPeer::send_reply(const Reply& reply, const HandshakeKey* key) {
  std::array<std::uint8_t, kMaxReplyBytes + kProofBytes> bytes;
  std::size_t count = encode_reply(reply, bytes.data());
  if (key != nullptr && sealed_ != nullptr) {
    std::array<std::uint8_t, kMaxSealedReplyBytes> message;
    const std::size_t sealed = sealed_->seal_reply(bytes.data(), count, message.data());
    [[maybe_unused]] const int ignored = write_handshake(socket.get(), message.data(), sealed);
    return;
  }
  if (key != nullptr) {
    const HandshakeProof proof = listener_proof(*key, hello_.data(), challenge_.data(), bytes.data(), count);
    std::copy_n(proof.begin(), kProofBytes, bytes.data() + count);
    count += kProofBytes;
  }
  // If that fails, the peer tries the stream again, or the comm finds the stream broken.
  [[maybe_unused]] const int ignored = write_handshake(socket.get(), bytes.data(), count);
}

KeyedSocket UnauthenticatedPeer::take_socket() {
  return {std::move(socket), sealed_ == nullptr ? nullptr : sealed_->take_keys()};
}

}  // namespace bagua_net
