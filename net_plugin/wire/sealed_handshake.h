// SealedHandshake: the messages of a handshake with encryption. Noise NNpsk0 (crypto/noise_handshake.h) with the key of
// the handshake as its secret carries those of wire/handshake_message.h. Pure bytes, no system call.
//
//   message     bytes  in the clear                            sealed
//   hello         192  hello to the key id (40), e (32)        the rest of the hello (104), tag
//   challenge      56  magic "BNCHALL1" (8), e (32)           nothing, tag
//   proof          16                                          nothing, tag
//   reply          48                                          reply (32), tag
//   addresses                                                  those behind the reply, tag; absent without any
//
// The 40 bytes in the clear are the prologue: version, cipher, listen id and key id cannot be changed on the way. Proof
// and reply are the first messages under the keys of the connection. A listener does what a hello asks for after the
// proof only, because a hello can be replayed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "crypto/cipher_state.h"
#include "crypto/noise_handshake.h"
#include "wire/handshake_message.h"

namespace bagua_net {

constexpr std::size_t kSealedHelloBytes = kHelloBytes + kNoiseOverhead;
constexpr std::size_t kChallengeClearBytes = 8;
constexpr std::size_t kSealedChallengeBytes = kChallengeClearBytes + kNoiseOverhead;
constexpr std::size_t kSealedProofBytes = kTagBytes;
constexpr std::size_t kSealedReplyBytes = kReplyBytes + kTagBytes;
constexpr std::size_t kMaxSealedReplyBytes = kMaxReplyBytes + 2 * kTagBytes;  // with addresses

// How a connector seals to this listener, whose handle says whether its CPU has AES.
Cipher choose_cipher(bool own_aes, bool listeners_aes);

class SealedHandshake {
 public:
  using Role = NoiseHandshake::Role;
  using PrivateKey = std::array<std::uint8_t, kKeyBytes>;

  // private_key: random, of this connection alone. hello: kHelloClearBytes of it.
  static Protected<SealedHandshake> begin(Role role, Cipher cipher, const HandshakeKey& key,
                                          const PrivateKey& private_key, const std::uint8_t* hello);
  SealedHandshake(Role role, Cipher cipher, const NoiseHandshake::Secrets& secrets, const std::uint8_t* hello) noexcept
      : noise_(cipher, role, secrets, hello, kHelloClearBytes) {}

  // The connector's. hello[kHelloBytes], as encode_hello() makes it. False: what was read is not from a listener that
  // knows the key.
  bool seal_hello(const std::uint8_t* hello, std::uint8_t* message);
  bool open_challenge(const std::uint8_t* message);
  bool seal_proof(std::uint8_t* message) { return keys_->out.seal(message, nullptr, 0); }
  bool open_reply(const std::uint8_t* message, std::uint8_t* reply) {
    return keys_->in.open(reply, message, kReplyBytes);
  }
  bool open_addresses(const std::uint8_t* message, std::size_t bytes, std::uint8_t* addresses) {
    return keys_->in.open(addresses, message, bytes);
  }

  // The listener's.
  bool open_hello(const std::uint8_t* message, std::uint8_t* hello);
  bool seal_challenge(std::uint8_t* message);
  bool open_proof(const std::uint8_t* message) { return keys_->in.open(nullptr, message, 0); }
  // reply: of that many bytes, with addresses. Returns the bytes of the message; 0: it failed.
  std::size_t seal_reply(const std::uint8_t* reply, std::size_t bytes, std::uint8_t* message);

  // After the reply.
  Protected<ConnectionKeys> take_keys() { return std::move(keys_); }

 private:
  void split();

  NoiseHandshake noise_;
  Protected<ConnectionKeys> keys_;
};

}  // namespace bagua_net
