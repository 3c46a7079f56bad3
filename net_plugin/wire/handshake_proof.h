// HandshakeProof: shows that its sender knows the token of a listen, without telling it. HMAC-SHA-256 (RFC 2104), keyed
// with the token, over a label that names the sender's role and over all that both ends have said on this connection:
//
//   connector   label (16 bytes), hello, challenge
//   listener    label (16 bytes), hello, challenge, reply
//
// Each end contributes a fresh nonce, so a proof of another connection is worth nothing; the label keeps one from being
// sent back to where it came from; the hello's comm id and stream index keep one from being used for another stream.
// All parts have fixed lengths. Pure bytes, no system call. The algorithm is libsodium's (third_party/libsodium).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "wire/connect_handle.h"

namespace bagua_net {

constexpr std::size_t kProofBytes = 32;
using HandshakeProof = std::array<std::uint8_t, kProofBytes>;

// hello[kHelloBytes], challenge[kChallengeBytes], reply[kReplyBytes]: as they were sent.
HandshakeProof connector_proof(const Token& token, const std::uint8_t* hello, const std::uint8_t* challenge);
HandshakeProof listener_proof(const Token& token, const std::uint8_t* hello, const std::uint8_t* challenge,
                              const std::uint8_t* reply);

// In a time that does not depend on the bytes. received[kProofBytes].
bool is_same_proof(const HandshakeProof& expected, const std::uint8_t* received);

// RFC 2104 with SHA-256, for tests against published vectors.
HandshakeProof hmac_sha256(const std::uint8_t* key, std::size_t key_bytes, const std::uint8_t* data,
                           std::size_t data_bytes);

}  // namespace bagua_net
