// What sysfs says of network interfaces, and how its small text files are read, as those of procfs and cgroupfs.
// `sysfs_root` is "/sys", or a test's own tree.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/environment_reader.h"

namespace bagua_net {

// Finds RDMA ports that are up: a job that could use them should not be moved to TCP without being told.
// "mlx5_0 port 1", ... for every port in state ACTIVE below <sysfs_root>/class/infiniband, sorted. Empty if there is
// none, or if sysfs cannot be read. Covers InfiniBand, RoCE, iWARP and EFA: all of them register there.
std::vector<std::string> active_rdma_ports(const std::string& sysfs_root);

// The warning for the log, or "" if nothing is lost: no port is up, or NCCL_IB_DISABLE tells NCCL not to use them.
std::string rdma_replaced_warning(const EnvironmentReader& environment, const std::string& sysfs_root);

// The first line without its newline; nullopt if the file is missing or unreadable. The speed of an interface that is
// down, for one, exists but answers EINVAL.
std::optional<std::string> read_first_line(const std::string& path);

// Sorted, without those that begin with a point; none if the folder cannot be read.
std::vector<std::string> directory_entries(const std::string& path);

// The real path of the interface's device, character by character what NCCL's own transport reports, so that NCCL
// places our devices where it would place its own. "" for virtual interfaces (bonds, VLANs, bridges, veth, lo). NCCL
// itself checks that the path is of a PCI device; it attaches others (virtio, USB) to the first CPU.
std::string interface_pci_path(const std::string& sysfs_root, const std::string& interface);

// NUMA node of the interface's device; -1 = unknown, or a machine with one node.
int interface_numa_node(const std::string& sysfs_root, const std::string& interface);

// Mb/s; 0 = unknown. The kernel reports a speed for every veth, bridge and tun, mostly 10 Gb/s, which says nothing
// about the network that carries their packets. A speed therefore counts only if the interface has a device, on
// whichever bus. For an interface above others (VLAN, bond, macvlan, bridge) it is limited to the sum of theirs by the
// same rule, which is 0 if there are none or if a container does not show them. The sum also keeps what a bridge
// reports, the speed of its fastest port, from being that of a container's veth.
int interface_speed_mbps(const std::string& sysfs_root, const std::string& interface);

}  // namespace bagua_net
