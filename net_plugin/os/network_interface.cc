// NCCL's rules, as its Socket transport follows them (2.12 to 2.30):
//  - A row counts if it is IPv4 or IPv6, of the family that NCCL_SOCKET_FAMILY names if it does, IFF_RUNNING, and not
//    the IPv6 loopback. The first row of a name decides the address; at most 16 names are taken.
//  - NCCL_SOCKET_IFNAME of two or more characters: "^" first turns the list round, "=" next makes it exact instead of
//    prefixes, for all of its comma separated names. What follows a ":" in a name is cut off.
//  - Without it, the first of these that finds anything: prefix "ib"; the one interface in the subnet of NCCL_COMM_ID,
//    running or not, whatever its family; all but docker, lo and virbr; docker; lo; virbr.
#include "os/network_interface.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/if_addr.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/owned_fd.h"
#include "base/text_parsing.h"
#include "os/sysfs.h"
#include "os/tcp_socket.h"

namespace bagua_net {
namespace {

constexpr std::size_t kMaxInterfaces = 16;  // NCCL's MAX_IFS, for the list of names and for what it finds

struct NameFilter {
  std::vector<std::string> names;
  bool negated = false;
  bool exact = false;

  explicit NameFilter(const std::string& text) {
    std::size_t at = 0;
    if (at < text.size() && text[at] == '^') {
      negated = true;
      ++at;
    }
    if (at < text.size() && text[at] == '=') {
      exact = true;
      ++at;
    }
    for (const std::string_view part : split(std::string_view(text).substr(at), ',')) {
      const std::string_view name = part.substr(0, part.find(':'));
      if (!name.empty() && names.size() < kMaxInterfaces) names.emplace_back(name);
    }
  }

