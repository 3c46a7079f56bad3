#include "os/network_interface.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <utility>

#include "os/sysfs.h"

namespace bagua_net {
namespace {

SocketAddress ip_address(const sockaddr* address) {
  if (address == nullptr) return {};
  if (address->sa_family == AF_INET) return {address, sizeof(sockaddr_in)};
  if (address->sa_family == AF_INET6) return {address, sizeof(sockaddr_in6)};
  return {};
}

}  // namespace

unsigned current_index(const NetworkInterface& interface) {
  char name[IF_NAMESIZE];
  if (interface.index != 0 && ::if_indextoname(interface.index, name) != nullptr) return interface.index;
  return ::if_nametoindex(interface.name.c_str());
}

std::string current_name(const NetworkInterface& interface) {
  char name[IF_NAMESIZE];
  return interface.index != 0 && ::if_indextoname(interface.index, name) != nullptr ? name : interface.name;
}

Status list_interface_addresses(std::vector<InterfaceAddress>* rows) {
  rows->clear();
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return Status::system_error("getifaddrs (listing the network interfaces)", errno);
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(first, ::freeifaddrs);
  for (const ifaddrs* row = first; row != nullptr; row = row->ifa_next) {
    // A second IPv4 address may have a label, such as "eth0:1", and is one more of the same interface.
    std::string name = row->ifa_name;
    name.resize(std::min(name.find(':'), name.size()));
    rows->push_back({std::move(name), row->ifa_flags, ip_address(row->ifa_addr), ip_address(row->ifa_netmask)});
  }
  return Status::ok();
}

Status choose_network_interfaces(const EnvironmentReader& environment, std::vector<InterfaceChoice>* choices,
                                 const std::string& sysfs_root) {
  choices->clear();
  std::vector<InterfaceAddress> rows;
  BAGUA_NET_RETURN_IF_ERROR(list_interface_addresses(&rows));
  std::vector<InterfaceVerdict> verdicts;
  const Status selected = select_interfaces(rows, environment, &verdicts);
  for (InterfaceVerdict& verdict : verdicts) {
    NetworkInterface interface;
    interface.name = verdict.name;
    interface.address = verdict.address;
    interface.address.set_port(0);
    interface.speed_mbps = interface_speed_mbps(sysfs_root, verdict.name);
    interface.numa_node = interface_numa_node(sysfs_root, verdict.name);
    interface.pci_path = interface_pci_path(sysfs_root, verdict.name);
    interface.is_loopback = verdict.address.is_loopback();
    interface.index = ::if_nametoindex(verdict.name.c_str());
    choices->push_back({std::move(interface), verdict.used, std::move(verdict.reason)});
  }
  return selected;
}

}  // namespace bagua_net
