// KeyedSocket: a socket whose handshake is done, and with encryption the keys of its connection, one for each
// direction.
#pragma once

#include <utility>

#include "base/owned_fd.h"
#include "crypto/cipher_state.h"
#include "crypto/protected_memory.h"

namespace bagua_net {

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
