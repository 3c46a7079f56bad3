// NicGroups: which of the used interfaces are one device (BAGUA_NET_JOIN_NICS).
#pragma once

#include <string>
#include <vector>

#include "base/environment_reader.h"
#include "base/status.h"
#include "config/join_nics.h"
#include "os/network_interface.h"

namespace bagua_net {

using NicGroup = std::vector<NetworkInterface>;  // never empty; the first is where a peer is tried first

// Why an interface cannot be in a group with these; "": it can.
std::string why_not_joined(const NicGroup& group, const NetworkInterface& interface);

// Every interface is in one group, in the order in which they become devices. is_selected: the user has said which
// interfaces NCCL uses; without that, "auto" joins none, and *lost says so. Hosts of a job may have different
// interfaces: a group without some of its names, or with interfaces that cannot be joined, is smaller, and *lost has a
// sentence for each. A group of which the host has none is an error.
Status group_interfaces(const JoinNics& join, const std::vector<NetworkInterface>& interfaces, bool is_selected,
                        std::vector<NicGroup>* groups, std::vector<std::string>* lost);
// The same, for the interfaces that were chosen in this environment. *lost also has the reason for each that the user
// has named and that is not used.
Status group_interfaces(const JoinNics& join, const std::vector<InterfaceChoice>& choices,
                        const EnvironmentReader& environment, std::vector<NicGroup>* groups,
                        std::vector<std::string>* lost);

}  // namespace bagua_net
