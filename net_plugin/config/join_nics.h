// JoinNics: which network interfaces are one device of NCCL's, as BAGUA_NET_JOIN_NICS says.
#pragma once

#include <string>
#include <vector>

namespace bagua_net {

struct JoinNics {
  bool is_auto = false;                          // all that NCCL_SOCKET_IFNAME selects
  std::vector<std::vector<std::string>> groups;  // names; each group is one device
};

// "off", "auto", or groups such as "eth0+eth1,eth2+eth3". Returns what the value must be, or "" after it filled *join.
std::string parse_join_nics(const std::string& text, JoinNics* join);

}  // namespace bagua_net
