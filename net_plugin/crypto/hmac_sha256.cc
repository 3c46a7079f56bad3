#include "crypto/hmac_sha256.h"

#include <crypto_auth_hmacsha256.h>
#include <crypto_verify_32.h>

#include <tuple>

#include "crypto/protected_memory.h"

namespace bagua_net {

namespace {
crypto_auth_hmacsha256_state* state(std::uint8_t* bytes) {
  return reinterpret_cast<crypto_auth_hmacsha256_state*>(bytes);
}
}  // namespace

static_assert(std::tuple_size_v<Mac> == crypto_auth_hmacsha256_BYTES);
static_assert(std::tuple_size_v<Mac> == crypto_verify_32_BYTES);

HmacSha256::HmacSha256(const std::uint8_t* key, std::size_t key_bytes) {
  static_assert(sizeof state_ == sizeof(crypto_auth_hmacsha256_state));
  static_assert(alignof(crypto_auth_hmacsha256_state) <= 8);
  crypto_auth_hmacsha256_init(state(state_), key, key_bytes);
}

HmacSha256::~HmacSha256() { wipe(state_, sizeof state_); }

HmacSha256& HmacSha256::add(const void* data, std::size_t bytes) {
  crypto_auth_hmacsha256_update(state(state_), static_cast<const unsigned char*>(data), bytes);
  return *this;
}

void HmacSha256::finish(Mac* mac) { crypto_auth_hmacsha256_final(state(state_), mac->data()); }

bool is_same_mac(const Mac& expected, const std::uint8_t* received) {
  return crypto_verify_32(expected.data(), received) == 0;
}

}  // namespace bagua_net
