// What sysfs says of an interface, over made-up trees: which speeds count, where it is, and on which NUMA node. What
// each kind of interface tells is what Linux lets it tell.
#include "os/sysfs.h"

#include <string>
#include <vector>

#include "support/check.h"
#include "support/temporary_tree.h"

namespace {

class Sysfs {
 public:
  // `device` below devices/, such as "pci0000:00/0000:00:05.0".
  void physical(const std::string& name, const std::string& speed, const std::string& device) const {
    tree_.make_directory("devices/" + device + "/net/" + name);
    add(name, speed, "devices/" + device + "/net/" + name);
    tree_.link("class/net/" + name + "/device", "devices/" + device);
  }
  void nic(const std::string& name, const std::string& speed) const { physical(name, speed, "pci0000:00/" + name); }
  void over(const std::string& name, const std::string& speed, const std::vector<std::string>& lower) const {
    add(name, speed, "devices/virtual/net/" + name);
    for (const std::string& one : lower) tree_.link("class/net/" + name + "/lower_" + one, "class/net/" + one);
  }
  void alone(const std::string& name, const std::string& speed) const { over(name, speed, {}); }
  void link(const std::string& path, const std::string& target) const { tree_.link(path, target); }
  void make_directory(const std::string& path) const { tree_.make_directory(path); }

  int mbps(const std::string& name) const { return bagua_net::interface_speed_mbps(tree_.root(), name); }

 private:
  void add(const std::string& name, const std::string& speed, const std::string& folder) const {
    tree_.write(folder + "/speed", speed + "\n");
    tree_.link("class/net/" + name, folder);
  }

  const TemporaryTree tree_;
};

}  // namespace

// --- an interface with a device ---

TEST_CASE(the_speed_of_a_nic_counts_on_every_bus) {
  const Sysfs sysfs;
  sysfs.physical("eth0", "100000", "pci0000:16/0000:16:02.0/0000:17:00.1");
  sysfs.physical("eth1", "25000", "pci0000:00/0000:00:03.0/virtio2");
  sysfs.physical("eth2", "50000", "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00/0d74ab1c");
  sysfs.physical("eth3", "10000", "platform/17020000.ethernet");
  sysfs.physical("eth4", "2500", "pci0000:00/0000:00:14.0/usb2/2-1/2-1:1.0");
  CHECK_EQ(sysfs.mbps("eth0"), 100000);
  CHECK_EQ(sysfs.mbps("eth1"), 25000);
  CHECK_EQ(sysfs.mbps("eth2"), 50000);
  CHECK_EQ(sysfs.mbps("eth3"), 10000);
  CHECK_EQ(sysfs.mbps("eth4"), 2500);
}

TEST_CASE(a_nic_that_does_not_know_its_speed) {
  const Sysfs sysfs;
  for (const char* said : {"-1", "4294967295", "0", "", "fast"}) {
    const std::string name = std::string("eth") + said;
    sysfs.nic(name, said);
    CHECK_EQ(sysfs.mbps(name), 0);
  }
  sysfs.make_directory("devices/unreadable/speed");  // as of an interface that is down
  sysfs.link("class/net/down", "devices/unreadable");
  sysfs.make_directory("devices/unreadable/device");
  CHECK_EQ(sysfs.mbps("down"), 0);
  CHECK_EQ(sysfs.mbps("removed"), 0);
}

// --- an interface that the kernel makes up, with the speed that it makes up for it ---

TEST_CASE(the_speed_of_an_interface_over_nothing_is_unknown) {
  const Sysfs sysfs;
  for (const char* name : {"veth", "tun", "tap", "dummy"}) {
    sysfs.alone(name, "10000");
    CHECK_EQ(sysfs.mbps(name), 0);
  }
  sysfs.alone("old_tun", "10");
  CHECK_EQ(sysfs.mbps("old_tun"), 0);
  sysfs.alone("lo", "");
  CHECK_EQ(sysfs.mbps("lo"), 0);
}

TEST_CASE(a_link_to_a_device_that_is_hidden_does_not_count) {
  const Sysfs sysfs;
  sysfs.alone("eth0", "10000");
  sysfs.link("class/net/eth0/device", "devices/that/a/container/hides");
  CHECK_EQ(sysfs.mbps("eth0"), 0);
}

// --- an interface over others ---

TEST_CASE(vlans_and_macvlans_have_the_speed_of_their_nic) {
  const Sysfs sysfs;
  sysfs.nic("eth0", "25000");
  for (const char* name : {"eth0.100", "macvlan0", "ipvlan0", "vxlan0"}) {
    sysfs.over(name, "25000", {"eth0"});
    CHECK_EQ(sysfs.mbps(name), 25000);
  }
  sysfs.over("qinq", "25000", {"eth0.100"});
  CHECK_EQ(sysfs.mbps("qinq"), 25000);
}

TEST_CASE(a_macvlan_in_a_container_does_not_show_its_nic) {
  const Sysfs sysfs;
  sysfs.alone("net1", "25000");  // it passes the speed on, and the link to eth0 of the host is not there
  CHECK_EQ(sysfs.mbps("net1"), 0);
}

