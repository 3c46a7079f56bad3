#include "os/link_watch.h"

#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/owned_fd.h"

namespace bagua_net {
namespace {

// What the kernel announces fits into a page or two. The rest of a longer message is not needed.
constexpr std::size_t kDatagramBytes = 16384;
// A storm of messages must not keep the owner's thread from its other work.
constexpr int kDatagramsPerUpdate = 64;

class MessageReader {
 public:
  MessageReader(const void* data, std::size_t bytes) : next_(static_cast<const char*>(data)), left_(bytes) {}

  // False: it is shorter than that.
  template <typename T>
  bool read(T* value) {
    if (left_ < sizeof *value) return false;
    std::memcpy(value, next_, sizeof *value);
    skip(sizeof *value);
    return true;
  }
  void skip(std::size_t bytes) {
    bytes = std::min(bytes, left_);
    next_ += bytes;
    left_ -= bytes;
  }
  const char* next() const { return next_; }
  std::size_t left() const { return left_; }

 private:
  const char* next_;
  std::size_t left_;
};

// An interface that came up is IFF_RUNNING up to a second later, but has its carrier at once. <net/if.h> lacks it, and
// <linux/if.h> cannot be included with that.
constexpr unsigned kLowerUp = 1u << 16;  // IFF_LOWER_UP

// Netlink aligns messages, their fixed part and attributes to four bytes.
constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 3) / 4 * 4; }

// Of a link: its index, or its name, if the interface was made again.
bool is_watched_link(MessageReader body, const std::vector<NetworkInterface>& watched,
                     const std::vector<unsigned>& indices) {
  ifinfomsg link;
  if (!body.read(&link)) return true;
  if (std::find(indices.begin(), indices.end(), static_cast<unsigned>(link.ifi_index)) != indices.end()) return true;
  rtattr attribute;
  while (body.read(&attribute)) {
    const std::size_t bytes = attribute.rta_len;
    if (bytes < sizeof attribute || bytes - sizeof attribute > body.left()) return true;
    if (attribute.rta_type == IFLA_IFNAME) {
      const std::string name(body.next(), ::strnlen(body.next(), bytes - sizeof attribute));
      return std::any_of(watched.begin(), watched.end(), [&](const auto& one) { return one.name == name; });
    }
    body.skip(aligned(bytes) - sizeof attribute);
  }
  return false;
}

bool is_watched_address(MessageReader body, const std::vector<unsigned>& indices) {
  ifaddrmsg address;
  return !body.read(&address) || std::find(indices.begin(), indices.end(), address.ifa_index) != indices.end();
}

// Not those that come and go with an address, and no cached ones.
bool is_route_to_others(MessageReader body) {
  rtmsg route;
  if (!body.read(&route)) return true;
  return route.rtm_table != RT_TABLE_LOCAL && (route.rtm_flags & RTM_F_CLONED) == 0;
}

}  // namespace

LinkState link_state(const NetworkInterface& interface, const std::vector<InterfaceAddress>& rows) {
  LinkState state = LinkState::kAbsent;
  for (const InterfaceAddress& row : rows) {
    if (row.name != interface.name) continue;
    if ((row.flags & IFF_UP) == 0) return LinkState::kDown;
    if ((row.flags & (IFF_RUNNING | kLowerUp)) == 0) return LinkState::kNoCarrier;
    if (row.address.same_host(interface.address)) return LinkState::kUsable;
    state = LinkState::kNoAddress;
  }
  return state;
}

std::string describe(LinkState state, const NetworkInterface& interface) {
  switch (state) {
    case LinkState::kUsable: return interface.name + " is up";
    case LinkState::kAbsent: return interface.name + " was removed";
    case LinkState::kDown: return interface.name + " was set down";
    case LinkState::kNoCarrier: return interface.name + " has no carrier";
    case LinkState::kNoAddress: return interface.name + " lost its address " + interface.address.host();
  }
  return interface.name;
}

