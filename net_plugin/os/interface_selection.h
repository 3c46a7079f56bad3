// Which network interfaces are used: NCCL's own rules as a pure function over a list of addresses, so that every
// machine can be made up in a test. No system call but the name lookup of an NCCL_COMM_ID that names a host.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "base/text_parsing.h"
#include "os/socket_address.h"

namespace bagua_net {

// One row of getifaddrs. An interface has a row per address, and one without an address if it has none.
struct InterfaceAddress {
  std::string name;
  unsigned flags = 0;     // IFF_*
  SocketAddress address;  // AF_UNSPEC: not an IPv4 or IPv6 row
  SocketAddress netmask;  // AF_UNSPEC: none
};

bool same_subnet(const InterfaceAddress& row, const SocketAddress& other);

struct InterfaceVerdict {
  std::string name;
  SocketAddress address;  // the one that is used, else the first that the interface has
  bool used = false;
  std::string reason;
};

// Reads NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY and NCCL_COMM_ID and gives every interface a verdict: the used ones
// first, in the order in which they become devices. The verdicts are filled even when the outcome is the error that
// nothing can be used.
Status select_interfaces(const std::vector<InterfaceAddress>& rows, const EnvironmentReader& environment,
                         std::vector<InterfaceVerdict>* verdicts);

}  // namespace bagua_net
