// ListenComm: one listen(), which yields one connection. Its state lives in the connection service, under the token.
#pragma once

#include <string>

#include "wire/connect_handle.h"

namespace bagua_net {

struct ListenComm {
  Token token{};
  std::string interface;
};

}  // namespace bagua_net
