// Endpoints as text, and the sockets of the benchmarks that speak plain TCP. Congestion control and buffer sizes are
// the system's, as they are for NCCL's own transport.
#pragma once

#include <string>

#include "base/owned_fd.h"
#include "base/status.h"
#include "os/socket_address.h"

namespace bagua_net::bench {

// "192.0.2.1", "192.0.2.1:4711", "[2001:db8::1]:4711", "node2:4711". Without a port: 0. `name` is what errors call it.
Status parse_endpoint(const std::string& name, const std::string& text, SocketAddress* address);

// A non-blocking listening socket; port 0 takes a free one. *bound: its real address.
Status listen_on(const SocketAddress& address, OwnedFd* socket, SocketAddress* bound);

Status set_no_delay(int socket);

}  // namespace bagua_net::bench
