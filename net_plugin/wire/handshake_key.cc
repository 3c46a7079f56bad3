#include "wire/handshake_key.h"

#include <algorithm>

#include "crypto/hmac_sha256.h"
#include "crypto/protected_memory.h"

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

}  // namespace bagua_net
