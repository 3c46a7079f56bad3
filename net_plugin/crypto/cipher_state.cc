#include "crypto/cipher_state.h"

#include <core.h>
#include <crypto_aead_aes256gcm.h>
#include <crypto_aead_chacha20poly1305.h>

#include <algorithm>
#include <cstring>

#include "crypto/protected_memory.h"

namespace bagua_net {
namespace {

constexpr std::uint64_t kRekeyNonce = ~std::uint64_t{0};  // which no message has

static_assert(kTagBytes == crypto_aead_aes256gcm_ABYTES && kTagBytes == crypto_aead_chacha20poly1305_ietf_ABYTES);
static_assert(kKeyBytes == crypto_aead_aes256gcm_KEYBYTES && kKeyBytes == crypto_aead_chacha20poly1305_ietf_KEYBYTES);

// libsodium chooses its implementations, once.
bool choose_implementations() {
  static const bool chosen = ::sodium_init() == 0;
  return chosen;
}

crypto_aead_aes256gcm_state* expanded(std::uint8_t* bytes) {
  return reinterpret_cast<crypto_aead_aes256gcm_state*>(bytes);
}
const crypto_aead_aes256gcm_state* expanded(const std::uint8_t* bytes) {
  return reinterpret_cast<const crypto_aead_aes256gcm_state*>(bytes);
}

}  // namespace

const char* cipher_name(Cipher cipher) {
  switch (cipher) {
    case Cipher::kNone: return "none";
    case Cipher::kChaCha20Poly1305: return "ChaCha20-Poly1305";
    case Cipher::kAes256Gcm: return "AES-256-GCM";
  }
  return "unknown";
}

bool cpu_has_aes() { return choose_implementations() && crypto_aead_aes256gcm_is_available() == 1; }

CipherState::~CipherState() { erase_key(); }

bool CipherState::uses_wide_aes(const std::uint8_t* additional) const {
  return cipher_ == Cipher::kAes256Gcm && additional == nullptr && cpu_has_wide_aes();
}

void CipherState::erase_key() {
  wipe(&wide_aes_, sizeof wide_aes_);
  wipe(aes_, sizeof aes_);
  wipe(key_, sizeof key_);
  cipher_ = Cipher::kNone;
}

void CipherState::set_key(Cipher cipher, const std::uint8_t* key) {
  static_assert(sizeof aes_ == sizeof(crypto_aead_aes256gcm_state));
  choose_implementations();
  nonce_ = 0;
  // libsodium would run instructions that the CPU does not have.
  if (cipher == Cipher::kAes256Gcm && !cpu_has_aes()) return erase_key();
  cipher_ = cipher;
  std::memmove(key_, key, kKeyBytes);
  if (cipher == Cipher::kAes256Gcm) crypto_aead_aes256gcm_beforenm(expanded(aes_), key_);
  if (uses_wide_aes(nullptr)) wide_aes_.set_key(key_);
}

// Four zeros, then the counter: little-endian for ChaCha20-Poly1305, big-endian for AES-GCM (section 12).
CipherState::Nonce CipherState::nonce(std::uint64_t number) const {
  Nonce nonce{};
  for (unsigned i = 0; i < 8; ++i) {
    const unsigned shift = cipher_ == Cipher::kAes256Gcm ? 8 * (7 - i) : 8 * i;
    nonce.bytes[4 + i] = static_cast<std::uint8_t>(number >> shift);
  }
  return nonce;
}

bool CipherState::seal_with(std::uint64_t number, std::uint8_t* out, const std::uint8_t* in, std::size_t bytes,
                            const std::uint8_t* additional, std::size_t additional_bytes) const {
  const Nonce used = nonce(number);
  if (uses_wide_aes(additional)) {
    wide_aes_.seal(used.bytes, out, in, bytes);
    return true;
  }
  if (cipher_ == Cipher::kAes256Gcm) {
    return crypto_aead_aes256gcm_encrypt_afternm(out, nullptr, in, bytes, additional, additional_bytes, nullptr,
                                                 used.bytes, expanded(aes_)) == 0;
  }
  return crypto_aead_chacha20poly1305_ietf_encrypt(out, nullptr, in, bytes, additional, additional_bytes, nullptr,
                                                   used.bytes, key_) == 0;
}

bool CipherState::seal(std::uint8_t* out, const std::uint8_t* in, std::size_t bytes, const std::uint8_t* additional,
                       std::size_t additional_bytes) {
  if (cipher_ == Cipher::kNone || nonce_ == kRekeyNonce) return false;
  return seal_with(nonce_++, out, in, bytes, additional, additional_bytes);
}

bool CipherState::open(std::uint8_t* out, const std::uint8_t* in, std::size_t bytes, const std::uint8_t* additional,
                       std::size_t additional_bytes) {
  if (cipher_ == Cipher::kNone || nonce_ == kRekeyNonce) return false;
  const Nonce used = nonce(nonce_);
  if (uses_wide_aes(additional)) {
    const bool is_right = wide_aes_.open(used.bytes, out, in, bytes);
    nonce_ += is_right;
    return is_right;
  }
  const std::size_t sealed_bytes = bytes + kTagBytes;
  const int result = cipher_ == Cipher::kAes256Gcm
                         ? crypto_aead_aes256gcm_decrypt_afternm(out, nullptr, nullptr, in, sealed_bytes, additional,
                                                                 additional_bytes, used.bytes, expanded(aes_))
                         : crypto_aead_chacha20poly1305_ietf_decrypt(out, nullptr, nullptr, in, sealed_bytes,
                                                                     additional, additional_bytes, used.bytes, key_);
  if (result != 0) return false;
  ++nonce_;
  return true;
}

void CipherState::rekey() {
  struct Sealed {
    std::uint8_t bytes[kKeyBytes + kTagBytes];
  };
  static constexpr std::uint8_t kZeros[kKeyBytes] = {};
  Wiped<Sealed> sealed;
  if (!seal_with(kRekeyNonce, sealed.key.bytes, kZeros, kKeyBytes, nullptr, 0)) return erase_key();
  const std::uint64_t next = nonce_;
  set_key(cipher_, sealed.key.bytes);
  nonce_ = next;
}

}  // namespace bagua_net
