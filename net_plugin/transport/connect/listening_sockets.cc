#include "transport/connect/listening_sockets.h"

#include <algorithm>
#include <cerrno>
#include <limits>

#include "os/network_interface.h"
#include "os/tcp_socket.h"
#include "transport/connect/nic_paths.h"

namespace bagua_net {
namespace {

const char* listen_remedy(const Status& status) {
  switch (status.error_number()) {
    case EADDRNOTAVAIL:
    case ENODEV:
      return " (it has lost this address since the job began: bring it up again, or choose another with "
             "NCCL_SOCKET_IFNAME)";
    case EMFILE:
    case ENFILE: return " (too many open files: raise the limit, ulimit -n)";
    default: return "";
  }
}

const char* accept_remedy(const Status& status) {
  switch (status.error_number()) {
    case EACCES:
    case EPERM:
    case ENOSYS:
      return ". If this persists, a security policy (SELinux, AppArmor, seccomp) forbids it, and no peer can connect "
             "to this rank";
    default: return "; raise the limit of open files (ulimit -n) if this persists";
  }
}

}  // namespace

std::vector<HandleAddress> put_addresses(const std::vector<const ListeningSocket*>& sockets, ConnectHandle* handle) {
  put_address(sockets.front()->address, handle);
  std::vector<HandleAddress> unnamed;
  for (std::size_t index = 1; index < std::min(sockets.size(), kMaxAddresses); ++index) {
    const bool is_named = index < max_handle_addresses(handle->address_family);
    (is_named ? handle->further : unnamed).push_back({sockets[index]->address.bytes(), sockets[index]->address.port()});
  }
  handle->unnamed = unnamed.size();
  return unnamed;
}

Status ListeningSockets::open(const NetworkInterface& interface, const ListeningSocket** listening) {
  const auto found = sockets_.find(interface.name);
  if (found != sockets_.end()) {
    *listening = &found->second;
    return Status::ok();
  }
  ListeningSocket opened;
  opened.interface = interface.name;
  opened.address = interface.address;
  opened.address.set_port(0);
  const Status status = shares_subnet(interface) ? tcp_listen(interface, &opened.address, &opened.socket, &opened.bound)
                                                 : tcp_listen(&opened.address, &opened.socket);
  if (!status.is_ok()) return status.with_context("listening on interface " + interface.name + listen_remedy(status));
  opened.id = loop_->next_id++;
  BAGUA_NET_RETURN_IF_ERROR(watch(opened));
  *listening = &sockets_.emplace(interface.name, std::move(opened)).first->second;
  return Status::ok();
}

Status ListeningSockets::open_all(const std::vector<NetworkInterface>& interfaces,
                                  std::vector<const ListeningSocket*>* listening) {
  listening->clear();
  Status first_failure;
  for (const NetworkInterface& interface : interfaces) {
    const ListeningSocket* opened = nullptr;
    const Status status = open(interface, &opened);
    if (status.is_ok()) {
      listening->push_back(opened);
      continue;
    }
    if (first_failure.is_ok()) first_failure = status;
    if (interfaces.size() == 1) break;
    loop_->log.add_if_due(LogLevel::kWarn, "listen " + interface.name, [&] {
      return "Bagua-Net: peers cannot use " + interface.name +
             ", and the other interfaces carry its share: " + status.message();
    });
  }
  return listening->empty() ? first_failure : Status::ok();
}

void ListeningSockets::close_all() { sockets_.clear(); }

ListeningSocket* ListeningSockets::find(std::uint64_t id) {
  const auto found =
      std::find_if(sockets_.begin(), sockets_.end(), [id](const auto& entry) { return entry.second.id == id; });
  return found == sockets_.end() ? nullptr : &found->second;
}

Status ListeningSockets::watch(const ListeningSocket& listening) {
  Status status = loop_->poller->add(listening.socket.get(), listening.id, EPOLLIN);
  if (status.is_ok() && listening.bound.is_open())
    status = loop_->poller->add(listening.bound.get(), listening.id, EPOLLIN);
  // Both or none: it is called again after a failure.
  if (!status.is_ok()) unwatch(listening);
  return status;
}

void ListeningSockets::unwatch(const ListeningSocket& listening) {
  for (const OwnedFd* each : {&listening.socket, &listening.bound}) loop_->poller->remove(each->get());
}

bool ListeningSockets::accept(ListeningSocket& listening, OwnedFd* socket, SocketAddress* from) {
  Status status;
  socket->reset();
  if (listening.bound.is_open()) status = tcp_accept(listening.bound.get(), socket, from);
  if (status.is_ok() && !socket->is_open()) status = tcp_accept(listening.socket.get(), socket, from);
  if (status.is_ok()) return socket->is_open();
  // A level-triggered listener would spin. Pause it, and say so.
  loop_->log.add_if_due(LogLevel::kWarn, "accept", [&] {
    return "Bagua-Net: " + status.message() + " on " + listening.address.to_string() + ": trying again" +
           accept_remedy(status);
  });
  unwatch(listening);
  listening.paused_until_ms = loop_->now_ms() + kAcceptRetryMs;
  return false;
}

void ListeningSockets::expire(std::int64_t now_ms) {
  for (auto& [name, listening] : sockets_) {
    if (listening.paused_until_ms == 0 || now_ms < listening.paused_until_ms) continue;
    listening.paused_until_ms = 0;
    if (!watch(listening).is_ok()) listening.paused_until_ms = now_ms + kAcceptRetryMs;
  }
}

std::int64_t ListeningSockets::next_deadline_ms() const {
  std::int64_t deadline = std::numeric_limits<std::int64_t>::max();
  for (const auto& [name, listening] : sockets_) {
    if (listening.paused_until_ms != 0) deadline = std::min(deadline, listening.paused_until_ms);
  }
  return deadline;
}

}  // namespace bagua_net
