// What sysfs says of an interface, over a made-up tree.
#include "os/pci_path.h"

#include <string>

#include "os/network_interface.h"
#include "support/check.h"
#include "support/temporary_tree.h"

TEST_CASE(speed_is_read_from_sysfs) {
  const TemporaryTree sysfs;
  sysfs.write("class/net/eth0/speed", "100000\n");
  sysfs.write("class/net/eth1/speed", "-1\n");
  sysfs.write("class/net/eth2/speed", "4294967295\n");
  sysfs.write("class/net/eth3/speed", "");
  sysfs.write("class/net/eth4/speed", "fast\n");
  sysfs.make_directory("class/net/eth5/speed");  // exists, cannot be read
  CHECK_EQ(bagua_net::interface_speed_mbps(sysfs.root(), "eth0"), 100000);
  for (const char* unknown : {"eth1", "eth2", "eth3", "eth4", "eth5", "eth6"}) {
    CHECK_EQ(bagua_net::interface_speed_mbps(sysfs.root(), unknown), 0);
  }
}

TEST_CASE(pci_path_is_the_real_path_of_the_device) {
  const TemporaryTree sysfs;
  const std::string function = "devices/pci0000:16/0000:16:02.0/0000:17:00.1";
  sysfs.write(function + "/net/eth0/speed", "25000\n");
  sysfs.write(function + "/numa_node", "1\n");
  sysfs.link(function + "/net/eth0/device", function);
  sysfs.link("class/net/eth0", function + "/net/eth0");
  sysfs.write("devices/virtual/net/bond0/speed", "50000\n");
  sysfs.link("class/net/bond0", "devices/virtual/net/bond0");
  CHECK_EQ(bagua_net::interface_pci_path(sysfs.root(), "eth0"), sysfs.root() + "/" + function);
  CHECK_EQ(bagua_net::interface_numa_node(sysfs.root(), "eth0"), 1);
  CHECK_EQ(bagua_net::interface_pci_path(sysfs.root(), "bond0"), std::string());
  CHECK_EQ(bagua_net::interface_numa_node(sysfs.root(), "bond0"), -1);
  CHECK_EQ(bagua_net::interface_speed_mbps(sysfs.root(), "bond0"), 50000);
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
