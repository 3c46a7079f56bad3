#include "wire/handshake_proof.h"

#include <crypto_auth_hmacsha256.h>
#include <crypto_verify_32.h>

#include "wire/handshake_message.h"

namespace bagua_net {
namespace {

constexpr std::size_t kLabelBytes = 16;
constexpr char kConnectorLabel[] = "bagua-net conn 2";
constexpr char kListenerLabel[] = "bagua-net list 2";
static_assert(sizeof kConnectorLabel == kLabelBytes + 1 && sizeof kListenerLabel == kLabelBytes + 1);
static_assert(kProofBytes == crypto_auth_hmacsha256_BYTES && kProofBytes == crypto_verify_32_BYTES);

class Hmac {
 public:
  Hmac(const std::uint8_t* key, std::size_t key_bytes) { crypto_auth_hmacsha256_init(&state_, key, key_bytes); }
  Hmac& add(const void* data, std::size_t bytes) {
    crypto_auth_hmacsha256_update(&state_, static_cast<const unsigned char*>(data), bytes);
    return *this;
  }
  HandshakeProof finish() {
    HandshakeProof proof;
    crypto_auth_hmacsha256_final(&state_, proof.data());
    return proof;
  }

 private:
  crypto_auth_hmacsha256_state state_;
};

}  // namespace

HandshakeProof connector_proof(const Token& token, const std::uint8_t* hello, const std::uint8_t* challenge) {
  return Hmac(token.data(), token.size())
      .add(kConnectorLabel, kLabelBytes)
      .add(hello, kHelloBytes)
      .add(challenge, kChallengeBytes)
      .finish();
}

HandshakeProof listener_proof(const Token& token, const std::uint8_t* hello, const std::uint8_t* challenge,
                              const std::uint8_t* reply) {
  return Hmac(token.data(), token.size())
      .add(kListenerLabel, kLabelBytes)
      .add(hello, kHelloBytes)
      .add(challenge, kChallengeBytes)
      .add(reply, kReplyBytes)
      .finish();
}

bool is_same_proof(const HandshakeProof& expected, const std::uint8_t* received) {
  return crypto_verify_32(expected.data(), received) == 0;
}

HandshakeProof hmac_sha256(const std::uint8_t* key, std::size_t key_bytes, const std::uint8_t* data,
                           std::size_t data_bytes) {
  return Hmac(key, key_bytes).add(data, data_bytes).finish();
}

}  // namespace bagua_net
