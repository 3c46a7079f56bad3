// Device: one network device as NCCL sees it. A NIC, or several that are joined (NicGroup), is shown as one or more
// devices ("rails") with names and guids of their own, because NCCL opens two channels per device whatever the speed
// (docs/design/channels.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/environment_reader.h"
#include "base/status.h"
#include "config/join_nics.h"
#include "config/plugin_config.h"
#include "os/network_interface.h"

namespace bagua_net {

// NicGroups: which of the used interfaces are one device (BAGUA_NET_JOIN_NICS).
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

struct Device {
  std::string name;        // unique: "eth0", "eth0#1" for the second rail, "eth0+eth1" for two that are joined
  std::string pci_path;    // "" if the NIC is virtual
  std::uint64_t guid = 0;  // unique per device, the same in every process of a host
  int speed_mbps = 10000;  // this device's share of the NIC's speed; 10000 in all if the NIC does not tell
  int port = 0;
  NicGroup interfaces{1};  // over which its connections go
  int rail = 0;            // which one of these interfaces it is
  std::vector<int> parts;  // the numbers of the devices that NCCL joined into it; empty: it was made by the plugin

  // "eth0", or "eth0+eth1".
  std::string nic_name() const;
  // Of all its interfaces; 0: that of some is unknown.
  int nic_mbps() const;
  // What NCCL is told of speed_mbps, so that the device gets one channel, which NCCL then doubles.
  int told_mbps() const;
};

// What distinguishes the name of a rail: "", "#1", "#2".
std::string rail_suffix(int rail);

// The used interfaces, each group as `rails` devices (empty: four); rail r of every interface before rail r + 1
// of any. Fewer rails where there would be more devices than NCCL has channels for (64), and at least one.
std::vector<Device> make_devices(const std::vector<NicGroup>& groups, std::optional<int> rails);

}  // namespace bagua_net
