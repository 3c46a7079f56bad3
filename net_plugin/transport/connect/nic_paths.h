// NicPaths: over which pairs of network interfaces the connections of a comm go, where a device has joined several.
//
// [Note: pairs of interfaces]
// A path is an interface of this host and an address of the listener. There are enough paths that each interface of
// either host has one: where there are two here and one there, both lead to the same address. Pairs in one subnet come
// first, then others that have a route. Connections are bound to their interface. A pair that cannot connect is found
// by trying: it is left out, by later comms as well, and its connections go over another pair until it works
// (transport/connect/path_states.h).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/log_sink.h"
#include "os/network_interface.h"
#include "os/socket_address.h"
#include "wire/connect_handle.h"

namespace bagua_net {

// How a connect handle carries the address of its listener.
void put_address(const SocketAddress& address, ConnectHandle* handle);
// interface: through which the listener is reached.
SocketAddress address_in(const ConnectHandle& handle, const NetworkInterface& interface);

struct NicPath {
  NetworkInterface interface;  // over which the listener is reached
  SocketAddress address;       // of the listener
  std::uint16_t port = 0;      // of this process at the interface's address, where the peer may probe; 0: none
};

// What the kernel says of an interface of this host and an address of the other.
struct NicPairing {
  bool same_subnet = false;
  bool is_routed = false;  // there is a route over this interface
};
using NicPair = std::pair<std::size_t, std::size_t>;
// Pairs of interfaces (rows) and addresses (columns), in the order in which connections are opened over them. in_use:
// that are used already; they come first.
std::vector<NicPair> pair_nics(const std::vector<std::vector<NicPairing>>& pairings, std::vector<NicPair> in_use = {});

// interfaces: of the device, with their ports. One path if both ends have one interface or addresses of different
// families, or are on one host. in_use: the path that a connection has already; it comes first. nullptr: none.
std::vector<NicPath> find_paths(const std::vector<NetworkInterface>& interfaces,
                                const std::vector<std::uint16_t>& ports, const ConnectHandle& handle,
                                const NicPath* in_use = nullptr);

// How many there will be with the addresses that the handle has no room for.
std::size_t expected_paths(const std::vector<NicPath>& paths, const std::vector<NetworkInterface>& interfaces,
                           const ConnectHandle& handle);

// If interfaces of either host are without a pair or share one. Without a text: each has its own.
RareLog::Line describe_mismatch(const std::vector<NetworkInterface>& interfaces, const ConnectHandle& handle,
                                const std::vector<NicPath>& paths);

// Of that many streams of a new comm, the path that each should have, even if it cannot connect now. first: of the
// first one. The others are spread evenly, with the first or, if it carries small messages only, without it. Then the
// second one has its path, too: medium messages go there, and whether its worker is awake decides who moves them.
std::vector<std::size_t> share_paths(std::size_t streams, std::size_t paths, std::size_t first, bool first_is_small);

}  // namespace bagua_net
