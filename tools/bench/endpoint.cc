#include "bench/endpoint.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "bench/command_line.h"

namespace bagua_net::bench {
namespace {

// As NCCL: as many ranks as like may connect at once.
constexpr int kBacklog = 16384;

}  // namespace

Status parse_endpoint(const std::string& name, const std::string& text, SocketAddress* address) {
  std::string host = text;
  std::string port;
  if (!text.empty() && text[0] == '[') {
    const std::size_t bracket = text.find(']');
    if (bracket == std::string::npos) {
      return Status::invalid_argument(name + " is \"" + text + "\": the ] behind the IPv6 address is missing");
    }
    host = text.substr(1, bracket - 1);
    if (bracket + 1 < text.size()) port = text.substr(bracket + 1);
  } else if (std::count(text.begin(), text.end(), ':') == 1) {  // more than one: an IPv6 address alone
    host = text.substr(0, text.find(':'));
    port = text.substr(text.find(':'));
  }
  std::int64_t port_number = 0;
  if (!port.empty()) {
    if (port[0] != ':') {
      return Status::invalid_argument(name + " is \"" + text + "\", but is written HOST, HOST:PORT or [IPV6]:PORT");
    }
    BAGUA_NET_RETURN_IF_ERROR(
        parse_integer("the port of " + name + " \"" + text + "\"", port.substr(1), 0, 65535, &port_number));
  }
  if (host.empty()) return Status::invalid_argument(name + " is \"" + text + "\": the host is missing");

  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int failure = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (failure != 0) {
    return Status::invalid_argument(name + " is \"" + text + "\": cannot resolve \"" + host +
                                    "\": " + gai_strerror(failure));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  *address = SocketAddress(found->ai_addr, found->ai_addrlen);
  address->set_port(static_cast<std::uint16_t>(port_number));
  return Status::ok();
}

Status listen_on(const SocketAddress& address, OwnedFd* listener, SocketAddress* bound) {
  OwnedFd fd(socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.is_open()) return Status::system_error("socket for " + address.to_string(), errno);
  // A port that the kernel still keeps from an earlier run is no reason to refuse; a listener on it is.
  const int on = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd.get(), address.data(), address.length()) != 0 || listen(fd.get(), kBacklog) != 0) {
    const int error = errno;
    Status status = Status::system_error("cannot listen on " + address.to_string(), error);
    if (error == EADDRINUSE) {
      return Status::invalid_usage(status.message() +
                                   ": another process listens on that port; take another one, or leave it out");
    }
    if (error == EADDRNOTAVAIL) {
      return Status::invalid_usage(status.message() + ": no interface of this host has that address");
    }
    return status;
  }
  socklen_t length = sizeof(sockaddr_storage);
  sockaddr_storage storage{};
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&storage), &length) != 0) {
    return Status::system_error("getsockname of " + address.to_string(), errno);
  }
  *bound = SocketAddress(reinterpret_cast<const sockaddr*>(&storage), length);
  *listener = std::move(fd);
  return Status::ok();
}

Status set_no_delay(int socket) {
  const int on = 1;
  if (setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) {
    return Status::system_error("setsockopt TCP_NODELAY", errno);
  }
  return Status::ok();
}

}  // namespace bagua_net::bench
