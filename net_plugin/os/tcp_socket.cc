#include "os/tcp_socket.h"

#include <linux/sockios.h>
#include <linux/tcp.h>  // the whole tcp_info; <netinet/tcp.h> has the beginning
#include <netinet/in.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/log_sink.h"
#include "base/owned_fd.h"
#include "os/network_interface.h"
#include "os/zero_copy.h"

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

// Some sandboxes that stand in for the kernel do not know these options. Once per process.
void warn_of_keepalive(const Status& refused) {
  static std::atomic<bool> is_told{false};
  if (is_told.exchange(true)) return;
  BAGUA_NET_WARN("Bagua-Net: " + refused.message() +
                 ": going on without keepalive. A host that vanishes is noticed only while data is sent to it");
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

// IPv6's first second: the kernel asks whether another host has the address, and lets nobody bind to it meanwhile.
void allow_tentative(int socket, const SocketAddress& address) {
  const int on = 1;
  if (is_tentative(address)) ::setsockopt(socket, IPPROTO_IPV6, IPV6_FREEBIND, &on, sizeof on);
}

// A process without privileges may bind to a device since Linux 5.7. Otherwise the address alone chooses the device
// where the host routes by source.
bool bind_to_device(int socket, const std::string& name) {
  return ::setsockopt(socket, SOL_SOCKET, SO_BINDTODEVICE, name.c_str(), static_cast<socklen_t>(name.size() + 1)) == 0;
}

Status bind_to_interface(int socket, const NetworkInterface& interface) {
  bind_to_device(socket, current_name(interface));
  // The port is chosen by connect(), which knows the peer: without this a port would serve one peer only.
  const int on = 1;
  ::setsockopt(socket, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
  SocketAddress source = interface.address;
  source.set_port(0);
  if (::bind(socket, source.data(), source.length()) == 0) return Status::ok();
  return Status::system_error("bind to " + source.host() + " of " + interface.name, errno);
}

OwnedFd open_tcp_socket(int family) {
  OwnedFd socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  mark_uninherited(socket.get());
  return socket;
}

Status listen_on(int socket, const SocketAddress& address) {
  if (address.port() != 0) BAGUA_NET_RETURN_IF_ERROR(set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR"));
  allow_tentative(socket, address);
  if (::bind(socket, address.data(), address.length()) != 0) {
    return Status::system_error("bind to " + address.to_string(), errno);
  }
  if (::listen(socket, kListenBacklog) == 0) return Status::ok();
  return Status::system_error("listen on " + address.to_string(), errno);
}

}  // namespace

Status tcp_listen(SocketAddress* address, OwnedFd* socket) {
  OwnedFd listening = open_tcp_socket(address->family());
  if (!listening.is_open()) return Status::system_error("socket", errno);
  BAGUA_NET_RETURN_IF_ERROR(listen_on(listening.get(), *address));
  *address = local_address(listening.get());
  *socket = std::move(listening);
  return Status::ok();
}

Status tcp_listen(const NetworkInterface& interface, SocketAddress* address, OwnedFd* socket, OwnedFd* bound) {
  OwnedFd any = open_tcp_socket(address->family());
  OwnedFd own = open_tcp_socket(address->family());
  if (!any.is_open() || !own.is_open()) return Status::system_error("socket", errno);
  // Needed to bind and listen twice, and no longer: afterwards nobody else can, and the bound one is preferred.
  for (const OwnedFd* listening : {&any, &own}) {
    BAGUA_NET_RETURN_IF_ERROR(set_option(listening->get(), SOL_SOCKET, SO_REUSEPORT, 1, "SO_REUSEPORT"));
  }
  BAGUA_NET_RETURN_IF_ERROR(listen_on(any.get(), *address));
  *address = local_address(any.get());
  if (bind_to_device(own.get(), current_name(interface))) {
    BAGUA_NET_RETURN_IF_ERROR(listen_on(own.get(), *address));
    BAGUA_NET_RETURN_IF_ERROR(set_option(own.get(), SOL_SOCKET, SO_REUSEPORT, 0, "SO_REUSEPORT"));
    *bound = std::move(own);
  }
  BAGUA_NET_RETURN_IF_ERROR(set_option(any.get(), SOL_SOCKET, SO_REUSEPORT, 0, "SO_REUSEPORT"));
  *socket = std::move(any);
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
    mark_uninherited(fd);
    *peer = SocketAddress(reinterpret_cast<const sockaddr*>(&storage), length);
    return Status::ok();
  }
  switch (errno) {
    // Nobody is there, or nobody any more (accept(2), "Error handling").
    case EAGAIN:
    case EINTR:
    case ECONNABORTED:
    case EHOSTDOWN:
    case EHOSTUNREACH:
    case ENETDOWN:
    case ENETUNREACH:
    case ENONET:
    case ENOPROTOOPT:
    case EOPNOTSUPP:
    case EPROTO: return Status::ok();
    default: return Status::system_error("accept", errno);
  }
}

Status tcp_connect(const SocketAddress& address, const TcpOptions& options, const NetworkInterface* over,
                   OwnedFd* socket) {
  OwnedFd connecting = open_tcp_socket(address.family());
  if (!connecting.is_open()) return Status::system_error("socket", errno);
  // Before the connect: the receive buffer decides the window scale.
  BAGUA_NET_RETURN_IF_ERROR(apply_tcp_options(connecting.get(), options, address.is_loopback()));
  if (over != nullptr) BAGUA_NET_RETURN_IF_ERROR(bind_to_interface(connecting.get(), *over));
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

std::int64_t tcp_round_trip_us(int socket) {
  tcp_info info{};
  socklen_t length = sizeof info;
  const bool is_told = ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) == 0;
  return is_told ? std::min(info.tcpi_min_rtt, info.tcpi_rtt) : 0;
}

std::size_t tcp_undelivered_bytes(int socket) {
  int bytes = 0;
  return ::ioctl(socket, SIOCOUTQ, &bytes) == 0 && bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
}

std::size_t tcp_packet_bytes(int socket) {
  tcp_info info{};
  socklen_t length = sizeof info;
  return ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 ? info.tcpi_pmtu : 0;
}

Status apply_tcp_options(int socket, const TcpOptions& options, bool same_host) {
  BAGUA_NET_RETURN_IF_ERROR(set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1, "TCP_NODELAY"));
  if (options.keepalive_s > 0) {
    // A dead host is noticed after `keepalive_s`. With recovery, a sender that waits for an acknowledgement and has
    // nothing else under way learns from the first probes that a connection is silent, within a third of that time.
    const int idle_s = std::max(1, options.keepalive_s / 6);
    const int interval_s = std::max(1, options.keepalive_s / 18);
    const int probes = std::max(kMinKeepaliveProbes, (options.keepalive_s - idle_s) / interval_s);
    Status refused = set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1, "SO_KEEPALIVE");
    if (refused.is_ok()) refused = set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, idle_s, "TCP_KEEPIDLE");
    if (refused.is_ok()) refused = set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, interval_s, "TCP_KEEPINTVL");
    if (refused.is_ok()) refused = set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, probes, "TCP_KEEPCNT");
    if (!refused.is_ok()) warn_of_keepalive(refused);
  }
  set_if_known(socket, TCP_NOTSENT_LOWAT, same_host ? kUnsentBytesOfTheKernel : kUnsentBytes);
  if (!same_host) {  // and left so where a connection turns out to stay on the host: nothing is lost there
    set_if_known(socket, kTcpRtoMinUs, kMinRetransmissionTimeoutUs);
    set_if_known(socket, kTcpDelackMaxUs, kMaxAcknowledgementDelayUs);
  }
  if (options.zero_copy) allow_zero_copy_sends(socket, !same_host);
  if (options.buffer_bytes > 0) {
    const int bytes = static_cast<int>(options.buffer_bytes);
    BAGUA_NET_RETURN_IF_ERROR(set_option(socket, SOL_SOCKET, SO_SNDBUF, bytes, "SO_SNDBUF"));
    BAGUA_NET_RETURN_IF_ERROR(set_option(socket, SOL_SOCKET, SO_RCVBUF, bytes, "SO_RCVBUF"));
  }
  if (const char* name = congestion_control_name(options.congestion_control, same_host)) {
    const auto length = static_cast<socklen_t>(std::strlen(name));
    if (::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, length) != 0 &&
        options.congestion_control != CongestionControl::kAuto) {
      return Status::invalid_usage("BAGUA_NET_CONGESTION_CONTROL=" + std::string(name) +
                                   " is refused by this kernel (see sysctl net.ipv4.tcp_allowed_congestion_control)");
    }
  }
  return Status::ok();
}

Status limit_unanswered_writes(int socket, int limit_ms) {
  return set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, limit_ms, "TCP_USER_TIMEOUT");
}

void probe_idle_peer(int socket) {
  // Whoever watches decides sooner than so many probes.
  constexpr int kProbes = 127;
  const int on = 1;
  [[maybe_unused]] const int ignored = ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  set_if_known(socket, TCP_KEEPCNT, kProbes);
  set_if_known(socket, TCP_KEEPINTVL, 1);
  set_if_known(socket, TCP_KEEPIDLE, 1);  // the last, because it sets the timer
}

SocketAddress remote_address(int socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return {};
  return {reinterpret_cast<const sockaddr*>(&storage), length};
}

SocketAddress local_address(int socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&storage), &length) != 0) return {};
  return {reinterpret_cast<const sockaddr*>(&storage), length};
}

}  // namespace bagua_net
