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

// Network interfaces of this host, chosen by NCCL's own rules (NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY,
// NCCL_COMM_ID), with what NCCL wants to know of each: speed, PCI path, NUMA node.
struct NetworkInterface {
  std::string name;       // "eth0", when it was chosen
  SocketAddress address;  // first address of the family wanted; port 0; an IPv6 link-local one with its scope
  int speed_mbps = 0;     // 0 = unknown (os/sysfs.h)
  int numa_node = -1;     // -1 = unknown
  std::string pci_path;   // real path in sysfs, "" for virtual devices
  bool is_loopback = false;
  unsigned index = 0;  // the kernel's, which it keeps when it is renamed; 0 = unknown
};
// Of the same interface now, which may have been renamed, or removed and made again by its name. 0, or `name`: it is
// gone.
unsigned current_index(const NetworkInterface& interface);
std::string current_name(const NetworkInterface& interface);

// Why an interface is used or not, for `bagua-net doctor` and the start-up log.
struct InterfaceChoice {
  NetworkInterface interface;
  bool used = false;
  std::string reason;  // "matches NCCL_SOCKET_IFNAME=eth", "skipped: NCCL prefers eth0", ...
};

// Every interface with a verdict, the used ones first, in the order in which they become devices. An error when
// nothing can be used: it names the filter's value and the interfaces that exist, and *choices is filled all the same.
Status choose_network_interfaces(const EnvironmentReader& environment, std::vector<InterfaceChoice>* choices,
                                 const std::string& sysfs_root = "/sys");

// What the kernel has, in its order.
Status list_interface_addresses(std::vector<InterfaceAddress>* rows);

// What the kernel says of this host's addresses and of the way from it to another. Nothing is sent.

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
