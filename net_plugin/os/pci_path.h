// Where a network interface sits in the machine, from sysfs. `sysfs_root` is "/sys", or a test's own tree.
#pragma once

#include <string>

namespace bagua_net {

// The real path of the interface's device, character by character what NCCL's own transport reports, so that NCCL
// places our devices where it would place its own. "" for virtual interfaces (bonds, VLANs, bridges, veth, lo). NCCL
// itself checks that the path is of a PCI device; it attaches others (virtio, USB) to the first CPU.
std::string interface_pci_path(const std::string& sysfs_root, const std::string& interface);

// NUMA node of the interface's device; -1 = unknown, or a machine with one node.
int interface_numa_node(const std::string& sysfs_root, const std::string& interface);

}  // namespace bagua_net
