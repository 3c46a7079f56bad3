// How interfaces become devices: names, guids, order and the share of the speed.
#include "transport/device.h"

#include <sys/socket.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "support/check.h"

using bagua_net::Device;
using bagua_net::group_interfaces;
using bagua_net::InterfaceChoice;
using bagua_net::JoinNics;
using bagua_net::make_devices;
using bagua_net::NetworkInterface;
using bagua_net::NicGroup;

namespace {

NetworkInterface nic(const std::string& name, int speed_mbps, const std::string& pci_path = "") {
  NetworkInterface interface;
  interface.name = name;
  interface.speed_mbps = speed_mbps;
  interface.pci_path = pci_path;
  return interface;
}

NetworkInterface nic_with_address(const std::string& name, int family) {
  NetworkInterface interface = nic(name, 10000);
  interface.address = bagua_net::SocketAddress(family, {10, 0, 0, 1}, 0, 0);
  return interface;
}

// Each interface alone.
std::vector<Device> devices_of(const std::vector<NetworkInterface>& interfaces, std::optional<int> rails) {
  std::vector<NicGroup> groups;
  for (const NetworkInterface& interface : interfaces) groups.push_back({interface});
  return make_devices(groups, rails);
}

// The names of the interfaces of each group: "eth0+eth1 eth2".
std::string grouped(const JoinNics& join, const std::vector<NetworkInterface>& interfaces, bool is_selected,
                    std::vector<std::string>* lost) {
  std::vector<NicGroup> groups;
  CHECK_OK(group_interfaces(join, interfaces, is_selected, &groups, lost));
  std::string text;
  for (const Device& device : make_devices(groups, 1)) text += (text.empty() ? "" : " ") + device.name;
  return text;
}

}  // namespace

TEST_CASE(one_rail_is_the_interface_itself) {
  const auto devices = devices_of({nic("eth0", 25000, "/sys/devices/pci0000:00/0000:00:05.0")}, 1);
  CHECK_EQ(devices.size(), std::size_t{1});
  CHECK_EQ(devices[0].name, std::string("eth0"));
  CHECK_EQ(devices[0].speed_mbps, 25000);
  CHECK_EQ(devices[0].pci_path, std::string("/sys/devices/pci0000:00/0000:00:05.0"));
  CHECK_EQ(devices[0].port, 0);
  CHECK_EQ(devices[0].interfaces[0].name, std::string("eth0"));
}

TEST_CASE(rails_are_ordered_rail_by_rail_over_the_interfaces) {
  const auto devices = devices_of({nic("eth0", 100000), nic("eth1", 40000)}, 3);
  const std::vector<std::string> names = {"eth0", "eth1", "eth0#1", "eth1#1", "eth0#2", "eth1#2"};
  CHECK_EQ(devices.size(), names.size());
  for (std::size_t i = 0; i < names.size(); ++i) CHECK_EQ(devices[i].name, names[i]);
  CHECK_EQ(devices[3].interfaces[0].name, std::string("eth1"));
}

TEST_CASE(the_rails_share_the_speed_of_their_own_nic) {
  const auto devices = devices_of({nic("eth0", 100000), nic("eth1", 40000)}, 4);
  int eth0_mbps = 0;
  int eth1_mbps = 0;
  for (const Device& device : devices)
    (device.interfaces[0].name == "eth0" ? eth0_mbps : eth1_mbps) += device.speed_mbps;
  CHECK_EQ(eth0_mbps, 100000);
  CHECK_EQ(eth1_mbps, 40000);
  CHECK_EQ(devices[0].speed_mbps, 25000);
}

TEST_CASE(unknown_speed_is_10_gigabit_in_all) {
  CHECK_EQ(devices_of({nic("lo", 0)}, 1)[0].speed_mbps, 10000);
  for (const Device& device : devices_of({nic("lo", 0)}, 4)) CHECK_EQ(device.speed_mbps, 2500);
}

TEST_CASE(a_rail_is_never_too_slow_for_a_channel) {
  for (const Device& device : devices_of({nic("eth0", 1000)}, 4)) CHECK_EQ(device.told_mbps(), 1000);
  CHECK_EQ(devices_of({nic("eth0", 100)}, 1)[0].told_mbps(), 1000);
}

