// How a connect handle carries the address of its listener.
#pragma once

#include "os/network_interface.h"
#include "os/socket_address.h"
#include "wire/connect_handle.h"

namespace bagua_net {

void put_address(const SocketAddress& address, ConnectHandle* handle);
// interface: through which the listener is reached.
SocketAddress address_in(const ConnectHandle& handle, const NetworkInterface& interface);

}  // namespace bagua_net
