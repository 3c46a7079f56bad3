// The speed of a network interface, from sysfs. `sysfs_root` is "/sys", or a test's own tree.
#pragma once

#include <string>

namespace bagua_net {

// Mb/s; 0 = unknown. The kernel reports a speed for every veth, bridge and tun, mostly 10 Gb/s, which says nothing
// about the network that carries their packets. A speed therefore counts only if the interface has a device, on
// whichever bus. For an interface above others (VLAN, bond, macvlan, bridge) it is limited to the sum of theirs by the
// same rule, which is 0 if there are none or if a container does not show them. The sum also keeps what a bridge
// reports, the speed of its fastest port, from being that of a container's veth.
int interface_speed_mbps(const std::string& sysfs_root, const std::string& interface);

}  // namespace bagua_net
