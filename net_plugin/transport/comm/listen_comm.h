// ListenComm: one listen(), which yields one connection. Its state lives in the connection service, under the id.
#pragma once

#include "wire/connect_handle.h"

namespace bagua_net {

struct ListenComm {
  RandomId id{};
  int device = 0;
};

}  // namespace bagua_net
