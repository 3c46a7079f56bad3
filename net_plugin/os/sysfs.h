// What sysfs says of network interfaces, and how its small text files are read, as those of procfs and cgroupfs.
// `sysfs_root` is "/sys", or a test's own tree.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/text_parsing.h"

namespace bagua_net {

// A port of a device that can do RDMA. Covers InfiniBand, RoCE, iWARP and EFA: all of them register below
// <sysfs_root>/class/infiniband.
struct RdmaPort {
  std::string name;            // "mlx5_0", or "mlx5_0:2" for another port than the first
  std::string state;           // "ACTIVE", "DOWN", "INIT", ...
  std::string link;            // "InfiniBand", or "RDMA over Ethernet"; "": the driver does not say
  std::string rate;            // "400 Gb/sec"; "": the driver does not say
  bool would_be_used = false;  // by NCCL's own transport, which Bagua-Net replaces
};

// Sorted by name. Empty if there is none, or if sysfs cannot be read. NCCL would use a port that is up, unless the user
// has chosen a network: NCCL_IB_DISABLE, NCCL_NET, or an NCCL_IB_HCA that leaves the port out, as that of storage.
std::vector<RdmaPort> rdma_ports(const EnvironmentReader& environment, const std::string& sysfs_root);

// "mlx5_0 (InfiniBand, 400 Gb/sec) is up", for the ports that NCCL would use; "": there is none.
std::string unused_rdma(const std::vector<RdmaPort>& ports);

// What a job that the plugin carries asks its user at its start; "": nothing.
std::string rdma_question(const EnvironmentReader& environment, const std::string& sysfs_root);

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
