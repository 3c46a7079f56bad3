#include "transport/device.h"

#include <algorithm>

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

}  // namespace bagua_net
