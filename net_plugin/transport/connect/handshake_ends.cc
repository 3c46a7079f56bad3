#include "transport/connect/handshake_ends.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "os/random_bytes.h"

namespace bagua_net {

HandshakeStep read_handshake(int socket, std::uint8_t* bytes, std::size_t count, std::size_t* received) {
  while (*received < count) {
    const ssize_t got = ::recv(socket, bytes + *received, count - *received, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return HandshakeStep::kWaiting;
    if (got <= 0) return HandshakeStep::kFailed;
    *received += static_cast<std::size_t>(got);
  }
  return HandshakeStep::kDone;
}

int write_handshake(int socket, const std::uint8_t* bytes, std::size_t count) {
  const ssize_t sent = ::send(socket, bytes, count, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent == static_cast<ssize_t>(count)) return 0;
  return sent < 0 ? errno : ECONNRESET;
}

// A listener answers a hello with one or the other.
static_assert(kChallengeBytes == kReplyBytes);
static_assert(kSealedChallengeBytes <= kReplyBytes + kProofBytes);
static_assert(kMaxSealedReplyBytes <= kMaxReplyBytes + kProofBytes);

int ConnectorHandshake::send_hello(int socket, const Hello& hello, HandshakeKeyRef key, std::size_t addresses) {
  key_ = std::move(key);
  addresses_ = addresses;
  sealed_.reset();
  received_ = 0;
  has_proved_ = is_opened_ = is_not_peer_ = false;
  encode_hello(hello, hello_.data());
  if (hello.cipher == Cipher::kNone) return write_handshake(socket, hello_.data(), hello_.size());
  Wiped<SealedHandshake::PrivateKey> private_key;
  const Status random = fill_random(private_key.key.data(), private_key.key.size());
  if (!random.is_ok()) return random.error_number();
  sealed_ =
      SealedHandshake::begin(SealedHandshake::Role::kInitiator, hello.cipher, *key_, private_key.key, hello_.data());
  std::array<std::uint8_t, kSealedHelloBytes> message;
  if (!sealed_->seal_hello(hello_.data(), message.data())) return EPROTO;
  return write_handshake(socket, message.data(), message.size());
}

ConnectorHandshake::Answer ConnectorHandshake::read_challenge(int socket) {
  Challenge challenge;
  // A refusal is shorter than a sealed challenge.
  HandshakeStep step = HandshakeStep::kDone;
  if (received_ < kChallengeBytes) step = read_handshake(socket, answer_.data(), kChallengeBytes, &received_);
  if (step == HandshakeStep::kWaiting) return Answer::kWaiting;
  if (step != HandshakeStep::kDone) return Answer::kClosed;
  if (!decode_challenge(answer_.data(), &challenge)) return Answer::kReply;
  if (sealed_ == nullptr) return Answer::kChallenge;
  step = read_handshake(socket, answer_.data(), kSealedChallengeBytes, &received_);
  if (step == HandshakeStep::kWaiting) return Answer::kWaiting;
  if (step == HandshakeStep::kDone && sealed_->open_challenge(answer_.data())) return Answer::kChallenge;
  is_not_peer_ = step == HandshakeStep::kDone;
  return Answer::kClosed;
}

ConnectorHandshake::Answer ConnectorHandshake::read(int socket) {
  if (!has_proved_) return read_challenge(socket);
  // A listener that does not have the key sends no proof, and closes the connection instead.
  const HandshakeStep step = sealed_ == nullptr ? read_reply(socket) : read_sealed_reply(socket);
  if (step == HandshakeStep::kDone) return Answer::kReply;
  return step == HandshakeStep::kWaiting ? Answer::kWaiting : Answer::kClosed;
}

std::size_t ConnectorHandshake::address_bytes() const {
  Reply read;
  return reply(&read).is_ok() && read.verdict == HandshakeVerdict::kAccepted ? addresses_ * kAddressBytes : 0;
}

HandshakeStep ConnectorHandshake::read_reply(int socket) {
  HandshakeStep step = HandshakeStep::kDone;
  if (received_ < kReplyBytes) step = read_handshake(socket, answer_.data(), kReplyBytes, &received_);
  Reply ignored;
  const bool is_of_other_protocol = step == HandshakeStep::kDone && !reply(&ignored).is_ok();
  if (step != HandshakeStep::kDone || is_of_other_protocol) return step;
  return read_handshake(socket, answer_.data(), kReplyBytes + address_bytes() + kProofBytes, &received_);
}

HandshakeStep ConnectorHandshake::read_sealed_reply(int socket) {
  const auto open = [this](bool is_opened) {
    is_opened_ = is_opened;
    is_not_peer_ = !is_opened;
    return is_opened ? HandshakeStep::kDone : HandshakeStep::kFailed;
  };
  HandshakeStep step = HandshakeStep::kDone;
  if (!is_opened_) {
    step = read_handshake(socket, answer_.data(), kSealedReplyBytes, &received_);
    if (step == HandshakeStep::kDone) step = open(sealed_->open_reply(answer_.data(), answer_.data()));
  }
  const std::size_t bytes = step == HandshakeStep::kDone ? address_bytes() : 0;
  if (bytes == 0) return step;
  std::uint8_t* const addresses = answer_.data() + addresses_at();
  step = read_handshake(socket, answer_.data(), addresses_at() + bytes + kTagBytes, &received_);
  return step == HandshakeStep::kDone ? open(sealed_->open_addresses(addresses, bytes, addresses)) : step;
}

int ConnectorHandshake::send_proof(int socket) {
  received_ = 0;
  has_proved_ = true;
  if (sealed_ != nullptr) {
    std::array<std::uint8_t, kSealedProofBytes> proof;
    if (!sealed_->seal_proof(proof.data())) return EPROTO;
    return write_handshake(socket, proof.data(), proof.size());
  }
  std::copy_n(answer_.begin(), kChallengeBytes, challenge_.begin());
  const HandshakeProof proof = connector_proof(*key_, hello_.data(), challenge_.data());
  return write_handshake(socket, proof.data(), proof.size());
}

bool ConnectorHandshake::is_proven() const {
  if (sealed_ != nullptr) return is_opened_;
  if (!has_proved_ || received_ < kReplyBytes) return false;
  const std::size_t bytes = kReplyBytes + address_bytes();
  return received_ == bytes + kProofBytes &&
         is_same_mac(listener_proof(*key_, hello_.data(), challenge_.data(), answer_.data(), bytes),
                     answer_.data() + bytes);
}

std::string ConnectorHandshake::refusal() const {
  if (is_not_peer_) return "the listener does not know the token of the connect handle";
  Reply refusing;
  if (received_ < kReplyBytes || !reply(&refusing).is_ok() || refusing.verdict == HandshakeVerdict::kAccepted) {
    return {};
  }
  std::string text = std::string("the listener refuses the connection: ") + handshake_verdict_name(refusing.verdict);
  if (refusing.verdict != HandshakeVerdict::kWrongVersion) return text;
  return text + " (it speaks version " + std::to_string(refusing.protocol_version) + ", this rank speaks version " +
         std::to_string(kProtocolVersion) + ")";
}

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
