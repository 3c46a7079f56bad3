// The limits of one comm.
#pragma once

#include <cstddef>

namespace bagua_net {

// No path is known to need more connections.
constexpr int kMaxStreams = 64;

// NCCL wants 32 requests; one that finds no place is answered with "later".
constexpr std::size_t kMaxRequestsPerComm = 64;

}  // namespace bagua_net
