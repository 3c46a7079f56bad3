#include "os/network_interface.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/if_addr.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/owned_fd.h"
#include "os/sysfs.h"
#include "os/tcp_socket.h"

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

namespace {

// Of a packet to there; no address: there is no route. UDP says so without sending anything. from: bound to it, which
// counts where the host routes by source.
SocketAddress source_of(SocketAddress to, const SocketAddress& from = {}) {
  const OwnedFd probe(::socket(to.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (to.port() == 0) to.set_port(9);
  if (!probe.is_open() || (from.length() != 0 && ::bind(probe.get(), from.data(), from.length()) != 0) ||
      ::connect(probe.get(), to.data(), to.length()) != 0)
    return {};
  return local_address(probe.get());
}

constexpr std::size_t kAddressAttributeBytes = RTA_SPACE(sizeof(in6_addr));
// RTM_GETROUTE for packets from one address to another over one interface.
struct RouteRequest {
  nlmsghdr header{};
  rtmsg route{};
  char attributes[2 * kAddressAttributeBytes + RTA_SPACE(sizeof(int))] = {};

  void add(unsigned short type, const void* value, std::size_t bytes) {
    rtattr attribute{};
    attribute.rta_type = type;
    attribute.rta_len = static_cast<unsigned short>(RTA_LENGTH(bytes));
    char* const next = reinterpret_cast<char*>(this) + header.nlmsg_len;
    std::memcpy(next, &attribute, sizeof attribute);
    std::memcpy(next + sizeof attribute, value, bytes);
    header.nlmsg_len += static_cast<unsigned>(RTA_SPACE(bytes));
  }
};
struct RouteAnswer {
  nlmsghdr header;
  union {
    rtmsg route;
    nlmsgerr error;
  };
};

RouteRequest route_request(const SocketAddress& to, const SocketAddress& from, int interface) {
  RouteRequest request;
  const std::size_t bytes = to.is_ipv6() ? sizeof(in6_addr) : sizeof(in_addr);
  request.header.nlmsg_len = offsetof(RouteRequest, attributes);
  request.header.nlmsg_type = RTM_GETROUTE;
  request.header.nlmsg_flags = NLM_F_REQUEST;
  request.route.rtm_family = static_cast<unsigned char>(to.family());
  request.route.rtm_dst_len = request.route.rtm_src_len = static_cast<unsigned char>(8 * bytes);
  request.route.rtm_flags = RTM_F_FIB_MATCH;  // an entry of the routing table, not what would be done without one
  request.add(RTA_DST, to.bytes().data(), bytes);
  request.add(RTA_SRC, from.bytes().data(), bytes);
  request.add(RTA_OIF, &interface, sizeof interface);
  return request;
}

}  // namespace

bool is_of_this_host(const SocketAddress& address) {
  return address.is_loopback() || source_of(address).same_host(address);
}

bool leaves_elsewhere(const SocketAddress& to, const NetworkInterface& interface) {
  if (interface.is_loopback || to.family() != interface.address.family() || is_of_this_host(to)) return false;
  return !source_of(to).same_host(interface.address) && source_of(to, interface.address).length() != 0;
}

bool has_route_over(const SocketAddress& to, const NetworkInterface& interface) {
  const int index = static_cast<int>(current_index(interface));
  if (index == 0) return false;
  const OwnedFd kernel(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE));
  if (!kernel.is_open()) return true;
  const RouteRequest request = route_request(to, interface.address, index);
  alignas(RouteAnswer) char bytes[4096];
  RouteAnswer answer;
  // The kernel answers within send().
  if (::send(kernel.get(), &request, request.header.nlmsg_len, 0) < 0 ||
      ::recv(kernel.get(), bytes, sizeof bytes, MSG_DONTWAIT) < static_cast<ssize_t>(sizeof answer)) {
    return true;
  }
  std::memcpy(&answer, bytes, sizeof answer);
  if (answer.header.nlmsg_type == RTM_NEWROUTE) {
    return answer.route.rtm_type == RTN_UNICAST || answer.route.rtm_type == RTN_LOCAL;
  }
  // EINVAL: of a blackhole, or this host has lost its address.
  const int error = answer.header.nlmsg_type == NLMSG_ERROR ? -answer.error.error : 0;
  return error != ENETUNREACH && error != EHOSTUNREACH && error != EACCES && error != EINVAL && error != ENODEV;
}

bool shares_subnet(const NetworkInterface& interface) {
  std::vector<InterfaceAddress> rows;
  return list_interface_addresses(&rows).is_ok() && std::any_of(rows.begin(), rows.end(), [&](const auto& row) {
           return row.name != current_name(interface) && same_subnet(row, interface.address);
         });
}

bool is_tentative(const SocketAddress& address) {
  if (!address.is_ipv6()) return false;
  std::string wanted;
  for (const std::uint8_t byte : address.bytes()) {
    char text[3];
    std::snprintf(text, sizeof text, "%02x", byte);
    wanted += text;
  }
  // A line for each address: 32 digits, then index, prefix length, scope and flags, then the interface.
  std::ifstream addresses("/proc/net/if_inet6");
  for (std::string line; std::getline(addresses, line);) {
    std::istringstream fields(line);
    std::string digits;
    unsigned index = 0;
    unsigned prefix = 0;
    unsigned scope = 0;
    unsigned flags = 0;
    if (fields >> digits >> std::hex >> index >> prefix >> scope >> flags && digits == wanted &&
        (flags & IFA_F_TENTATIVE) != 0) {
      return true;
    }
  }
  return false;
}

}  // namespace bagua_net
