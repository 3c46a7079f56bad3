#include "transport/device.h"

#include <strings.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace bagua_net {
namespace {

constexpr int kUnknownNicMbps = 10000;  // what NCCL's own transport reports when sysfs does not tell

// NCCL's slowest channel is 0.12 GB/s = 960 Mb/s. A device that reports less has room for no channel at all, and NCCL
// gives up its topology search for a slow fallback. Only a rail of a NIC that is slower than this per rail is affected.
constexpr int kMinRailMbps = 1000;

// Between its channels of 0.24 and 1.2 GB/s NCCL has none. A device in between gets several of the slower ones: four
// rails of 25 Gb/s together made 24 channels, whose messages of 45 KiB took up to six times as long at first.
constexpr int kSlowChannelMbps = 1920;
constexpr int kNextChannelMbps = 10000;

// NCCL's topology holds 256 network devices per host at most, and its channels end at 64 (32 up to 2.24): devices
// beyond one per channel would never carry anything.
constexpr std::size_t kMaxDevices = 64;

constexpr unsigned kRailBits = 8;  // of the guid; the rest is the interface

// Four rails, eight channels: level with one rail at 10 Gb/s, and up to 1.8 times as fast with a round trip of 10 ms,
// because each channel has 4 MiB on its way (docs/design/channels.md). The tuner takes channels back from small
// messages.
constexpr int kRails = 4;

}  // namespace

std::string rail_suffix(int rail) { return rail == 0 ? "" : "#" + std::to_string(rail); }

std::string Device::nic_name() const {
  std::string joined;
  for (const NetworkInterface& interface : interfaces) joined += (joined.empty() ? "" : "+") + interface.name;
  return joined;
}

int Device::nic_mbps() const {
  int sum = 0;
  for (const NetworkInterface& interface : interfaces) {
    if (interface.speed_mbps <= 0) return 0;
    sum += interface.speed_mbps;
  }
  return sum;
}

int Device::told_mbps() const {
  if (speed_mbps >= 2 * kSlowChannelMbps && speed_mbps < kNextChannelMbps) return kNextChannelMbps;
  return std::max(speed_mbps, kMinRailMbps);
}

std::vector<Device> make_devices(const std::vector<NicGroup>& groups, std::optional<int> rails) {
  std::vector<Device> devices;
  if (groups.empty()) return devices;
  const int most = std::max<int>(1, static_cast<int>(kMaxDevices / groups.size()));
  for (int rail = 0; rail < most; ++rail) {
    for (std::size_t i = 0; i < groups.size(); ++i) {
      Device device;
      device.interfaces = groups[i];
      const int count = std::clamp(rails.value_or(kRails), 1, most);
      if (rail >= count) continue;
      int nic_mbps = 0;
      for (const NetworkInterface& interface : groups[i]) {
        nic_mbps += interface.speed_mbps > 0 ? interface.speed_mbps : kUnknownNicMbps;
      }
      device.rail = rail;
      device.name = device.nic_name() + rail_suffix(rail);
      device.pci_path = groups[i].front().pci_path;
      // By position, as NCCL's own transport does: every process of a host sees the same list, so the same rail has
      // the same guid in all of them, which NCCL needs to merge their views of the host. The rail is part of it
      // because devices with one guid share one bandwidth budget and one set of channels.
      device.guid = (static_cast<std::uint64_t>(i) << kRailBits) | static_cast<std::uint64_t>(rail);
      // The rails together are as fast as the NIC: NCCL's choice of algorithm and protocol rests on this sum.
      device.speed_mbps = nic_mbps / count;
      devices.push_back(std::move(device));
    }
  }
  return devices;
}

