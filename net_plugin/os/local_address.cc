#include "os/local_address.h"

#include <arpa/inet.h>
#include <linux/if_addr.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/owned_fd.h"
#include "os/tcp_socket.h"

namespace bagua_net {
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

}  // namespace

bool is_of_this_host(const SocketAddress& address) {
  return address.is_loopback() || source_of(address).same_host(address);
}

bool leaves_elsewhere(const SocketAddress& to, const NetworkInterface& interface) {
  if (interface.is_loopback || to.family() != interface.address.family() || is_of_this_host(to)) return false;
  return !source_of(to).same_host(interface.address) && source_of(to, interface.address).length() != 0;
}

bool shares_subnet(const NetworkInterface& interface) {
  std::vector<InterfaceAddress> rows;
  return list_interface_addresses(&rows).is_ok() && std::any_of(rows.begin(), rows.end(), [&](const auto& row) {
           return row.name != interface.name && same_subnet(row, interface.address);
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
