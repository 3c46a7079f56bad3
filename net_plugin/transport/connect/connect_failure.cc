#include "transport/connect/connect_failure.h"

#include <sys/socket.h>

#include <cerrno>

#include "os/local_address.h"

namespace bagua_net {
namespace {

constexpr char kSeeItsLog[] = "See that rank's log";

std::string answered_cause(const ConnectFailure& failure) {
  if (!failure.refusal.empty()) {
    return failure.refusal +
           ", which nothing proves to come from that rank.\nIt may have ended, and another program "
           "have its port. " +
           kSeeItsLog;
  }
  if (failure.error_number == ETIMEDOUT) {
    return std::string(
               "it accepts connections, and says nothing on them.\nThat rank is stopped or overloaded, or "
               "another program has its port. ") +
           kSeeItsLog;
  }
  return std::string(
             "it closes connections during the handshake.\nThat rank may open too few files (ulimit -n), or "
             "another program has its port. ") +
         kSeeItsLog;
}

std::string error_cause(const ConnectFailure& failure, const std::string& from, const NetworkInterface& interface) {
  const int error = failure.error_number;
  switch (error) {
    case EMFILE:
    case ENFILE: return "this process has no free file descriptor.\nRaise the limit of open files (ulimit -n)";
    case ENOBUFS:
    case ENOMEM:
    case ENOSPC:
      return "this host has no memory for another socket.\nFree memory, or raise fs.epoll.max_user_watches and "
             "net.ipv4.tcp_mem";
    case EADDRINUSE:
    case EADDRNOTAVAIL:
      if (is_tentative(interface.address)) {
        return from + " is still being checked for duplicates.\nLook for another host with this address (ip -6 addr)";
      }
      return "no local port or address is left for it on " + from +
             ".\nWiden net.ipv4.ip_local_port_range, or use fewer connections (BAGUA_NET_NSTREAMS); check that the "
             "interface still has its address";
    case ENETUNREACH:
    case EHOSTUNREACH:
    case ENETDOWN:
    case ENODEV:
    case EINVAL:
      return "there is no way to it from " + from + " (" + Status::system_error("", error).message().substr(2) +
             ").\nThe two ranks use interfaces of different networks, or that host or the link to it is down: check "
             "NCCL_SOCKET_IFNAME on both, and the routes";
    case EACCES:
    case EPERM:
      return "a firewall or a route forbids it.\nAllow TCP between the hosts, to all ports of "
             "net.ipv4.ip_local_port_range";
    case ECONNREFUSED:
      return std::string("nobody listens there.\nThat rank has ended, or a firewall rejects the connection. ") +
             kSeeItsLog;
    case 0:
    case ETIMEDOUT:
      return "no answer to " + from +
             ".\nA firewall drops the packets, that host is down, or the two ranks use interfaces of different "
             "networks: check NCCL_SOCKET_IFNAME on both";
    default: return Status::system_error("from " + from, error).message() + ".\n" + kSeeItsLog;
  }
}

std::string cause_of(const ConnectFailure& failure, const SocketAddress& peer, const NetworkInterface& interface) {
  const std::string from = interface.name + " (" + interface.address.host() + ")";
  const bool is_shortage = failure.error_number == EMFILE || failure.error_number == ENFILE;
  const bool is_silent = failure.answered && failure.refusal.empty();
  // A process that listens at such an address is not necessarily that rank.
  if (is_of_this_host(peer) && !is_silent && !is_shortage) {
    return "that is an address of this host itself" + (failure.refusal.empty() ? "" : ", and " + failure.refusal) +
           ".\nIf that rank runs elsewhere, it uses an interface whose address "
           "every host has, such as lo or docker0: set NCCL_SOCKET_IFNAME there. Otherwise it has ended; see its log";
  }
  if (peer.family() != interface.address.family() && !failure.answered && !is_shortage) {
    const bool is_ipv6 = peer.is_ipv6();
    return std::string("that rank uses ") + (is_ipv6 ? "IPv6" : "IPv4") + ", this one " + (is_ipv6 ? "IPv4" : "IPv6") +
           " on " + from + ".\nSet NCCL_SOCKET_FAMILY alike on every rank (AF_INET or AF_INET6)";
  }
  return failure.answered ? answered_cause(failure) : error_cause(failure, from, interface);
}

}  // namespace

bool may_pass(int error_number) {
  switch (error_number) {
    case EAFNOSUPPORT:  // no such family in this kernel
    case EPROTONOSUPPORT:
    case EBADF:
    case EFAULT:
    case ENOTSOCK: return false;
    default: return error_number != 0;
  }
}

Status deadline_error(const ConnectFailure& failure, const NicPath& path, int timeout_ms, const char* setting) {
  return Status::remote_error("could not connect to " + path.address.to_string() + " within " +
                              std::to_string(timeout_ms) + " ms: " + cause_of(failure, path.address, path.interface) +
                              ". " + setting + " sets the deadline");
}

}  // namespace bagua_net
