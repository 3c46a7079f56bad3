// Finds RDMA ports that are up: a job that could use them should not be moved to TCP without being told.
#pragma once

#include <string>
#include <vector>

#include "base/environment_reader.h"

namespace bagua_net {

// "mlx5_0 port 1", ... for every port in state ACTIVE below <sysfs_root>/class/infiniband, sorted. Empty if there is
// none, or if sysfs cannot be read. Covers InfiniBand, RoCE, iWARP and EFA: all of them register there.
std::vector<std::string> active_rdma_ports(const std::string& sysfs_root);

// The warning for the log, or "" if nothing is lost: no port is up, or NCCL_IB_DISABLE tells NCCL not to use them.
std::string rdma_replaced_warning(const EnvironmentReader& environment, const std::string& sysfs_root);

}  // namespace bagua_net