// NCCL's channels are of 0.12, 0.24, 1.2, 2.4, 3, 6 GB/s and more, the fastest that fits, and as many of it as fit.
TEST_CASE(a_rail_has_room_for_one_channel_and_not_for_two_of_the_next_slower) {
  const auto told = [](int nic_mbps) { return devices_of({nic("eth0", nic_mbps)}, std::nullopt)[0].told_mbps(); };
  CHECK_EQ(told(15'000), 3'750);
  CHECK_EQ(told(16'000), 10'000);
  CHECK_EQ(told(25'000), 10'000);
  CHECK_EQ(told(39'999), 10'000);
  CHECK_EQ(told(50'000), 12'500);
}

TEST_CASE(an_interface_of_any_speed_has_four_rails_unless_somebody_says) {
  const auto devices = devices_of({nic("fast0", 100000), nic("virtual0", 0)}, std::nullopt);
  const std::vector<std::string> names = {"fast0",   "virtual0",   "fast0#1", "virtual0#1",
                                          "fast0#2", "virtual0#2", "fast0#3", "virtual0#3"};
  CHECK_EQ(devices.size(), names.size());
  for (std::size_t i = 0; i < names.size(); ++i) CHECK_EQ(devices[i].name, names[i]);
  CHECK_EQ(devices[0].speed_mbps, 25000);
}

TEST_CASE(names_and_guids_are_unique_and_repeatable) {
  const std::vector<NetworkInterface> interfaces = {nic("eth0", 0), nic("eth1", 0), nic("bond0.7", 0)};
  const auto devices = devices_of(interfaces, 16);
  const auto again = devices_of(interfaces, 16);
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
  const auto two = devices_of(interfaces, 2);
  const auto four = devices_of(interfaces, 4);
  for (std::size_t i = 0; i < two.size(); ++i) {
    CHECK_EQ(two[i].name, four[i].name);
    CHECK_EQ(two[i].guid, four[i].guid);
  }
}

TEST_CASE(no_more_devices_than_channels) {
  const std::vector<NetworkInterface> sixteen(16, nic("eth", 10000));
  const auto devices = devices_of(sixteen, 16);
  CHECK_EQ(devices.size(), std::size_t{64});
  CHECK_EQ(devices[0].speed_mbps, 2500);  // of the 4 rails that there are, not of the 16 asked for
  CHECK_EQ(devices_of(std::vector<NetworkInterface>(100, nic("eth", 0)), 4).size(), std::size_t{100});
}

TEST_CASE(nothing_and_less_than_one_rail) {
  CHECK(devices_of({}, 4).empty());
  CHECK_EQ(devices_of({nic("eth0", 0)}, 0).size(), std::size_t{1});
  CHECK_EQ(devices_of({nic("eth0", 0)}, -3).size(), std::size_t{1});
}

TEST_CASE(joined_interfaces_are_one_device_with_the_sum_of_their_speeds) {
  const auto devices =
      make_devices({{nic("eth0", 10000, "/sys/devices/a"), nic("eth1", 2500)}, {nic("eth2", 10000)}}, 2);
  const std::vector<std::string> names = {"eth0+eth1", "eth2", "eth0+eth1#1", "eth2#1"};
  CHECK_EQ(devices.size(), names.size());
  for (std::size_t i = 0; i < names.size(); ++i) CHECK_EQ(devices[i].name, names[i]);
  CHECK_EQ(devices[0].speed_mbps, 6250);
  CHECK_EQ(devices[0].pci_path, std::string("/sys/devices/a"));
  CHECK_EQ(devices[0].interfaces.size(), std::size_t{2});
  // The speed of one is unknown, so that of the device is, too.
  CHECK_EQ(make_devices({{nic("eth0", 10000), nic("tun0", 0)}}, std::nullopt).size(), std::size_t{4});
}

TEST_CASE(interfaces_are_grouped_as_the_setting_says) {
  std::vector<NetworkInterface> four;
  for (const char* name : {"eth0", "eth1", "eth2", "eth3"}) four.push_back(nic_with_address(name, AF_INET));
  std::vector<std::string> lost;
  CHECK_EQ(grouped({}, four, true, &lost), std::string("eth0 eth1 eth2 eth3"));
  CHECK_EQ(grouped({false, {{"eth0", "eth2"}}}, four, true, &lost), std::string("eth0+eth2 eth1 eth3"));
  CHECK_EQ(grouped({false, {{"eth3", "eth1"}, {"eth2", "eth0"}}}, four, true, &lost),
           std::string("eth0+eth2 eth1+eth3"));
  CHECK_EQ(grouped({true, {}}, four, true, &lost), std::string("eth0+eth1+eth2+eth3"));
  CHECK(lost.empty());
  // Nobody has said which interfaces a job may use.
  CHECK_EQ(grouped({true, {}}, four, false, &lost), std::string("eth0 eth1 eth2 eth3"));
  CHECK_EQ(lost.size(), std::size_t{1});
  CHECK_EQ(lost[0],
           "BAGUA_NET_JOIN_NICS=auto joins only what NCCL_SOCKET_IFNAME selects, and that is not set: "
           "eth0, eth1, eth2, eth3 are a device each");
  CHECK_EQ(grouped({true, {}}, {four[0]}, false, &lost), std::string("eth0"));
  CHECK(lost.empty());
}

TEST_CASE(a_host_without_some_of_the_interfaces_joins_the_others) {
  const std::vector<NetworkInterface> one = {nic_with_address("eth0", AF_INET)};
  std::vector<std::string> lost;
  CHECK_EQ(grouped({false, {{"eth0", "eth1"}}}, one, true, &lost), std::string("eth0"));
  CHECK_EQ(lost.size(), std::size_t{1});
  CHECK(lost[0].find("eth1") != std::string::npos);
  std::vector<NicGroup> groups;
  const auto status = group_interfaces({false, {{"eth8", "eth9"}}}, one, true, &groups, &lost);
  CHECK(!status.is_ok());
  CHECK(status.message().find("BAGUA_NET_JOIN_NICS names eth8, eth9, and NCCL uses eth0") != std::string::npos);
}

TEST_CASE(an_interface_that_is_named_in_full_and_cannot_be_used_is_told_of) {
  const InterfaceChoice used = {nic_with_address("eth0", AF_INET), true, "matches"};
  const InterfaceChoice down = {nic_with_address("eth1", AF_INET), false, "skipped: not running"};
  const auto said = [&](const std::optional<JoinNics>& set, const std::string& filter) {
    std::vector<NicGroup> groups;
    std::vector<std::string> lost;
    const auto environment = [&](const std::string& name) {
      return name == "NCCL_SOCKET_IFNAME" ? std::optional<std::string>(filter) : std::nullopt;
    };
    CHECK_OK(group_interfaces(set, {used, down}, environment, &groups, &lost));
    return lost.empty() ? std::string() : lost.back();
  };
  const std::string told = "eth1 is not joined, also if that changes before the job ends: skipped: not running";
  CHECK_EQ(said(JoinNics{false, {{"eth0", "eth1"}}}, "eth"), told);
  CHECK_EQ(said(JoinNics{true, {}}, "=eth0,eth1"), told);
  CHECK_EQ(said(JoinNics{true, {}}, "eth0"), std::string());
  CHECK_EQ(said(JoinNics{true, {}}, "=eth0,eth12"), std::string());
  CHECK_EQ(said(JoinNics{true, {}}, ""), std::string());
  CHECK_EQ(said(JoinNics{}, "=eth0,eth1"), std::string());
  CHECK_EQ(said(std::nullopt, "=eth0,eth1"), told);
}

// Without BAGUA_NET_JOIN_NICS.
TEST_CASE(interfaces_that_the_user_lists_are_joined) {
  std::vector<InterfaceChoice> two = {{nic_with_address("eth0", AF_INET), true, "matches"},
                                      {nic_with_address("eth1", AF_INET), true, "matches"}};
  std::map<std::string, std::string> variables;
  const auto groups = [&](const std::optional<JoinNics>& set) {
    std::vector<NicGroup> found;
    std::vector<std::string> lost;
    const auto environment = [&](const std::string& name) {
      const auto known = variables.find(name);
      return known == variables.end() ? std::nullopt : std::optional<std::string>(known->second);
    };
    CHECK_OK(group_interfaces(set, two, environment, &found, &lost));
    CHECK(lost.empty());
    return found.size();
  };
  for (const char* list : {"eth0,eth1", "=eth0,eth1", "eth0,eth1,"}) {
    variables = {{"NCCL_SOCKET_IFNAME", list}};
    CHECK_EQ(groups({}), std::size_t{1});
    CHECK_EQ(groups(JoinNics{}), std::size_t{2});  // "off"
    variables["NCCL_NET_MERGE_LEVEL"] = "LOC";
    CHECK_EQ(groups({}), std::size_t{1});
    variables["NCCL_NET_MERGE_LEVEL"] = "PORT";
    CHECK_EQ(groups({}), std::size_t{2});
    variables.erase("NCCL_NET_MERGE_LEVEL");
    variables["NCCL_NET_FORCE_MERGE"] = "eth0,eth1";
    CHECK_EQ(groups({}), std::size_t{2});
  }
  // One prefix, and what is not used, name none.
  for (const char* chosen : {"eth", "=eth0,", "^lo,docker", "^=lo,docker", ","}) {
    variables = {{"NCCL_SOCKET_IFNAME", chosen}};
    CHECK_EQ(groups({}), std::size_t{2});
  }
  variables.clear();
  CHECK_EQ(groups({}), std::size_t{2});
  // What cannot be joined is no news to who has not asked for it.
  variables = {{"NCCL_SOCKET_IFNAME", "eth0,eth1"}};
  two[0].interface.is_loopback = true;
  CHECK_EQ(groups({}), std::size_t{2});
}

TEST_CASE(what_cannot_be_joined_is_a_device_of_its_own) {
  std::vector<std::string> lost;
  const auto mixed = {nic_with_address("eth0", AF_INET), nic_with_address("eth1", AF_INET6)};
  CHECK_EQ(grouped({true, {}}, mixed, true, &lost), std::string("eth0 eth1"));
  CHECK_EQ(lost.size(), std::size_t{1});
  std::vector<NetworkInterface> many;
  for (int i = 0; i < 9; ++i) many.push_back(nic_with_address("e" + std::to_string(i), AF_INET));
  CHECK_EQ(grouped({true, {}}, many, true, &lost), std::string("e0+e1+e2+e3+e4+e5+e6+e7+e8"));
  CHECK(lost.empty());
}
