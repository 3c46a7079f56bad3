#include "os/tcp_socket.h"

#include <netinet/tcp.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace bagua_net {
namespace {

constexpr int kListenBacklog = 4096;  // the kernel cuts it to net.core.somaxconn
constexpr int kMinKeepaliveProbes = 3;

// What a connection between hosts may hold unsent before it takes no more bytes. The kernel's own limit is megabytes: a
// slow connection would swallow whole messages and keep them, while its faster siblings have nothing to do. What is on
// its way is not counted, so this does not bound the rate; it has to last until the next write.
constexpr int kUnsentBytes = 128 << 10;
constexpr int kUnsentBytesOfTheKernel = 0;  // net.ipv4.tcp_notsent_lowat

// How long the kernel waits at least before it sends again what was lost with all that followed it: 200 ms unless told
// otherwise, which is what a burst costs that several senders lose in a switch's buffer. The receiver acknowledges
// sooner than that, so that nothing is sent twice. Known to Linux 6.15 and later; not yet to <netinet/tcp.h>.
constexpr int kTcpRtoMinUs = 45;
constexpr int kTcpDelackMaxUs = 46;
constexpr int kMinRetransmissionTimeoutUs = 40000;
constexpr int kMaxAcknowledgementDelayUs = 20000;

Status set_option(int socket, int level, int option, int value, const char* name) {
  if (::setsockopt(socket, level, option, &value, sizeof value) != 0) {
    return Status::system_error(std::string("setsockopt ") + name + "=" + std::to_string(value), errno);
  }
  return Status::ok();
}

// A matter of speed only: connections work where an older kernel, or a sandbox in its place, does not know the option.
void set_if_known(int socket, int option, int value) {
  [[maybe_unused]] const int ignored = ::setsockopt(socket, IPPROTO_TCP, option, &value, sizeof value);
}

const char* congestion_control_name(CongestionControl choice, bool same_host) {
  switch (choice) {
    // Between two processes of one host there is no path to probe: bbr's pacing timers only cost CPU there
    // (2.8 against 4.8 GB/s on two cores). On real paths the administrator's choice stands.
    case CongestionControl::kAuto: return same_host ? "cubic" : nullptr;
    case CongestionControl::kSystem: return nullptr;
    case CongestionControl::kCubic: return "cubic";
    case CongestionControl::kReno: return "reno";
    case CongestionControl::kBbr: return "bbr";
  }
  return nullptr;
}

}  // namespace

Status tcp_listen(SocketAddress* address, OwnedFd* socket) {
  OwnedFd listening(::socket(address->family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!listening.is_open()) return Status::system_error("socket", errno);
  if (address->port() != 0) {
    BAGUA_NET_RETURN_IF_ERROR(set_option(listening.get(), SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR"));
  }
  if (::bind(listening.get(), address->data(), address->length()) != 0) {
    return Status::system_error("bind to " + address->to_string(), errno);
  }
  if (::listen(listening.get(), kListenBacklog) != 0) {
    return Status::system_error("listen on " + address->to_string(), errno);
  }
  *address = local_address(listening.get());
  *socket = std::move(listening);
  return Status::ok();
}

Status tcp_accept(int listening_socket, OwnedFd* socket, SocketAddress* peer) {
  socket->reset();
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  const int fd =
      ::accept4(listening_socket, reinterpret_cast<sockaddr*>(&storage), &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd >= 0) {
    *socket = OwnedFd(fd);
    *peer = SocketAddress(reinterpret_cast<const sockaddr*>(&storage), length);
    return Status::ok();
  }
  switch (errno) {
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM: return Status::system_error("accept", errno);
    default: return Status::ok();
  }
}

Status tcp_connect(const SocketAddress& address, const TcpOptions& options, OwnedFd* socket) {
  OwnedFd connecting(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!connecting.is_open()) return Status::system_error("socket", errno);
  // Before the connect: the receive buffer decides the window scale.
  BAGUA_NET_RETURN_IF_ERROR(apply_tcp_options(connecting.get(), options, address.is_loopback()));
  if (::connect(connecting.get(), address.data(), address.length()) != 0 && errno != EINPROGRESS && errno != EINTR) {
    return Status::system_error("connect to " + address.to_string(), errno);
  }
  *socket = std::move(connecting);
  return Status::ok();
}

int tcp_connect_result(int socket) {
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

Status apply_tcp_options(int socket, const TcpOptions& options, bool same_host) {
  BAGUA_NET_RETURN_IF_ERROR(set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY"));
  if (options.keepalive_s > 0) {
    // A dead host is noticed after `keepalive_s`. With recovery, a sender that waits for an acknowledgement and has
    // nothing else under way learns from the first probes that a connection is silent, within a third of that time.
    const int idle_s = std::max(1, options.keepalive_s / 6);
    const int interval_s = std::max(1, options.keepalive_s / 18);
    const int probes = std::max(kMinKeepaliveProbes, (options.keepalive_s - idle_s) / interval_s);
    BAGUA_NET_RETURN_IF_ERROR(set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE"));
    BAGUA_NET_RETURN_IF_ERROR(set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, idle_s, "TCP_KEEPIDLE"));
    BAGUA_NET_RETURN_IF_ERROR(set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, interval_s, "TCP_KEEPINTVL"));
    BAGUA_NET_RETURN_IF_ERROR(set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, probes, "TCP_KEEPCNT"));
  }
  set_if_known(socket, TCP_NOTSENT_LOWAT, same_host ? kUnsentBytesOfTheKernel : kUnsentBytes);
  if (!same_host) {  // and left so where a connection turns out to stay on the host: nothing is lost there
    set_if_known(socket, kTcpRtoMinUs, kMinRetransmissionTimeoutUs);
    set_if_known(socket, kTcpDelackMaxUs, kMaxAcknowledgementDelayUs);
  }
  if (options.buffer_bytes > 0) {
    const int bytes = static_cast<int>(options.buffer_bytes);
    BAGUA_NET_RETURN_IF_ERROR(set_option(socket, SOL_SOCKET, SO_SNDBUF, bytes, "SO_SNDBUF"));
    BAGUA_NET_RETURN_IF_ERROR(set_option(socket, SOL_SOCKET, SO_RCVBUF, bytes, "SO_RCVBUF"));
  }
  if (const char* name = congestion_control_name(options.congestion_control, same_host)) {
    const auto length = static_cast<socklen_t>(std::strlen(name));
    if (::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, length) != 0 &&
        options.congestion_control != CongestionControl::kAuto) {
      return Status::system_error("BAGUA_NET_CONGESTION_CONTROL=" + std::string(name) +
                                      " is refused by this kernel (see sysctl "
                                      "net.ipv4.tcp_allowed_congestion_control)",
                                  errno);
    }
  }
  return Status::ok();
}

Status limit_unanswered_writes(int socket, int limit_ms) {
  return set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, limit_ms, "TCP_USER_TIMEOUT");
}

SocketAddress local_address(int socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return {};
  return {reinterpret_cast<const sockaddr*>(&storage), length};
}

}  // namespace bagua_net
