#include "os/socket_address.h"

#include <arpa/inet.h>
#include <net/if.h>

#include <cstring>

namespace bagua_net {
SocketAddress::SocketAddress(const sockaddr* address, socklen_t length) {
  std::memcpy(&storage_, address, length < sizeof storage_ ? length : sizeof storage_);
}

SocketAddress::SocketAddress(int family, const Bytes& bytes, std::uint16_t port, std::uint32_t scope) {
  storage_.ss_family = static_cast<sa_family_t>(family);
  if (is_ipv4()) std::memcpy(&reinterpret_cast<sockaddr_in&>(storage_).sin_addr, bytes.data(), sizeof(in_addr));
  if (is_ipv6()) {
    std::memcpy(&reinterpret_cast<sockaddr_in6&>(storage_).sin6_addr, bytes.data(), sizeof(in6_addr));
    reinterpret_cast<sockaddr_in6&>(storage_).sin6_scope_id = scope;
  }
  set_port(port);
}

SocketAddress::Bytes SocketAddress::bytes() const {
  Bytes bytes{};
  if (is_ipv4()) std::memcpy(bytes.data(), &ipv4().sin_addr, sizeof(in_addr));
  if (is_ipv6()) std::memcpy(bytes.data(), &ipv6().sin6_addr, sizeof(in6_addr));
  return bytes;
}

std::uint16_t SocketAddress::port() const {
  if (is_ipv4()) return ntohs(ipv4().sin_port);
  if (is_ipv6()) return ntohs(ipv6().sin6_port);
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
  if (is_ipv4()) return bytes()[0] == 127;
  if (is_ipv6()) return IN6_IS_ADDR_LOOPBACK(&ipv6().sin6_addr);
  return false;
}

bool SocketAddress::same_host(const SocketAddress& other) const {
  return length() != 0 && family() == other.family() && bytes() == other.bytes();
}

std::string SocketAddress::host() const {
  if (length() == 0) return "no address";
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(family(), bytes().data(), text, sizeof text);
  if (scope() == 0) return text;
  char interface[IF_NAMESIZE];
  return text + std::string("%") + (if_indextoname(scope(), interface) ? interface : std::to_string(scope()));
}

std::string SocketAddress::to_string() const {
  if (is_ipv6()) return "[" + host() + "]:" + std::to_string(port());
  return host() + ":" + std::to_string(port());
}

}  // namespace bagua_net
