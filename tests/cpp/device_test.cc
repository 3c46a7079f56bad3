// How interfaces become devices: names, guids, order and the share of the speed.
#include "transport/device.h"

#include <set>

#include "support/check.h"

using bagua_net::Device;
using bagua_net::make_devices;
using bagua_net::NetworkInterface;

namespace {

NetworkInterface nic(const std::string& name, int speed_mbps, const std::string& pci_path = "") {
  NetworkInterface interface;
  interface.name = name;
  interface.speed_mbps = speed_mbps;
  interface.pci_path = pci_path;
  return interface;
}

}  // namespace

TEST_CASE(one_rail_is_the_interface_itself) {
  const auto devices = make_devices({nic("eth0", 25000, "/sys/devices/pci0000:00/0000:00:05.0")}, 1);
  CHECK_EQ(devices.size(), std::size_t{1});
  CHECK_EQ(devices[0].name, std::string("eth0"));
  CHECK_EQ(devices[0].speed_mbps, 25000);
  CHECK_EQ(devices[0].pci_path, std::string("/sys/devices/pci0000:00/0000:00:05.0"));
  CHECK_EQ(devices[0].port, 0);
  CHECK_EQ(devices[0].interface.name, std::string("eth0"));
}

TEST_CASE(rails_are_ordered_rail_by_rail_over_the_interfaces) {
  const auto devices = make_devices({nic("eth0", 100000), nic("eth1", 40000)}, 3);
  const std::vector<std::string> names = {"eth0", "eth1", "eth0#1", "eth1#1", "eth0#2", "eth1#2"};
  CHECK_EQ(devices.size(), names.size());
  for (std::size_t i = 0; i < names.size(); ++i) CHECK_EQ(devices[i].name, names[i]);
  CHECK_EQ(devices[3].interface.name, std::string("eth1"));
}

TEST_CASE(the_rails_share_the_speed_of_their_own_nic) {
  const auto devices = make_devices({nic("eth0", 100000), nic("eth1", 40000)}, 4);
  int eth0_mbps = 0;
  int eth1_mbps = 0;
  for (const Device& device : devices) (device.interface.name == "eth0" ? eth0_mbps : eth1_mbps) += device.speed_mbps;
  CHECK_EQ(eth0_mbps, 100000);
  CHECK_EQ(eth1_mbps, 40000);
  CHECK_EQ(devices[0].speed_mbps, 25000);
}

TEST_CASE(unknown_speed_is_10_gigabit_in_all) {
  CHECK_EQ(make_devices({nic("lo", 0)}, 1)[0].speed_mbps, 10000);
  for (const Device& device : make_devices({nic("lo", 0)}, 4)) CHECK_EQ(device.speed_mbps, 2500);
}

TEST_CASE(a_rail_is_never_too_slow_for_a_channel) {
  for (const Device& device : make_devices({nic("eth0", 1000)}, 4)) CHECK_EQ(device.speed_mbps, 1000);
  CHECK_EQ(make_devices({nic("eth0", 100)}, 1)[0].speed_mbps, 1000);
}

TEST_CASE(rails_follow_the_speed_unless_somebody_says) {
  const auto devices = make_devices({nic("slow0", 10000), nic("fast0", 100000), nic("virtual0", 0)}, std::nullopt);
  const std::vector<std::string> names = {"slow0",   "fast0",      "virtual0", "fast0#1",   "virtual0#1",
                                          "fast0#2", "virtual0#2", "fast0#3",  "virtual0#3"};
  CHECK_EQ(devices.size(), names.size());
  for (std::size_t i = 0; i < names.size(); ++i) CHECK_EQ(devices[i].name, names[i]);
  CHECK_EQ(devices[0].speed_mbps, 10000);
  CHECK_EQ(devices[1].speed_mbps, 25000);
}

TEST_CASE(names_and_guids_are_unique_and_repeatable) {
  const std::vector<NetworkInterface> interfaces = {nic("eth0", 0), nic("eth1", 0), nic("bond0.7", 0)};
  const auto devices = make_devices(interfaces, 16);
  const auto again = make_devices(interfaces, 16);
  std::set<std::string> names;
  std::set<std::uint64_t> guids;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    CHECK(names.insert(devices[i].name).second);
    CHECK(guids.insert(devices[i].guid).second);
    CHECK_EQ(devices[i].guid, again[i].guid);
  }
  CHECK_EQ(devices.size(), std::size_t{48});
}

TEST_CASE(a_guid_does_not_depend_on_the_number_of_rails) {
  const std::vector<NetworkInterface> interfaces = {nic("eth0", 0), nic("eth1", 0)};
  const auto two = make_devices(interfaces, 2);
  const auto four = make_devices(interfaces, 4);
  for (std::size_t i = 0; i < two.size(); ++i) {
    CHECK_EQ(two[i].name, four[i].name);
    CHECK_EQ(two[i].guid, four[i].guid);
  }
}

TEST_CASE(no_more_devices_than_channels) {
  const std::vector<NetworkInterface> sixteen(16, nic("eth", 10000));
  const auto devices = make_devices(sixteen, 16);
  CHECK_EQ(devices.size(), std::size_t{64});
  CHECK_EQ(devices[0].speed_mbps, 2500);  // of the 4 rails that there are, not of the 16 asked for
  CHECK_EQ(make_devices(std::vector<NetworkInterface>(100, nic("eth", 0)), 4).size(), std::size_t{100});
}

TEST_CASE(nothing_and_less_than_one_rail) {
  CHECK(make_devices({}, 4).empty());
  CHECK_EQ(make_devices({nic("eth0", 0)}, 0).size(), std::size_t{1});
  CHECK_EQ(make_devices({nic("eth0", 0)}, -3).size(), std::size_t{1});
}

CHECK_MAIN
