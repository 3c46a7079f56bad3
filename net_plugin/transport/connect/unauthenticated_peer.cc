#include "transport/connect/unauthenticated_peer.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "os/random_bytes.h"

namespace bagua_net {

UnauthenticatedPeer::Step UnauthenticatedPeer::read(std::uint8_t* bytes, std::size_t count) {
  while (received_ < count) {
    const ssize_t got = ::recv(socket.get(), bytes + received_, count - received_, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Step::kWaiting;
    if (got <= 0) return Step::kFailed;
    received_ += static_cast<std::size_t>(got);
  }
  return Step::kDone;
}

bool UnauthenticatedPeer::send(const std::uint8_t* bytes, std::size_t count) const {
  // The buffer of a fresh socket always has room for the messages of a handshake.
  return ::send(socket.get(), bytes, count, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(count);
}

UnauthenticatedPeer::Step UnauthenticatedPeer::read_hello() {
  const Step step = read(hello_.data(), hello_.size());
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
  return send(challenge_.data(), challenge_.size());
}

UnauthenticatedPeer::Step UnauthenticatedPeer::read_proof() { return read(proof_.data(), proof_.size()); }

bool UnauthenticatedPeer::proves(const Token& token) const {
  return is_same_proof(connector_proof(token, hello_.data(), challenge_.data()), proof_.data());
}

void UnauthenticatedPeer::send_reply(const Reply& reply, const Token* token) const {
  std::array<std::uint8_t, kReplyBytes + kProofBytes> bytes;
  encode_reply(reply, bytes.data());
  std::size_t count = kReplyBytes;
  if (token != nullptr) {
    const HandshakeProof proof = listener_proof(*token, hello_.data(), challenge_.data(), bytes.data());
    std::copy(proof.begin(), proof.end(), bytes.begin() + kReplyBytes);
    count += kProofBytes;
  }
  // If the peer is gone already, it tries the stream again, or the streams tell the comm.
  [[maybe_unused]] const bool ignored = send(bytes.data(), count);
}

}  // namespace bagua_net
