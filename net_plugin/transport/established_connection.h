// EstablishedConnection: what a finished handshake hands to a comm.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/owned_fd.h"

namespace bagua_net {

struct EstablishedConnection {
  std::vector<OwnedFd> sockets;  // by stream index
  std::uint32_t max_chunk_bytes = 0;
  std::string peer;  // "10.0.0.2:4711 (host node2, process 4242)"
};

}  // namespace bagua_net
