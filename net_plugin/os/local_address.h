// What the kernel says of this host's addresses and of the way from it to another. Nothing is sent.
#pragma once

#include "os/network_interface.h"
#include "os/socket_address.h"

namespace bagua_net {

// In this network namespace. An IPv6 link-local address with its scope.
bool is_of_this_host(const SocketAddress& address);

// A connection to the address leaves with another address than the interface's unless it is bound, as where two
// interfaces are in one subnet. False where there is no route at all: the administrator may want it so.
bool leaves_elsewhere(const SocketAddress& to, const NetworkInterface& interface);

// Packets that are bound to the interface find a route. Without one, an IPv4 socket that is bound would still send: the
// kernel then asks for the address on the link itself. True where the kernel does not say.
bool has_route_over(const SocketAddress& to, const NetworkInterface& interface);

// Another interface of this host has an address in the same subnet.
bool shares_subnet(const NetworkInterface& interface);

// An IPv6 address in its first second: the kernel still asks whether another host has it.
bool is_tentative(const SocketAddress& address);

}  // namespace bagua_net