TEST_CASE(an_interface_over_an_unknown_speed_has_none) {
  const Sysfs sysfs;
  sysfs.nic("eth0", "-1");
  sysfs.over("eth0.7", "-1", {"eth0"});
  sysfs.alone("veth0", "10000");
  sysfs.over("veth0.7", "10000", {"veth0"});
  CHECK_EQ(sysfs.mbps("eth0.7"), 0);
  CHECK_EQ(sysfs.mbps("veth0.7"), 0);
}

TEST_CASE(a_bond_has_the_speed_that_it_tells) {
  const Sysfs sysfs;
  sysfs.nic("eth0", "25000");
  sysfs.nic("eth1", "25000");
  sysfs.over("lacp", "50000", {"eth0", "eth1"});
  sysfs.over("active_backup", "25000", {"eth0", "eth1"});
  sysfs.over("lacp.100", "50000", {"lacp"});
  sysfs.over("without_link", "-1", {"eth0", "eth1"});
  CHECK_EQ(sysfs.mbps("lacp"), 50000);
  CHECK_EQ(sysfs.mbps("active_backup"), 25000);
  CHECK_EQ(sysfs.mbps("lacp.100"), 50000);
  CHECK_EQ(sysfs.mbps("without_link"), 0);
}

TEST_CASE(a_bridge_has_the_speed_of_its_nics_and_not_that_of_its_containers) {
  // A bridge tells the fastest port's.
  const Sysfs sysfs;
  sysfs.nic("eth0", "25000");
  sysfs.nic("eth1", "1000");
  sysfs.nic("eth2", "-1");
  sysfs.alone("veth0", "10000");
  sysfs.alone("tap0", "10000");
  sysfs.over("over_nic", "25000", {"eth0"});
  sysfs.over("over_nics", "25000", {"eth0", "eth1"});
  sysfs.over("over_nic_and_containers", "25000", {"eth0", "tap0", "veth0"});
  sysfs.over("over_slow_nic_and_container", "10000", {"eth1", "veth0"});
  sysfs.over("over_unknown_nic_and_container", "10000", {"eth2", "veth0"});
  sysfs.over("docker0", "10000", {"veth0"});
  sysfs.over("empty", "-1", {});
  CHECK_EQ(sysfs.mbps("over_nic"), 25000);
  CHECK_EQ(sysfs.mbps("over_nics"), 25000);
  CHECK_EQ(sysfs.mbps("over_nic_and_containers"), 25000);
  CHECK_EQ(sysfs.mbps("over_slow_nic_and_container"), 1000);
  CHECK_EQ(sysfs.mbps("over_unknown_nic_and_container"), 0);
  CHECK_EQ(sysfs.mbps("docker0"), 0);
  CHECK_EQ(sysfs.mbps("empty"), 0);
}

TEST_CASE(interfaces_that_stand_on_each_other_end) {
  const Sysfs sysfs;
  sysfs.over("a", "10000", {"b"});
  sysfs.over("b", "10000", {"a"});
  CHECK_EQ(sysfs.mbps("a"), 0);
}

TEST_CASE(a_sum_beyond_an_int_does_not_wrap) {
  const Sysfs sysfs;
  sysfs.nic("eth0", "2000000000");
  sysfs.nic("eth1", "2000000000");
  sysfs.over("bond0", "1000", {"eth0", "eth1"});
  CHECK_EQ(sysfs.mbps("bond0"), 1000);
}

TEST_CASE(pci_path_is_the_real_path_of_the_device) {
  const TemporaryTree sysfs;
  const std::string function = "devices/pci0000:16/0000:16:02.0/0000:17:00.1";
  sysfs.write(function + "/numa_node", "1\n");
  sysfs.link(function + "/net/eth0/device", function);
  sysfs.link("class/net/eth0", function + "/net/eth0");
  sysfs.make_directory("devices/virtual/net/bond0");
  sysfs.link("class/net/bond0", "devices/virtual/net/bond0");
  CHECK_EQ(bagua_net::interface_pci_path(sysfs.root(), "eth0"), sysfs.root() + "/" + function);
  CHECK_EQ(bagua_net::interface_numa_node(sysfs.root(), "eth0"), 1);
  CHECK_EQ(bagua_net::interface_pci_path(sysfs.root(), "bond0"), std::string());
  CHECK_EQ(bagua_net::interface_numa_node(sysfs.root(), "bond0"), -1);
}

TEST_CASE(numa_node_of_a_virtio_nic_is_its_parents) {
  const TemporaryTree sysfs;
  sysfs.write("devices/pci0000:00/0000:00:03.0/numa_node", "0\n");
  sysfs.write("devices/pci0000:00/0000:00:04.0/numa_node", "-1\n");
  sysfs.make_directory("devices/pci0000:00/0000:00:03.0/virtio2");
  sysfs.make_directory("devices/pci0000:00/0000:00:04.0/virtio3");
  sysfs.make_directory("devices/platform/nic");
  sysfs.link("class/net/eth0/device", "devices/pci0000:00/0000:00:03.0/virtio2");
  sysfs.link("class/net/eth1/device", "devices/pci0000:00/0000:00:04.0/virtio3");
  sysfs.link("class/net/eth2/device", "devices/platform/nic");
  CHECK_EQ(bagua_net::interface_numa_node(sysfs.root(), "eth0"), 0);
  CHECK_EQ(bagua_net::interface_numa_node(sysfs.root(), "eth1"), -1);
  CHECK_EQ(bagua_net::interface_numa_node(sysfs.root(), "eth2"), -1);
}
