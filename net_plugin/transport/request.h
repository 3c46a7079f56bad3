// Request: one isend or irecv, from posting until test() reports it done; then the pointer is dead.
#pragma once

#include <cstddef>

#include "base/status.h"

namespace bagua_net {

class Request {
 public:
  // Called by one thread at a time per comm (NCCL's progress thread). Drives the comm's I/O as well.
  // *bytes is the size of the message, written when *done is.
  Status test(bool* done, std::size_t* bytes);
};

}  // namespace bagua_net
