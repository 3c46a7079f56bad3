#include "transport/connect/handle_address.h"

#include <net/if.h>
#include <sys/socket.h>

#include "os/local_address.h"

namespace bagua_net {

void put_address(const SocketAddress& address, ConnectHandle* handle) {
  handle->address_family = address.is_ipv6() ? 6 : 4;
  handle->address = address.bytes();
  handle->port = address.port();
  handle->scope_id = address.scope();
}

// A link-local address is valid on one link only. The handle has the listener's number of the link, which differs from
// host to host. On another host, the link is that of the device through which NCCL connects.
SocketAddress address_in(const ConnectHandle& handle, const NetworkInterface& interface) {
  if (handle.address_family == 4) return {AF_INET, handle.address, handle.port, 0};
  const SocketAddress address(AF_INET6, handle.address, handle.port, handle.scope_id);
  if (!address.is_link_local() || is_of_this_host(address)) return address;
  const unsigned own_number = current_index(interface);
  return own_number == 0 ? address : SocketAddress(AF_INET6, handle.address, handle.port, own_number);
}

}  // namespace bagua_net
