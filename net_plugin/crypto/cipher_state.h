// CipherState of the Noise protocol framework (noiseprotocol.org, revision 34, section 5.1): a key with the counter
// that is its nonce. The counter only rises, so no nonce is used twice with a key. The ciphers are libsodium's;
// where the CPU has VAES, AES-256-GCM is WideAes. It holds a key, so it lives in protected memory. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/owned_fd.h"
#include "crypto/protected_memory.h"
#include "crypto/wide_aes.h"

namespace bagua_net {

enum class Cipher : std::uint16_t {
  kNone = 0,
  kChaCha20Poly1305 = 1,
  kAes256Gcm = 2,
};
constexpr bool is_known_cipher(Cipher cipher) { return cipher <= Cipher::kAes256Gcm; }
const char* cipher_name(Cipher cipher);
// AES in hardware, without which it is slow and its timing depends on the key.
bool cpu_has_aes();

constexpr std::size_t kKeyBytes = 32;
constexpr std::size_t kTagBytes = 16;

class CipherState {
 public:
  CipherState() noexcept = default;
  ~CipherState();
  CipherState(const CipherState&) = delete;
  CipherState& operator=(const CipherState&) = delete;

  // key[kKeyBytes]. The counter begins at zero. AES on a CPU without it: there is no key.
  void set_key(Cipher cipher, const std::uint8_t* key);
  void erase_key();

  // out[bytes + kTagBytes]; it may begin at `in`. False: there is no key, or no nonce is left. additional: nullptr, or
  // what is authenticated with it.
  bool seal(std::uint8_t* out, const std::uint8_t* in, std::size_t bytes, const std::uint8_t* additional = nullptr,
            std::size_t additional_bytes = 0);
  // in[bytes + kTagBytes], out[bytes]; it may begin at `in`. False: this is not what was sealed with this key as the
  // next, and `out` means nothing.
  bool open(std::uint8_t* out, const std::uint8_t* in, std::size_t bytes, const std::uint8_t* additional = nullptr,
            std::size_t additional_bytes = 0);
  // A new key, from which the old one does not follow (section 4.2). The counter goes on.
  void rekey();

  Cipher cipher() const { return cipher_; }
  std::uint64_t next_nonce() const { return nonce_; }
  const std::uint8_t* key() const { return key_; }  // for tests

 private:
  struct Nonce {
    std::uint8_t bytes[12];
  };
  Nonce nonce(std::uint64_t number) const;
  bool uses_wide_aes(const std::uint8_t* additional) const;
  bool seal_with(std::uint64_t number, std::uint8_t* out, const std::uint8_t* in, std::size_t bytes,
                 const std::uint8_t* additional, std::size_t additional_bytes) const;

  WideAes wide_aes_;                   // where the CPU has it; without additional data
  alignas(16) std::uint8_t aes_[512];  // libsodium's expansion of the key
  std::uint8_t key_[kKeyBytes] = {};
  std::uint64_t nonce_ = 0;
  Cipher cipher_ = Cipher::kNone;
};

// KeyedSocket: a socket whose handshake is done, and with encryption the keys of its connection, one for each
// direction.
struct ConnectionKeys {
  CipherState out;
  CipherState in;
};

struct KeyedSocket : OwnedFd {
  KeyedSocket() = default;
  KeyedSocket(OwnedFd socket, Protected<ConnectionKeys> its_keys = nullptr)  // NOLINT(google-explicit-constructor)
      : OwnedFd(std::move(socket)), keys(std::move(its_keys)) {}

  Protected<ConnectionKeys> keys;  // nullptr: it is not encrypted
};

}  // namespace bagua_net
