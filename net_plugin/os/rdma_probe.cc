#include "os/rdma_probe.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>

namespace bagua_net {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kPortsNamed = 4;

// Entries of a directory, sorted; none if it cannot be read.
std::vector<fs::path> entries(const fs::path& directory) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    found.push_back(entry->path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

std::vector<std::string> active_rdma_ports(const std::string& sysfs_root) {
  std::vector<std::string> active;
  for (const fs::path& device : entries(fs::path(sysfs_root) / "class" / "infiniband")) {
    for (const fs::path& port : entries(device / "ports")) {
      // "4: ACTIVE"; 5 is ACTIVE_DEFER, a port that is losing its link.
      std::ifstream file(port / "state");
      std::string state;
      if (!std::getline(file, state) || state.rfind("4:", 0) != 0) continue;
      active.push_back(device.filename().string() + " port " + port.filename().string());
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
