// HandshakeKey: what both ends of a handshake have to know. Without a secret of the job, the listen's token, which
// travels in NCCL's bootstrap; with one, HMAC-SHA-256 of the token with the secret, so that who sees the bootstrap
// still does not know it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "crypto/hmac_sha256.h"
#include "crypto/job_secret.h"
#include "wire/connect_handle.h"

namespace bagua_net {

using HandshakeKey = std::array<std::uint8_t, 32>;
// In protected memory.
using HandshakeKeyRef = std::shared_ptr<const HandshakeKey>;

// secret: nullptr: the job has none.
HandshakeKeyRef handshake_key(const Token& token, const JobSecret* secret = nullptr);

// HandshakeProof: shows that its sender knows the key of a handshake, without telling it. HMAC-SHA-256 (RFC 2104),
// keyed with that key, over a label that names the sender's role and over all that both ends
// have said on this connection:
//
//   connector   label (16 bytes), hello, challenge
//   listener    label (16 bytes), hello, challenge, reply, addresses behind it
//
// Each end contributes a fresh nonce, so a proof of another connection is worth nothing; the label keeps one from being
// sent back to where it came from; the hello's comm id and stream index keep one from being used for another stream.
// All parts but the last have fixed lengths. Pure bytes, no system call.
constexpr std::size_t kProofBytes = 32;
using HandshakeProof = Mac;

// hello[kHelloBytes], challenge[kChallengeBytes], reply[reply_bytes]: as they were sent.
HandshakeProof connector_proof(const HandshakeKey& key, const std::uint8_t* hello, const std::uint8_t* challenge);
HandshakeProof listener_proof(const HandshakeKey& key, const std::uint8_t* hello, const std::uint8_t* challenge,
                              const std::uint8_t* reply, std::size_t reply_bytes);

}  // namespace bagua_net
