#include "transport/connect/nic_paths.h"

#include <net/if.h>
#include <sys/socket.h>

#include <algorithm>
#include <set>

#include "os/network_interface.h"

namespace bagua_net {
namespace {

bool is_of_other_family(const std::vector<NetworkInterface>& interfaces, const ConnectHandle& handle) {
  return interfaces.front().address.is_ipv6() != (handle.address_family == 6);
}

}  // namespace

std::vector<NicPair> pair_nics(const std::vector<std::vector<NicPairing>>& pairings, std::vector<NicPair> in_use) {
  struct Pair {
    bool is_remote;
    bool is_crossed;
    std::size_t here, there;
  };
  std::vector<Pair> pairs;
  for (std::size_t here = 0; here < pairings.size(); ++here) {
    for (std::size_t there = 0; there < pairings[here].size(); ++there) {
      const NicPairing& pairing = pairings[here][there];
      if (pairing.same_subnet || pairing.is_routed) pairs.push_back({!pairing.same_subnet, here != there, here, there});
    }
  }
  std::stable_sort(pairs.begin(), pairs.end(), [](const Pair& one, const Pair& other) {
    return std::pair(one.is_remote, one.is_crossed) < std::pair(other.is_remote, other.is_crossed);
  });
  std::set<std::size_t> used_here;
  std::set<std::size_t> used_there;
  std::vector<NicPair> chosen = std::move(in_use);
  for (const auto& [here, there] : chosen) {
    used_here.insert(here);
    used_there.insert(there);
  }
  // First pairs of two that have none, then for those that are left.
  for (const std::size_t without_one : {2, 1}) {
    for (const Pair& pair : pairs) {
      if (2 - used_here.count(pair.here) - used_there.count(pair.there) < without_one) continue;
      used_here.insert(pair.here);
      used_there.insert(pair.there);
      chosen.emplace_back(pair.here, pair.there);
    }
  }
  if (chosen.empty()) chosen.emplace_back(0, 0);
  return chosen;
}

std::vector<NicPath> find_paths(const std::vector<NetworkInterface>& interfaces,
                                const std::vector<std::uint16_t>& ports, const ConnectHandle& handle,
                                const NicPath* in_use) {
  const auto path = [&](std::size_t here, std::size_t there) {
    ConnectHandle named = handle;
    if (there > 0) {
      named.address = handle.further[there - 1].bytes;
      named.port = handle.further[there - 1].port;
      named.scope_id = 0;
    }
    return NicPath{interfaces[here], address_in(named, interfaces[here]),
                   here < ports.size() ? ports[here] : std::uint16_t{0}};
  };
  const NicPath first = in_use == nullptr ? path(0, 0) : *in_use;
  const bool is_one = interfaces.size() == 1 && handle.further.empty();
  if (is_one || is_of_other_family(interfaces, handle) || is_of_this_host(first.address)) return {first};
  std::vector<InterfaceAddress> rows;
  if (!list_interface_addresses(&rows).is_ok()) return {first};
  std::vector<std::vector<NicPairing>> pairings(interfaces.size());
  std::vector<NicPair> pair_in_use;
  for (std::size_t here = 0; here < interfaces.size(); ++here) {
    for (std::size_t there = 0; there <= handle.further.size(); ++there) {
      const SocketAddress to = path(here, there).address;
      if (in_use != nullptr && in_use->interface.name == interfaces[here].name && in_use->address.same_host(to)) {
        pair_in_use = {{here, there}};
      }
      NicPairing& pairing = pairings[here].emplace_back();
      pairing.same_subnet = std::any_of(rows.begin(), rows.end(), [&](const InterfaceAddress& row) {
        return row.name == interfaces[here].name && row.address.same_host(interfaces[here].address) &&
               same_subnet(row, to);
      });
      pairing.is_routed = has_route_over(to, interfaces[here]);
    }
  }
  std::vector<NicPath> paths;
  for (const auto& [here, there] : pair_nics(pairings, pair_in_use)) paths.push_back(path(here, there));
  return paths;
}

std::size_t expected_paths(const std::vector<NicPath>& paths, const std::vector<NetworkInterface>& interfaces,
                           const ConnectHandle& handle) {
  if (paths.size() == 1) return 1;
  return std::min(paths.size() + handle.unnamed, std::max(interfaces.size(), handle.addresses()));
}

RareLog::Line describe_mismatch(const std::vector<NetworkInterface>& interfaces, const ConnectHandle& handle,
                                const std::vector<NicPath>& paths) {
  const std::size_t here = interfaces.size();
  const std::size_t there = handle.addresses();
  if ((here == 1 && there == 1) || is_of_this_host(paths[0].address)) return {};
  const std::string peer = paths[0].address.host();
  const std::string kind = "interfaces " + peer;
  std::string names;
  for (const NetworkInterface& interface : interfaces) names += (names.empty() ? "" : "+") + interface.name;
  if (is_of_other_family(interfaces, handle)) {
    return {LogLevel::kWarn,
            "Bagua-Net: joined interfaces cannot be used together between " + names + " (" +
                interfaces[0].address.host() + ") and " + peer +
                ", an address of the other family. The kernel chooses the way. Set "
                "NCCL_SOCKET_FAMILY alike on every rank (AF_INET or AF_INET6)",
            kind};
  }
  std::set<std::string> used_here;
  std::set<std::string> used_there;
  std::string pairs;
  for (const NicPath& path : paths) {
    used_here.insert(path.interface.name);
    used_there.insert(path.address.host());
    pairs += (pairs.empty() ? "" : ", ") + path.interface.name + " to " + path.address.host();
  }
  if (here == there && used_here.size() == here && used_there.size() == there) return {};
  return {LogLevel::kInfo,
          "Bagua-Net: " + names + " here and " + std::to_string(there) + (there == 1 ? " interface" : " interfaces") +
              " of the peer at " + peer + " are used as " + pairs +
              ". If more should be, check BAGUA_NET_JOIN_NICS and NCCL_SOCKET_IFNAME on both hosts, and "
              "the routes",
          kind};
}

std::vector<std::size_t> share_paths(std::size_t streams, std::size_t paths, std::size_t first, bool first_is_small) {
  std::vector<std::size_t> own = {first};
  for (std::size_t next = first_is_small ? first : first + 1; own.size() < streams; ++next) own.push_back(next % paths);
  return own;
}

void put_address(const SocketAddress& address, ConnectHandle* handle) {
  handle->address_family = address.is_ipv6() ? 6 : 4;
  handle->address = address.bytes();
  handle->port = address.port();
  handle->scope_id = address.scope();
}

// A link-local address is valid on one link only. The handle has the listener's number of the link, which differs from
// host to host. On another host, the link is that of the device through which NCCL connects.
SocketAddress address_in(const ConnectHandle& handle, const NetworkInterface& interface) {
  if (handle.address_family == 4) return {AF_INET, handle.address, handle.port, 0};
  const SocketAddress address(AF_INET6, handle.address, handle.port, handle.scope_id);
  if (!address.is_link_local() || is_of_this_host(address)) return address;
  const unsigned own_number = current_index(interface);
  return own_number == 0 ? address : SocketAddress(AF_INET6, handle.address, handle.port, own_number);
}

}  // namespace bagua_net