LinkMessages read_link_messages(const void* datagram, std::size_t bytes, const std::vector<NetworkInterface>& watched,
                                const std::vector<unsigned>& indices) {
  LinkMessages found;
  MessageReader messages(datagram, bytes);
  while (messages.left() > 0) {
    nlmsghdr header;
    if (!messages.read(&header) || header.nlmsg_len < sizeof header ||
        header.nlmsg_len - sizeof header > messages.left()) {
      return {true, true};  // what is missing may be about a watched interface
    }
    const MessageReader body(messages.next(), header.nlmsg_len - sizeof header);
    switch (header.nlmsg_type) {
      case RTM_NEWLINK:
      case RTM_DELLINK: found.interfaces |= is_watched_link(body, watched, indices); break;
      case RTM_NEWADDR:
      case RTM_DELADDR: found.interfaces |= is_watched_address(body, indices); break;
      case RTM_NEWROUTE:
      case RTM_DELROUTE: found.routes |= is_route_to_others(body); break;
      default: break;
    }
    messages.skip(aligned(header.nlmsg_len) - sizeof header);
  }
  return found;
}

Status LinkWatch::open(std::vector<NetworkInterface> watched) {
  watched_ = std::move(watched);
  indices_.assign(watched_.size(), 0);
  sockaddr_nl groups{};
  groups.nl_family = AF_NETLINK;
  groups.nl_groups = RTMGRP_LINK;
  for (const NetworkInterface& interface : watched_) {
    groups.nl_groups |= interface.address.is_ipv6() ? RTMGRP_IPV6_IFADDR | RTMGRP_IPV6_ROUTE  //
                                                    : RTMGRP_IPV4_IFADDR | RTMGRP_IPV4_ROUTE;
  }
  OwnedFd socket(::socket(AF_NETLINK, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, NETLINK_ROUTE));
  if (!socket.is_open()) return Status::system_error("rtnetlink socket", errno);
  mark_uninherited(socket.get());
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&groups), sizeof groups) != 0) {
    return Status::system_error("subscribing to rtnetlink", errno);
  }
  // After subscribing: no change is missed.
  BAGUA_NET_RETURN_IF_ERROR(read_states(&states_));
  socket_ = std::move(socket);
  return Status::ok();
}

bool LinkWatch::receive() {
  alignas(nlmsghdr) std::array<char, kDatagramBytes> datagram;
  LinkMessages received;
  for (int count = 0; count < kDatagramsPerUpdate; ++count) {
    const ssize_t bytes = ::recv(socket_.get(), datagram.data(), datagram.size(), MSG_DONTWAIT | MSG_TRUNC);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    LinkMessages told{true, true};  // ENOBUFS: messages were dropped
    if (bytes >= 0) {
      told = read_link_messages(datagram.data(), std::min(static_cast<std::size_t>(bytes), datagram.size()), watched_,
                                indices_);
    }
    received.interfaces |= told.interfaces;
    received.routes |= told.routes;
  }
  pending_.interfaces |= received.interfaces;
  pending_.routes |= received.routes;
  return received.interfaces || received.routes;
}

Status LinkWatch::read_states(std::vector<LinkState>* states) {
  std::vector<InterfaceAddress> rows;
  BAGUA_NET_RETURN_IF_ERROR(list_interface_addresses(&rows));
  states->clear();
  for (std::size_t index = 0; index < watched_.size(); ++index) {
    NetworkInterface now = watched_[index];
    now.name = current_name(now);
    states->push_back(link_state(now, rows));
    indices_[index] = current_index(now);
  }
  return Status::ok();
}

LinkWatch::Changes LinkWatch::update(std::int64_t now_ms) {
  Changes changes;
  if (!socket_.is_open()) return changes;
  if (receive()) {
    if (due_ms_ == kNever) first_ms_ = now_ms;
    due_ms_ = std::min(now_ms + kQuietMs, first_ms_ + kMaxDelayMs);
  }
  if (now_ms < due_ms_) return changes;
  std::vector<LinkState> states;
  if (pending_.interfaces && !read_states(&states).is_ok()) {
    due_ms_ = now_ms + kMaxDelayMs;  // out of descriptors or memory: later
    return changes;
  }
  for (std::size_t index = 0; index < states.size(); ++index) {
    if (states[index] != states_[index]) changes.interfaces.push_back(index);
  }
  if (pending_.interfaces) states_ = std::move(states);
  changes.routes = pending_.routes;
  pending_ = {};
  due_ms_ = kNever;
  return changes;
}

}  // namespace bagua_net
