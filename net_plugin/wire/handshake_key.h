// HandshakeKey: what both ends of a handshake have to know. Without a secret of the job, the listen's token, which
// travels in NCCL's bootstrap; with one, HMAC-SHA-256 of the token with the secret, so that who sees the bootstrap
// still does not know it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "crypto/job_secret.h"
#include "wire/connect_handle.h"

namespace bagua_net {

using HandshakeKey = std::array<std::uint8_t, 32>;
// In protected memory.
using HandshakeKeyRef = std::shared_ptr<const HandshakeKey>;

// secret: nullptr: the job has none.
HandshakeKeyRef handshake_key(const Token& token, const JobSecret* secret = nullptr);

}  // namespace bagua_net
