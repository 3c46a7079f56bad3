#include "os/rdma_probe.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <optional>

#include "os/sysfs_file.h"

namespace bagua_net {
namespace {

constexpr std::size_t kPortsNamed = 4;

}  // namespace

std::vector<std::string> active_rdma_ports(const std::string& sysfs_root) {
  std::vector<std::string> active;
  const std::string devices = sysfs_root + "/class/infiniband/";
  for (const std::string& device : directory_entries(devices)) {
    const std::string ports = devices + device + "/ports/";
    for (const std::string& port : directory_entries(ports)) {
      // "4: ACTIVE"; 5 is ACTIVE_DEFER, a port that is losing its link.
      const std::optional<std::string> state = read_first_line(ports + port + "/state");
      if (state && state->rfind("4:", 0) == 0) active.push_back(device + " port " + port);
    }
  }
  return active;
}

std::string rdma_replaced_warning(const EnvironmentReader& environment, const std::string& sysfs_root) {
  // NCCL reads this variable as an integer, and any but 0 disables.
  const std::optional<std::string> disabled = environment("NCCL_IB_DISABLE");
  if (disabled && std::strtol(disabled->c_str(), nullptr, 0) != 0) return "";
  const std::vector<std::string> ports = active_rdma_ports(sysfs_root);
  if (ports.empty()) return "";
  std::string names;
  for (std::size_t index = 0; index < std::min(ports.size(), kPortsNamed); ++index) {
    names += (index == 0 ? "" : ", ") + ports[index];
  }
  if (ports.size() > kPortsNamed) names += " and " + std::to_string(ports.size() - kPortsNamed) + " more";
  return "this host has an active RDMA network (" + names +
         ") and Bagua-Net carries this job over TCP instead of it, which is most likely slower. Set "
         "ENABLE_BAGUA_NET=0 to use the RDMA network, or NCCL_IB_DISABLE=1 to keep TCP without this warning";
}

}  // namespace bagua_net
