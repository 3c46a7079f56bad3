// NoiseHandshake: the handshake Noise_NNpsk0_25519_{ChaChaPoly,AESGCM}_SHA256 of the Noise protocol framework
// (noiseprotocol.org, revision 34):
//
//   initiator --psk, e, payload--> responder
//   initiator <--e, ee, payload--  responder
//
// Either end has a key pair for this connection alone (e), and both know a secret (psk). Who does not know it can read
// and answer neither message; who learns it later cannot read what was sent before. A first message can be replayed:
// what it asks for is done once a message under the keys of split() has come. Secrets inside: it lives in protected
// memory. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "crypto/cipher_state.h"
#include "crypto/hmac_sha256.h"

namespace bagua_net {

constexpr std::size_t kPublicKeyBytes = 32;
// What either message is longer than its payload.
constexpr std::size_t kNoiseOverhead = kPublicKeyBytes + kTagBytes;

class NoiseHandshake {
 public:
  enum class Role { kInitiator, kResponder };
  struct Secrets {
    const std::uint8_t* psk;          // [kKeyBytes]
    const std::uint8_t* private_key;  // [kKeyBytes], random, of this connection alone
  };
  // prologue: what both ends have to agree on, and is sent in the clear.
  NoiseHandshake(Cipher cipher, Role role, const Secrets& secrets, const std::uint8_t* prologue,
                 std::size_t prologue_bytes) noexcept;
  ~NoiseHandshake();
  NoiseHandshake(const NoiseHandshake&) = delete;
  NoiseHandshake& operator=(const NoiseHandshake&) = delete;

  // The next message of this role; message[bytes + kNoiseOverhead]. False: the peer's key is none.
  bool write(const std::uint8_t* payload, std::size_t bytes, std::uint8_t* message);
  // The next message of the other role; payload[bytes]. False: it is not from one that knows the secret and the same
  // prologue. Then the handshake is over.
  bool read(const std::uint8_t* message, std::size_t bytes, std::uint8_t* payload);

  // After both messages. The keys of either direction; those of the handshake are erased.
  void split(ConnectionKeys* keys);
  const Mac& hash() const { return hash_; }

 private:
  void erase_keys();
  void mix_hash(const std::uint8_t* data, std::size_t bytes);
  void mix_key(const std::uint8_t* data, std::size_t bytes);
  void mix_key_and_hash(const std::uint8_t* data, std::size_t bytes);
  // ee, in the second message.
  bool mix_shared_key(const std::uint8_t* public_key);

  const Cipher cipher_;
  const Role role_;
  Mac chaining_key_{};
  Mac hash_{};
  CipherState state_;
  std::array<std::uint8_t, kKeyBytes> private_key_{};
  std::array<std::uint8_t, kPublicKeyBytes> peers_key_{};
  bool is_second_ = false;  // message
};

}  // namespace bagua_net
