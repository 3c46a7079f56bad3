#include "wire/handshake_key.h"

#include <algorithm>

#include "crypto/protected_memory.h"
#include "wire/handshake_message.h"

namespace bagua_net {
namespace {

constexpr char kLabel[] = "bagua-net handshake 3";

}  // namespace

HandshakeKeyRef handshake_key(const Token& token, const JobSecret* secret) {
  Protected<HandshakeKey> key = make_protected<HandshakeKey>();
  if (secret == nullptr) {
    std::copy(token.begin(), token.end(), key->begin());
  } else {
    HmacSha256(secret->key(), secret->key_bytes())
        .add(kLabel, sizeof kLabel)
        .add(token.data(), token.size())
        .finish(key.get());
  }
  return key;
}

namespace {

constexpr std::size_t kLabelBytes = 16;
constexpr char kConnectorLabel[] = "bagua-net conn 3";
constexpr char kListenerLabel[] = "bagua-net list 3";
static_assert(sizeof kConnectorLabel == kLabelBytes + 1 && sizeof kListenerLabel == kLabelBytes + 1);

}  // namespace

HandshakeProof connector_proof(const HandshakeKey& key, const std::uint8_t* hello, const std::uint8_t* challenge) {
  return HmacSha256(key.data(), key.size())
      .add(kConnectorLabel, kLabelBytes)
      .add(hello, kHelloBytes)
      .add(challenge, kChallengeBytes)
      .finish();
}

HandshakeProof listener_proof(const HandshakeKey& key, const std::uint8_t* hello, const std::uint8_t* challenge,
                              const std::uint8_t* reply, std::size_t reply_bytes) {
  return HmacSha256(key.data(), key.size())
      .add(kListenerLabel, kLabelBytes)
      .add(hello, kHelloBytes)
      .add(challenge, kChallengeBytes)
      .add(reply, reply_bytes)
      .finish();
}

}  // namespace bagua_net
