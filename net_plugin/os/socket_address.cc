#include "os/socket_address.h"

#include <arpa/inet.h>
#include <net/if.h>

#include <cstring>

namespace bagua_net {
namespace {

const sockaddr_in& as_ipv4(const sockaddr_storage& storage) { return reinterpret_cast<const sockaddr_in&>(storage); }
const sockaddr_in6& as_ipv6(const sockaddr_storage& storage) { return reinterpret_cast<const sockaddr_in6&>(storage); }

}  // namespace

SocketAddress::SocketAddress(const sockaddr* address, socklen_t length) {
  std::memcpy(&storage_, address, length < sizeof storage_ ? length : sizeof storage_);
}

std::uint16_t SocketAddress::port() const {
  if (is_ipv4()) return ntohs(as_ipv4(storage_).sin_port);
  if (is_ipv6()) return ntohs(as_ipv6(storage_).sin6_port);
  return 0;
}

void SocketAddress::set_port(std::uint16_t port) {
  if (is_ipv4()) reinterpret_cast<sockaddr_in&>(storage_).sin_port = htons(port);
  if (is_ipv6()) reinterpret_cast<sockaddr_in6&>(storage_).sin6_port = htons(port);
}

socklen_t SocketAddress::length() const {
  if (is_ipv4()) return sizeof(sockaddr_in);
  if (is_ipv6()) return sizeof(sockaddr_in6);
  return 0;
}

bool SocketAddress::is_loopback() const {
  if (is_ipv4()) return (ntohl(as_ipv4(storage_).sin_addr.s_addr) >> 24) == 127;
  if (is_ipv6()) return IN6_IS_ADDR_LOOPBACK(&as_ipv6(storage_).sin6_addr);
  return false;
}

bool SocketAddress::same_host(const SocketAddress& other) const {
  if (family() != other.family()) return false;
  if (is_ipv4()) return as_ipv4(storage_).sin_addr.s_addr == as_ipv4(other.storage_).sin_addr.s_addr;
  if (is_ipv6()) {
    return std::memcmp(&as_ipv6(storage_).sin6_addr, &as_ipv6(other.storage_).sin6_addr, sizeof(in6_addr)) == 0;
  }
  return false;
}

std::string SocketAddress::host() const {
  char text[INET6_ADDRSTRLEN] = "";
  if (is_ipv4()) {
    inet_ntop(AF_INET, &as_ipv4(storage_).sin_addr, text, sizeof text);
    return text;
  }
  if (is_ipv6()) {
    inet_ntop(AF_INET6, &as_ipv6(storage_).sin6_addr, text, sizeof text);
    std::string host = text;
    char interface[IF_NAMESIZE];
    const unsigned scope = as_ipv6(storage_).sin6_scope_id;
    if (scope != 0) host += std::string("%") + (if_indextoname(scope, interface) ? interface : std::to_string(scope));
    return host;
  }
  return "no address";
}

std::string SocketAddress::to_string() const {
  if (is_ipv6()) return "[" + host() + "]:" + std::to_string(port());
  return host() + ":" + std::to_string(port());
}

}  // namespace bagua_net