  bool matches(const std::string& interface) const {
    // An empty list matches everything: "^=" takes nothing, and "=," everything.
    const bool listed = names.empty() || std::any_of(names.begin(), names.end(), [&](const std::string& name) {
                          return exact ? interface == name : interface.compare(0, name.size(), name) == 0;
                        });
    return listed != negated;
  }
};

enum class FamilyChoice { kAny, kIpv4, kIpv6 };

struct Settings {
  std::optional<std::string> filter;  // NCCL_SOCKET_IFNAME, if NCCL would heed it
  FamilyChoice family = FamilyChoice::kAny;
  std::optional<std::string> comm_id;  // NCCL_COMM_ID, likewise
};

Status read_settings(const EnvironmentReader& environment, Settings* settings) {
  const auto family = environment("NCCL_SOCKET_FAMILY");
  if (family && !family->empty()) {
    if (*family == "AF_INET") {
      settings->family = FamilyChoice::kIpv4;
    } else if (*family == "AF_INET6") {
      settings->family = FamilyChoice::kIpv6;
    } else {
      // NCCL would take the first address it finds and say nothing.
      return Status::invalid_usage("NCCL_SOCKET_FAMILY=" + *family +
                                   ": must be AF_INET (IPv4) or AF_INET6 (IPv6), or not set for either");
    }
  }
  // NCCL takes a value of one character as no value.
  const auto filter = environment("NCCL_SOCKET_IFNAME");
  if (filter && filter->size() > 1) settings->filter = *filter;
  const auto comm_id = environment("NCCL_COMM_ID");
  if (comm_id && comm_id->size() > 1) settings->comm_id = *comm_id;
  return Status::ok();
}

// The host of "10.0.0.1:5000", "node1:5000", "[fd00::1]:5000" or "[fe80::1%eth0]:5000".
Status resolve_comm_id(const std::string& text, SocketAddress* address) {
  const std::string complaint = "NCCL_COMM_ID=" + text + ": ";
  std::string host;
  if (text[0] == '[') {
    const auto bracket = text.find(']');
    if (bracket == std::string::npos) {
      return Status::invalid_usage(complaint + "must be <IPv4 address or host name>:<port> or [<IPv6 address>]:<port>");
    }
    host = text.substr(1, bracket - 1);
  } else {
    host = text.substr(0, text.find_first_of(":,"));
  }
  addrinfo hints{};
  hints.ai_family = text[0] == '[' ? AF_INET6 : AF_UNSPEC;
  hints.ai_flags = text[0] == '[' ? AI_NUMERICHOST : 0;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int failure = host.empty() ? EAI_NONAME : ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, [](addrinfo* list) {
    if (list != nullptr) ::freeaddrinfo(list);
  });
  if (failure != 0) return Status::invalid_usage(complaint + "no such host (" + ::gai_strerror(failure) + ")");
  *address = SocketAddress(found->ai_addr, found->ai_addrlen);
  return Status::ok();
}

bool is_ip(const InterfaceAddress& row) { return row.address.is_ipv4() || row.address.is_ipv6(); }

bool is_wanted_family(const InterfaceAddress& row, FamilyChoice family) {
  switch (family) {
    case FamilyChoice::kAny: return is_ip(row);
    case FamilyChoice::kIpv4: return row.address.is_ipv4();
    case FamilyChoice::kIpv6: return row.address.is_ipv6();
  }
  return false;
}

// Whether NCCL would look at this row's name at all.
bool is_candidate(const InterfaceAddress& row, FamilyChoice family) {
  if (!is_wanted_family(row, family) || (row.flags & IFF_RUNNING) == 0) return false;
  return !(row.address.is_ipv6() && row.address.is_loopback());
}

bool contains(const std::vector<const InterfaceAddress*>& rows, const std::string& name) {
  return std::any_of(rows.begin(), rows.end(), [&](const InterfaceAddress* row) { return row->name == name; });
}

std::vector<const InterfaceAddress*> find_by_name(const std::vector<InterfaceAddress>& rows, const NameFilter& filter,
                                                  FamilyChoice family) {
  std::vector<const InterfaceAddress*> found;
  for (const InterfaceAddress& row : rows) {
    if (found.size() == kMaxInterfaces) break;
    if (is_candidate(row, family) && filter.matches(row.name) && !contains(found, row.name)) found.push_back(&row);
  }
  return found;
}

struct Selection {
  std::vector<const InterfaceAddress*> used;
  std::string used_reason;
  std::string skipped_reason;  // of a candidate that is not used
};

Status select_without_filter(const std::vector<InterfaceAddress>& rows, const Settings& settings,
                             Selection* selection) {
  struct Step {
    const char* filter;
    const char* reason;
  };
  static constexpr Step kFirst = {"ib", "its name starts with ib, which NCCL prefers"};
  static constexpr Step kRest[] = {
      {"^docker,lo,virbr", "running, and not docker, lo or virbr"},
      {"docker", "docker, because no ordinary interface is usable"},
      {"lo", "loopback, because no other interface is usable"},
      {"virbr", "virbr, because no other interface is usable"},
  };
  const auto try_step = [&](const Step& step) {
    selection->used = find_by_name(rows, NameFilter(step.filter), settings.family);
    selection->used_reason = step.reason;
    if (!selection->used.empty()) {
      selection->skipped_reason = "NCCL prefers " + selection->used.front()->name;
    }
    return !selection->used.empty();
  };

  if (try_step(kFirst)) return Status::ok();
  if (settings.comm_id) {
    SocketAddress remote;
    BAGUA_NET_RETURN_IF_ERROR(resolve_comm_id(*settings.comm_id, &remote));
    const auto row = std::find_if(rows.begin(), rows.end(),
                                  [&](const InterfaceAddress& candidate) { return same_subnet(candidate, remote); });
    if (row != rows.end()) {
      selection->used = {&*row};
      selection->used_reason = "in the subnet of NCCL_COMM_ID=" + *settings.comm_id;
      selection->skipped_reason = row->name + " is in the subnet of NCCL_COMM_ID=" + *settings.comm_id;
      return Status::ok();
    }
  }
  for (const Step& step : kRest) {
    if (try_step(step)) return Status::ok();
  }
  selection->skipped_reason = "no rule takes it";
  return Status::ok();
}

// Why an interface is not used, the most basic lack first.
std::string reason_to_skip(const std::vector<InterfaceAddress>& rows, const std::string& name, const Settings& settings,
                           const std::string& skipped_reason) {
  bool has_ip = false;
  bool runs = false;
  bool has_wanted_family = false;
  bool is_usable = false;
  for (const InterfaceAddress& row : rows) {
    if (row.name != name) continue;
    has_ip = has_ip || is_ip(row);
    runs = runs || (row.flags & IFF_RUNNING) != 0;
    has_wanted_family = has_wanted_family || is_wanted_family(row, settings.family);
    is_usable = is_usable || is_candidate(row, settings.family);
  }
  if (!runs) return "skipped: not running (down, or no carrier)";
  if (!has_ip) return "skipped: no IPv4 or IPv6 address";
  if (!has_wanted_family) {
    return settings.family == FamilyChoice::kIpv4 ? "skipped: no IPv4 address, and NCCL_SOCKET_FAMILY=AF_INET"
                                                  : "skipped: no IPv6 address, and NCCL_SOCKET_FAMILY=AF_INET6";
  }
  if (!is_usable) return "skipped: NCCL never uses the IPv6 loopback address";
  if (settings.filter) {
    if (!NameFilter(*settings.filter).matches(name)) {
      return "skipped: does not match NCCL_SOCKET_IFNAME=" + *settings.filter;
    }
    return "skipped: NCCL uses at most " + std::to_string(kMaxInterfaces) + " interfaces";
  }
  return "skipped: " + skipped_reason;
}

std::string nothing_usable(const Settings& settings, const std::vector<InterfaceVerdict>& verdicts) {
  std::string existing;
  for (const InterfaceVerdict& verdict : verdicts) {
    existing += (existing.empty() ? "" : ", ") + verdict.name + " (" +
                (verdict.address.family() == AF_UNSPEC ? "" : verdict.address.host() + ", ") + verdict.reason + ")";
  }
  if (existing.empty()) existing = "no interface";
  std::string message;
  if (settings.filter) {
    message = "NCCL_SOCKET_IFNAME=" + *settings.filter + ": no usable network interface matches";
  } else {
    message = "no usable network interface";
  }
  message += ". This host has " + existing + ".\n";
  message += settings.filter ? "Name one of these in NCCL_SOCKET_IFNAME, or unset it."
                             : "Bring an interface up, or give one an address.";
  if (settings.family != FamilyChoice::kAny) message += " NCCL_SOCKET_FAMILY may exclude the right one.";
  return message;
}

}  // namespace

