#include "transport/device_list.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace bagua_net {
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
