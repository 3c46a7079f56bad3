// JobSecret: what the ranks of a job share in a file (BAGUA_NET_SECRET_FILE), and whoever reads the network or NCCL's
// bootstrap does not know. It is kept as a key that is derived from the file, in protected memory, and enters the key
// of every handshake (wire/handshake_message.h). One per transport context.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "crypto/hmac_sha256.h"

namespace bagua_net {

constexpr std::size_t kMinSecretBytes = 32;
constexpr std::size_t kMaxSecretBytes = 65536;

// Names a secret without telling it. Zeros: no secret.
using KeyId = std::array<std::uint8_t, 8>;

class JobSecret {
 public:
  // An error of three lines: the file is missing, too short or too long, or everyone may write it. Warns in the log if
  // everyone may read it, or its group may write it.
  static Status read(const std::string& path, std::shared_ptr<const JobSecret>* secret);
  // Of at least kMinSecretBytes.
  static std::shared_ptr<const JobSecret> derive(const std::uint8_t* bytes, std::size_t count);

  JobSecret() noexcept = default;  // for derive()

  const KeyId& id() const { return id_; }
  const std::uint8_t* key() const { return key_.data(); }
  std::size_t key_bytes() const { return key_.size(); }

 private:
  Mac key_{};
  KeyId id_{};
};

// "3f2a9c0d1e4b5a67".
std::string key_id_text(const KeyId& id);

}  // namespace bagua_net
