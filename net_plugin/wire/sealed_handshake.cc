#include "wire/sealed_handshake.h"

#include <algorithm>
#include <array>

namespace bagua_net {
namespace {

constexpr std::size_t kHelloRestBytes = kHelloBytes - kHelloClearBytes;

}  // namespace

Cipher choose_cipher(bool own_aes, bool listeners_aes) {
  return own_aes && listeners_aes ? Cipher::kAes256Gcm : Cipher::kChaCha20Poly1305;
}

Protected<SealedHandshake> SealedHandshake::begin(Role role, Cipher cipher, const HandshakeKey& key,
                                                  const PrivateKey& private_key, const std::uint8_t* hello) {
  return make_protected<SealedHandshake>(role, cipher, NoiseHandshake::Secrets{key.data(), private_key.data()}, hello);
}

void SealedHandshake::split() {
  keys_ = make_protected<ConnectionKeys>();
  noise_.split(keys_.get());
}

bool SealedHandshake::seal_hello(const std::uint8_t* hello, std::uint8_t* message) {
  std::copy_n(hello, kHelloClearBytes, message);
  return noise_.write(hello + kHelloClearBytes, kHelloRestBytes, message + kHelloClearBytes);
}

bool SealedHandshake::open_hello(const std::uint8_t* message, std::uint8_t* hello) {
  std::copy_n(message, kHelloClearBytes, hello);
  return noise_.read(message + kHelloClearBytes, kHelloRestBytes, hello + kHelloClearBytes);
}

bool SealedHandshake::seal_challenge(std::uint8_t* message) {
  std::array<std::uint8_t, kChallengeBytes> head;
  encode_challenge({}, head.data());
  std::copy_n(head.begin(), kChallengeClearBytes, message);
  if (!noise_.write(nullptr, 0, message + kChallengeClearBytes)) return false;
  split();
  return true;
}

std::size_t SealedHandshake::seal_reply(const std::uint8_t* reply, std::size_t bytes, std::uint8_t* message) {
  if (!keys_->out.seal(message, reply, kReplyBytes)) return 0;
  if (bytes == kReplyBytes) return kSealedReplyBytes;
  if (!keys_->out.seal(message + kSealedReplyBytes, reply + kReplyBytes, bytes - kReplyBytes)) return 0;
  return bytes + 2 * kTagBytes;
}

bool SealedHandshake::open_challenge(const std::uint8_t* message) {
  if (!noise_.read(message + kChallengeClearBytes, 0, nullptr)) return false;
  split();
  return true;
}

}  // namespace bagua_net