namespace {

constexpr char kName[] = "BAGUA_NET_JOIN_NICS";

std::string names_of(const std::vector<NetworkInterface>& interfaces) {
  std::string names;
  for (const NetworkInterface& interface : interfaces) names += (names.empty() ? "" : ", ") + interface.name;
  return names;
}

// Whether the user has named an interface in full: for "auto", in a list of exact names. A prefix may match others by
// chance, such as a bridge without ports.
bool is_to_join(const JoinNics& join, const std::string& filter, const std::string& name) {
  for (const std::vector<std::string>& group : join.groups) {
    if (std::find(group.begin(), group.end(), name) != group.end()) return true;
  }
  return join.is_auto && filter.substr(0, 1) == "=" &&
         ("," + filter.substr(1) + ",").find("," + name + ",") != std::string::npos;
}

// One prefix may match several by chance, too.
bool lists_several(std::string_view filter) {
  if (filter.substr(0, 1) == "^") return false;
  if (filter.substr(0, 1) == "=") filter.remove_prefix(1);
  const std::vector<std::string_view> names = split(filter, ',');
  return std::count(names.begin(), names.end(), "") + 1 < static_cast<std::ptrdiff_t>(names.size());
}

}  // namespace

std::string why_not_joined(const NicGroup& group, const NetworkInterface& interface) {
  const NetworkInterface& first = group.front();
  if (interface.is_loopback || first.is_loopback) return "a loopback interface cannot be joined";
  if (interface.address.family() != first.address.family()) {
    return "the addresses of " + first.name + " and " + interface.name + " are of different families";
  }
  return "";
}

Status group_interfaces(const JoinNics& join, const std::vector<NetworkInterface>& interfaces, bool is_selected,
                        std::vector<NicGroup>* groups, std::vector<std::string>* lost) {
  groups->clear();
  lost->clear();
  const auto find = [&](const std::string& name) {
    return std::find_if(interfaces.begin(), interfaces.end(), [&](const auto& other) { return other.name == name; });
  };
  // The group of each interface; -1: it is alone.
  std::vector<int> group_of(interfaces.size(), -1);
  for (std::size_t number = 0; number < join.groups.size(); ++number) {
    std::string missing;
    std::size_t found = 0;
    for (const std::string& name : join.groups[number]) {
      const auto interface = find(name);
      if (interface == interfaces.end()) {
        missing += (missing.empty() ? "" : ", ") + name;
        continue;
      }
      group_of[static_cast<std::size_t>(interface - interfaces.begin())] = static_cast<int>(number);
      ++found;
    }
    if (missing.empty()) continue;
    std::string said = std::string(kName) + " names " + missing + ", and NCCL uses " + names_of(interfaces);
    if (found == 0) {
      return Status::invalid_usage(said + " on this host.\nName interfaces that NCCL_SOCKET_IFNAME selects, or unset " +
                                   kName + ".");
    }
    said += " on this host: ";
    lost->push_back(said + (found > 1 ? "joined without" : "nothing is joined"));
  }
  if (join.is_auto && is_selected) group_of.assign(interfaces.size(), 0);
  if (join.is_auto && !is_selected && interfaces.size() > 1) {
    lost->push_back(std::string(kName) + "=auto joins only what NCCL_SOCKET_IFNAME selects, and that is not set: " +
                    names_of(interfaces) + " are a device each");
  }

  std::vector<int> number_of;  // of each group that was begun
  for (std::size_t index = 0; index < interfaces.size(); ++index) {
    const NetworkInterface& interface = interfaces[index];
    const auto begun = std::find(number_of.begin(), number_of.end(), group_of[index]);
    if (group_of[index] >= 0 && begun != number_of.end()) {
      NicGroup& group = (*groups)[static_cast<std::size_t>(begun - number_of.begin())];
      const std::string why = why_not_joined(group, interface);
      if (why.empty()) {
        group.push_back(interface);
        continue;
      }
      lost->push_back(std::string(kName) + ": " + interface.name + " is a device of its own, because " + why);
      group_of[index] = -1;
    }
    groups->push_back({interface});
    number_of.push_back(group_of[index]);
  }
  return Status::ok();
}

