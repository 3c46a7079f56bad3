// Where sysfs says that an interface is, over a made-up tree.
#include "os/sysfs.h"

#include <string>

#include "support/check.h"
#include "support/temporary_tree.h"

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
