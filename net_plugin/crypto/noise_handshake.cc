#include "crypto/noise_handshake.h"

#include <crypto_hash_sha256.h>
#include <crypto_scalarmult_curve25519.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "crypto/protected_memory.h"

namespace bagua_net {
namespace {

constexpr std::string_view kChaChaName = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";
constexpr std::string_view kAesName = "Noise_NNpsk0_25519_AESGCM_SHA256";

// HKDF of the framework (section 4.3): up to three outputs, each from the one before.
void expand(const Mac& chaining_key, const std::uint8_t* input, std::size_t bytes, Mac* first, Mac* second,
            Mac* third = nullptr) {
  Wiped<Mac> extracted;
  HmacSha256(chaining_key.data(), chaining_key.size()).add(input, bytes).finish(&extracted.key);
  const auto derive = [&](const Mac* previous, std::uint8_t number, Mac* output) {
    HmacSha256 hmac(extracted.key.data(), extracted.key.size());
    if (previous != nullptr) hmac.add(previous->data(), previous->size());
    hmac.add(&number, 1).finish(output);
  };
  Wiped<Mac> one;  // `first` may be the chaining key
  derive(nullptr, 1, &one.key);
  derive(&one.key, 2, second);
  if (third != nullptr) derive(second, 3, third);
  *first = one.key;
}

}  // namespace

NoiseHandshake::NoiseHandshake(Cipher cipher, Role role, const Secrets& secrets, const std::uint8_t* prologue,
                               std::size_t prologue_bytes) noexcept
    : cipher_(cipher), role_(role) {
  const std::string_view name = cipher == Cipher::kAes256Gcm ? kAesName : kChaChaName;
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(name.data());
  if (name.size() <= hash_.size()) {
    std::copy_n(bytes, name.size(), hash_.begin());
  } else {
    crypto_hash_sha256(hash_.data(), bytes, name.size());
  }
  chaining_key_ = hash_;
  mix_hash(prologue, prologue_bytes);
  mix_key_and_hash(secrets.psk, kKeyBytes);
  std::copy_n(secrets.private_key, kKeyBytes, private_key_.begin());
}

NoiseHandshake::~NoiseHandshake() { erase_keys(); }

void NoiseHandshake::erase_keys() {
  wipe(chaining_key_.data(), chaining_key_.size());
  wipe(private_key_.data(), private_key_.size());
  state_.erase_key();
}

void NoiseHandshake::mix_hash(const std::uint8_t* data, std::size_t bytes) {
  crypto_hash_sha256_state state;
  crypto_hash_sha256_init(&state);
  crypto_hash_sha256_update(&state, hash_.data(), hash_.size());
  crypto_hash_sha256_update(&state, data, bytes);
  crypto_hash_sha256_final(&state, hash_.data());
}

void NoiseHandshake::mix_key(const std::uint8_t* data, std::size_t bytes) {
  Wiped<Mac> key;
  expand(chaining_key_, data, bytes, &chaining_key_, &key.key);
  state_.set_key(cipher_, key.key.data());
}

void NoiseHandshake::mix_key_and_hash(const std::uint8_t* data, std::size_t bytes) {
  Wiped<Mac> hashed;
  Wiped<Mac> key;
  expand(chaining_key_, data, bytes, &chaining_key_, &hashed.key, &key.key);
  mix_hash(hashed.key.data(), hashed.key.size());
  state_.set_key(cipher_, key.key.data());
}

bool NoiseHandshake::mix_shared_key(const std::uint8_t* public_key) {
  Wiped<Mac> shared;
  // Refuses the keys with which the result does not depend on ours.
  if (crypto_scalarmult_curve25519(shared.key.data(), private_key_.data(), public_key) != 0) return false;
  mix_key(shared.key.data(), shared.key.size());
  return true;
}

bool NoiseHandshake::write(const std::uint8_t* payload, std::size_t bytes, std::uint8_t* message) {
  crypto_scalarmult_curve25519_base(message, private_key_.data());
  mix_hash(message, kPublicKeyBytes);
  mix_key(message, kPublicKeyBytes);
  if (is_second_ && !mix_shared_key(peers_key_.data())) return false;
  is_second_ = true;
  std::uint8_t* const sealed = message + kPublicKeyBytes;
  if (!state_.seal(sealed, payload, bytes, hash_.data(), hash_.size())) return false;
  mix_hash(sealed, bytes + kTagBytes);
  return true;
}

bool NoiseHandshake::read(const std::uint8_t* message, std::size_t bytes, std::uint8_t* payload) {
  std::copy_n(message, kPublicKeyBytes, peers_key_.begin());
  mix_hash(message, kPublicKeyBytes);
  mix_key(message, kPublicKeyBytes);
  if (is_second_ && !mix_shared_key(peers_key_.data())) return false;
  is_second_ = true;
  const std::uint8_t* const sealed = message + kPublicKeyBytes;
  Mac next = hash_;
  crypto_hash_sha256_state state;
  crypto_hash_sha256_init(&state);
  crypto_hash_sha256_update(&state, hash_.data(), hash_.size());
  crypto_hash_sha256_update(&state, sealed, bytes + kTagBytes);
  crypto_hash_sha256_final(&state, next.data());
  if (!state_.open(payload, sealed, bytes, hash_.data(), hash_.size())) return false;
  hash_ = next;
  return true;
}

void NoiseHandshake::split(ConnectionKeys* keys) {
  Wiped<Mac> of_initiator;
  Wiped<Mac> of_responder;
  expand(chaining_key_, nullptr, 0, &of_initiator.key, &of_responder.key);
  const bool initiates = role_ == Role::kInitiator;
  keys->out.set_key(cipher_, (initiates ? of_initiator : of_responder).key.data());
  keys->in.set_key(cipher_, (initiates ? of_responder : of_initiator).key.data());
  erase_keys();
}

}  // namespace bagua_net