bool nccl_is_to_join(const EnvironmentReader& environment) {
  const std::string level = environment("NCCL_NET_MERGE_LEVEL").value_or("");
  return !environment("NCCL_NET_FORCE_MERGE").value_or("").empty() ||
         (!level.empty() && ::strcasecmp(level.c_str(), "LOC") != 0);
}

Status group_interfaces(const std::optional<JoinNics>& set, const std::vector<InterfaceChoice>& choices,
                        const EnvironmentReader& environment, std::vector<NicGroup>* groups,
                        std::vector<std::string>* lost) {
  std::vector<NetworkInterface> used;
  for (const InterfaceChoice& choice : choices) {
    if (choice.used) used.push_back(choice.interface);
  }
  const std::string filter = environment("NCCL_SOCKET_IFNAME").value_or("");
  // NCCL does not heed a shorter one.
  const bool is_selected = filter.size() > 1;
  const JoinNics join = set.value_or(JoinNics{lists_several(filter) && !nccl_is_to_join(environment), {}});
  BAGUA_NET_RETURN_IF_ERROR(group_interfaces(join, used, is_selected, groups, lost));
  if (!set) lost->clear();  // nobody has asked for more
  for (const InterfaceChoice& choice : choices) {
    const std::string& name = choice.interface.name;
    if (!choice.used && is_to_join(join, filter, name)) {
      lost->push_back(name + " is not joined, also if that changes before the job ends: " + choice.reason);
    }
  }
  return Status::ok();
}

namespace {

constexpr std::uint64_t kJoinedGuid = std::uint64_t{1} << 40;  // in the guid of the first that was joined

Status refusal(const std::string& what, const std::string& why, const std::string& remedy) {
  return Status::invalid_usage(what + " cannot be one device: " + why + ".\n" + remedy);
}

constexpr char kSetOurs[] =
    "Unset NCCL_NET_MERGE_LEVEL and NCCL_NET_FORCE_MERGE, and name the interfaces in BAGUA_NET_JOIN_NICS.";
constexpr char kCorrect[] = "Correct NCCL_NET_FORCE_MERGE, or set NCCL_NET_MERGE_LEVEL=LOC to join none.";

// NCCL puts the new device where the paths of its parts meet. It has no place for one without a PCI device, or between
// NUMA nodes: communicators then fail, or lack the device.
std::string misplaced(const NicGroup& group) {
  for (const NetworkInterface& interface : group) {
    if (interface.pci_path.empty()) return interface.name + " is not a PCI device, and NCCL joins only these";
    if (interface.numa_node != group.front().numa_node) {
      return group.front().name + " is at NUMA node " + std::to_string(group.front().numa_node) + " and " +
             interface.name + " at " + std::to_string(interface.numa_node) + ", and NCCL joins only within one";
    }
  }
  return "";
}

}  // namespace

DeviceList::DeviceList(std::vector<Device> made) : made_(made.size()), counted_(made.size()) {
  for (Device& device : made) devices_.push_back(std::make_shared<const Device>(std::move(device)));
}

int DeviceList::count() const {
  const MutexLock lock(mutex_);
  return static_cast<int>(counted_);
}

std::shared_ptr<const Device> DeviceList::at(int number) const {
  const MutexLock lock(mutex_);
  if (number < 0 || static_cast<std::size_t>(number) >= devices_.size()) return nullptr;
  return devices_[static_cast<std::size_t>(number)];
}

Status DeviceList::join(const std::vector<int>& numbers, int* number) {
  const MutexLock lock(mutex_);
  std::vector<Device> joined;
  BAGUA_NET_RETURN_IF_ERROR(make_joined(numbers, &joined));
  *number = static_cast<int>(counted_);
  for (Device& device : joined) {
    // One that was restored may be in use already, and it stays if it is the same.
    if (counted_ < devices_.size() && devices_[counted_]->parts != device.parts) devices_.resize(counted_);
    if (counted_ == devices_.size()) devices_.push_back(std::make_shared<const Device>(std::move(device)));
    ++counted_;
  }
  return Status::ok();
}

