// WideAes: AES-256-GCM (NIST SP 800-38D) with VAES, which encrypts several blocks with one instruction. The inner loops
// are BoringSSL's (third_party/boringssl); here is what surrounds them. Without additional data. It holds a key, so it
// lives in protected memory. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua_net {

// CPUs since AMD Zen 3 and Intel Ice Lake have it.
bool cpu_has_wide_aes();

class WideAes {
 public:
  // key[32]. Only where the CPU has it.
  void set_key(const std::uint8_t* key);
  // nonce[12], out[bytes + 16]; it may begin at `in`.
  void seal(const std::uint8_t* nonce, std::uint8_t* out, const std::uint8_t* in, std::size_t bytes) const;
  // in[bytes + 16], out[bytes]; it may begin at `in`. False: it was not sealed with this key and nonce, and `out` means
  // nothing.
  bool open(const std::uint8_t* nonce, std::uint8_t* out, const std::uint8_t* in, std::size_t bytes) const;

 private:
  static constexpr std::size_t kBlock = 16;
  static constexpr std::size_t kRoundKeys = 15;

  // As BoringSSL's code reads it: AES_KEY, and the powers of the key of GHASH.
  struct alignas(16) RoundKeys {
    std::uint8_t keys[kRoundKeys][kBlock];
    std::uint32_t rounds;  // one less
  };
  struct alignas(64) Powers {
    std::uint8_t bytes[16][kBlock];
  };

  void encrypt_block(const std::uint8_t* in, std::uint8_t* out) const;
  // Encrypts or decrypts what is behind the last whole block, and makes the tag.
  void finish(const std::uint8_t* nonce, std::uint8_t* out, const std::uint8_t* in, std::size_t bytes, bool seals,
              std::uint8_t* hash) const;

  RoundKeys round_keys_;
  Powers powers_;
};

}  // namespace bagua_net
