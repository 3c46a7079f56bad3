// HMAC-SHA-256 (RFC 2104), over parts. The algorithm is libsodium's (third_party/libsodium).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace bagua_net {

using Mac = std::array<std::uint8_t, 32>;

class HmacSha256 {
 public:
  HmacSha256(const std::uint8_t* key, std::size_t key_bytes);
  ~HmacSha256();
  HmacSha256(const HmacSha256&) = delete;
  HmacSha256& operator=(const HmacSha256&) = delete;

  HmacSha256& add(const void* data, std::size_t bytes);
  void finish(Mac* mac);
  Mac finish() {
    Mac mac;
    finish(&mac);
    return mac;
  }

 private:
  static constexpr std::size_t kStateBytes = 208;  // of libsodium's state, whose headers are for this room alone
  alignas(8) std::uint8_t state_[kStateBytes];
};

// In a time that does not depend on the bytes. received[32].
bool is_same_mac(const Mac& expected, const std::uint8_t* received);

}  // namespace bagua_net
