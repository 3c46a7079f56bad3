// ListenComm: one listen(), which yields one connection. Its state lives in the connection service, under the token.
#pragma once

#include "wire/connect_handle.h"

namespace bagua_net {

struct ListenComm {
  Token token{};
};

}  // namespace bagua_net