DeviceList::Joins DeviceList::joins() const {
  const MutexLock lock(mutex_);
  Joins joins;
  for (std::size_t number = made_; number < devices_.size(); ++number) joins.push_back(devices_[number]->parts);
  return joins;
}

void DeviceList::restore(const Joins& joins) {
  int ignored = 0;
  for (const std::vector<int>& numbers : joins) {
    if (!join(numbers, &ignored).is_ok()) break;  // the interfaces are others now
  }
  const MutexLock lock(mutex_);
  counted_ = made_;
}

Status DeviceList::make_joined(const std::vector<int>& numbers, std::vector<Device>* joined) const {
  std::string names;
  std::map<int, std::vector<int>> rails;  // of each rail its devices
  for (std::size_t at = 0; at < numbers.size(); ++at) {
    const int number = numbers[at];
    if (number < 0 || static_cast<std::size_t>(number) >= made_) {
      return refusal("Device " + std::to_string(number) + " and others",
                     "only devices 0 to " + std::to_string(made_ - 1) + " can be joined", kCorrect);
    }
    const Device& device = *devices_[static_cast<std::size_t>(number)];
    names += (names.empty() ? "" : ", ") + device.name;
    if (std::count(numbers.begin(), numbers.end(), number) > 1) {
      return refusal(device.name + " and itself", "each can be in it once", kCorrect);
    }
    rails[device.rail].push_back(number);
  }
  if (numbers.empty()) return refusal("No device", "it takes one at least", kCorrect);
  if (numbers.size() == 1) {
    Device repeated = *devices_[static_cast<std::size_t>(numbers[0])];
    repeated.parts = numbers;
    joined->push_back(std::move(repeated));
    return Status::ok();
  }

  for (const auto& [rail, parts] : rails) {
    const Device& first = *devices_[static_cast<std::size_t>(parts[0])];
    Device device;
    device.rail = rail;
    device.parts = parts;
    device.pci_path = first.pci_path;
    device.guid = first.guid | kJoinedGuid;
    device.port = first.port;
    device.speed_mbps = 0;
    device.interfaces.clear();
    for (const int part : parts) {
      const Device& added = *devices_[static_cast<std::size_t>(part)];
      if (added.interfaces.size() > 1) {
        return refusal(names, "BAGUA_NET_JOIN_NICS has joined " + added.nic_name() + " already",
                       "Use one of BAGUA_NET_JOIN_NICS and NCCL_NET_FORCE_MERGE.");
      }
      const std::string why =
          device.interfaces.empty() ? "" : why_not_joined(device.interfaces, added.interfaces.front());
      if (!why.empty()) return refusal(names, why, kCorrect);
      device.interfaces.push_back(added.interfaces.front());
      device.speed_mbps += added.speed_mbps;
    }
    if (parts.size() == 1 || (!joined->empty() && joined->front().nic_name() != device.nic_name())) {
      return refusal(names, "some are rails of one interface, which stay apart", kSetOurs);
    }
    const std::string why = misplaced(device.interfaces);
    if (!why.empty()) return refusal(names, why, kSetOurs);
    for (std::size_t number = made_; number < counted_; ++number) {
      const Device& other = *devices_[number];
      if (other.parts.size() < 2) continue;
      for (const NetworkInterface& interface : other.interfaces) {
        const bool is_taken = std::any_of(device.interfaces.begin(), device.interfaces.end(),
                                          [&](const NetworkInterface& own) { return own.name == interface.name; });
        if (!is_taken || (other.nic_name() == device.nic_name() && other.rail != rail)) continue;
        return refusal(names, interface.name + " is in " + other.name + " already", kCorrect);
      }
    }
    device.name = device.nic_name() + rail_suffix(rail);
    joined->push_back(std::move(device));
  }
  return Status::ok();
}

}  // namespace bagua_net
