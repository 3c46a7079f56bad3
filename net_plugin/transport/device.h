// Device: one network device as NCCL sees it. A NIC, or several that are joined (NicGroup), is shown as one or more
// devices ("rails") with names and guids of their own, because NCCL opens two channels per device whatever the speed
// (docs/design/channels.md).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "base/text_parsing.h"
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
// set: BAGUA_NET_JOIN_NICS; empty: interfaces that NCCL_SOCKET_IFNAME lists are joined, unless NCCL is to join devices.
Status group_interfaces(const std::optional<JoinNics>& set, const std::vector<InterfaceChoice>& choices,
                        const EnvironmentReader& environment, std::vector<NicGroup>* groups,
                        std::vector<std::string>* lost);

// NCCL_NET_FORCE_MERGE or NCCL_NET_MERGE_LEVEL say so.
bool nccl_is_to_join(const EnvironmentReader& environment);

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

// DeviceList: the devices, by the numbers under which NCCL knows them. First come those that the plugin made; then
// those that NCCL has joined of them (makeVDevice), because NCCL_NET_FORCE_MERGE or NCCL_NET_MERGE_LEVEL says so.
//
// Any thread. A device stays as it is, and its number remains its own.
class DeviceList {
 public:
  using Joins = std::vector<std::vector<int>>;  // the numbers of which each device was joined

  explicit DeviceList(std::vector<Device> made);

  int count() const;
  // nullptr: there is none of this number.
  std::shared_ptr<const Device> at(int number) const;

  // NCCL wants one device in place of these; *number is the first of the new ones. Devices of several rails become one
  // for each rail, so that rails stay apart and channels stay as many. A single one is repeated, which NCCL up to 2.26
  // asks for. An error says why they cannot be joined.
  Status join(const std::vector<int>& numbers, int* number);

  // What was joined, for the list of the next transport. NCCL either goes on using the old numbers there, or counts the
  // devices again and joins the same ones again. So `restore` makes them known without counting them.
  Joins joins() const;
  void restore(const Joins& joins);

 private:
  Status make_joined(const std::vector<int>& numbers, std::vector<Device>* joined) const REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::vector<std::shared_ptr<const Device>> devices_ GUARDED_BY(mutex_);
  const std::size_t made_;                  // the first that NCCL joined, if there is one
  std::size_t counted_ GUARDED_BY(mutex_);  // those behind were restored
};

}  // namespace bagua_net
