// Protection: with what a rank protects its connections. It is the same on all ranks of a job; the connect handle and
// each hello say it, so that ranks that differ are named at once.
#pragma once

#include <string>

#include "crypto/job_secret.h"

namespace bagua_net {

struct Protection {
  KeyId key_id{};  // of the secret; zeros: none
  bool encrypts = false;
};

// "this rank has the secret 3f2a9c0d1e4b5a67, that rank has no secret", and what to do in another line. "": they agree.
std::string protection_mismatch(const Protection& own, const Protection& peers);

}  // namespace bagua_net
