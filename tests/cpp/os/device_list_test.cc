// Which devices NCCL may join. What the tables make of it is in abi_join_test.cc.
#include "transport/device.h"

#include <sys/socket.h>

#include "support/check.h"

using bagua_net::Device;
using bagua_net::DeviceList;
using bagua_net::make_devices;
using bagua_net::NetworkInterface;
using bagua_net::NicGroup;
using check::contains;

namespace {

NetworkInterface local_nic(const std::string& name, int numa_node = 0, int family = AF_INET) {
  NetworkInterface interface;
  interface.name = name;
  interface.speed_mbps = 10000;
  interface.numa_node = numa_node;
  interface.pci_path = "/sys/devices/" + name;
  interface.address = bagua_net::SocketAddress(family, {10, 0, 0, 1}, 0, 0);
  return interface;
}

// Each alone.
std::vector<Device> one_each(const std::vector<NetworkInterface>& interfaces, int rails = 1) {
  std::vector<NicGroup> groups;
  for (const NetworkInterface& interface : interfaces) groups.push_back({interface});
  return make_devices(groups, rails);
}

// Why not; "": they were joined.
std::string refusal(DeviceList* devices, const std::vector<int>& numbers) {
  int number = 0;
  return devices->join(numbers, &number).message();
}

}  // namespace

TEST_CASE(only_what_nccl_has_a_place_for_is_joined) {
  DeviceList nodes(one_each({local_nic("eth0"), local_nic("eth1", 1), local_nic("eth2")}));
  CHECK(contains(refusal(&nodes, {0, 1}), "eth0, eth1 cannot be one device: eth0 is at NUMA node 0 and eth1 at 1"));
  CHECK_EQ(refusal(&nodes, {0, 2}), "");
  // A virtual machine tells no node.
  DeviceList unknown(one_each({local_nic("eth0", -1), local_nic("eth1", -1)}));
  CHECK_EQ(refusal(&unknown, {0, 1}), "");
}

TEST_CASE(only_addresses_of_one_family_are_joined) {
  DeviceList families(one_each({local_nic("eth0"), local_nic("eth1", 0, AF_INET6)}));
  CHECK(contains(refusal(&families, {0, 1}), "the addresses of eth0 and eth1 are of different families"));
  std::vector<NetworkInterface> eight;
  for (int number = 0; number < 8; ++number) eight.push_back(local_nic("eth" + std::to_string(number)));
  DeviceList many(one_each(eight));
  CHECK_EQ(refusal(&many, {0, 1, 2, 3, 4, 5, 6, 7}), "");
}

TEST_CASE(an_interface_is_joined_once) {
  DeviceList devices(make_devices(
      {{local_nic("eth0"), local_nic("eth1")}, {local_nic("eth2")}, {local_nic("eth3")}, {local_nic("eth4")}}, 1));
  CHECK(contains(refusal(&devices, {0, 1}), "BAGUA_NET_JOIN_NICS has joined eth0+eth1 already"));
  CHECK_EQ(refusal(&devices, {1, 2}), "");
  CHECK(contains(refusal(&devices, {2, 3}), "eth3 is in eth2+eth3 already"));
  CHECK(contains(refusal(&devices, {1, 2}), "eth2 is in eth2+eth3 already"));
  CHECK_EQ(devices.count(), 5);
  CHECK_EQ(devices.at(4)->speed_mbps, 20000);
  CHECK(devices.at(5) == nullptr);
}

TEST_CASE(rails_are_joined_with_the_same_rail) {
  DeviceList devices(one_each({local_nic("eth0"), local_nic("eth1"), local_nic("eth2")}, 2));
  // eth0, eth1, eth2, eth0#1: what NCCL asks for if a device may have four.
  CHECK(contains(refusal(&devices, {0, 1, 2, 3}), "some are rails of one interface"));
  CHECK(contains(refusal(&devices, {0, 4}), "some are rails of one interface"));
  CHECK_EQ(refusal(&devices, {0, 1, 3, 4}), "");
  CHECK_EQ(devices.count(), 8);
  CHECK_EQ(devices.at(6)->name, "eth0+eth1");
  CHECK_EQ(devices.at(7)->name, "eth0+eth1#1");
  CHECK_EQ(devices.at(7)->rail, 1);
}

TEST_CASE(restored_devices_have_their_numbers_and_count_again_when_they_are_joined) {
  DeviceList before(one_each({local_nic("eth0"), local_nic("eth1"), local_nic("eth2")}));
  int number = 0;
  CHECK_OK(before.join({0, 2}, &number));
  DeviceList after(one_each({local_nic("eth0"), local_nic("eth1"), local_nic("eth2")}));
  after.restore(before.joins());
  CHECK_EQ(after.count(), 3);
  CHECK_EQ(after.at(3)->name, "eth0+eth2");
  CHECK_EQ(after.joins().size(), std::size_t{1});
  const auto kept = after.at(3);
  CHECK_OK(after.join({0, 2}, &number));
  CHECK_EQ(number, 3);
  CHECK_EQ(after.count(), 4);
  CHECK(after.at(3) == kept);
  // Other devices than before.
  DeviceList other(one_each({local_nic("eth0"), local_nic("eth1"), local_nic("eth2")}));
  other.restore(before.joins());
  CHECK_OK(other.join({0, 1}, &number));
  CHECK_EQ(number, 3);
  CHECK_EQ(other.at(3)->name, "eth0+eth1");
  CHECK(other.at(4) == nullptr);
}