bool same_subnet(const InterfaceAddress& row, const SocketAddress& remote) {
  if (row.address.family() != remote.family() || row.netmask.family() != remote.family()) return false;
  const SocketAddress::Bytes local_bytes = row.address.bytes();
  const SocketAddress::Bytes remote_bytes = remote.bytes();
  const SocketAddress::Bytes mask = row.netmask.bytes();
  for (std::size_t i = 0; i < mask.size(); ++i) {
    if (((local_bytes[i] ^ remote_bytes[i]) & mask[i]) != 0) return false;
  }
  // Every link has the subnet fe80::/64: only the scope tells them apart.
  return row.address.scope() == remote.scope();
}

Status select_interfaces(const std::vector<InterfaceAddress>& rows, const EnvironmentReader& environment,
                         std::vector<InterfaceVerdict>* verdicts) {
  verdicts->clear();
  Settings settings;
  BAGUA_NET_RETURN_IF_ERROR(read_settings(environment, &settings));
  Selection selection;
  if (settings.filter) {
    selection.used = find_by_name(rows, NameFilter(*settings.filter), settings.family);
    selection.used_reason = "matches NCCL_SOCKET_IFNAME=" + *settings.filter;
  } else {
    BAGUA_NET_RETURN_IF_ERROR(select_without_filter(rows, settings, &selection));
  }

  for (const InterfaceAddress* row : selection.used) {
    verdicts->push_back({row->name, row->address, true, selection.used_reason});
  }
  for (const InterfaceAddress& row : rows) {
    const auto same_name = [&](const InterfaceVerdict& verdict) { return verdict.name == row.name; };
    const auto known = std::find_if(verdicts->begin(), verdicts->end(), same_name);
    if (known != verdicts->end()) {
      if (!known->used && known->address.family() == AF_UNSPEC && is_ip(row)) known->address = row.address;
      continue;
    }
    verdicts->push_back({row.name, is_ip(row) ? row.address : SocketAddress(), false,
                         reason_to_skip(rows, row.name, settings, selection.skipped_reason)});
  }
  if (selection.used.empty()) return Status::invalid_usage(nothing_usable(settings, *verdicts));
  return Status::ok();
}

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
