#include "os/sysfs.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string_view>

#include "base/text_parsing.h"

namespace bagua_net {

std::optional<std::string> read_first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

std::vector<std::string> directory_entries(const std::string& path) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path.c_str()), ::closedir);
  if (!directory) return names;
  while (const dirent* entry = ::readdir(directory.get())) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

namespace {

// The kernel stacks interfaces no deeper (MAX_NEST_DEV).
constexpr int kMaxLevels = 8;

int told_mbps(const std::string& path) {
  const auto line = read_first_line(path);
  if (!line) return 0;
  errno = 0;
  const long long speed = std::strtoll(line->c_str(), nullptr, 10);
  // Unknown is -1, or 4294967295 in old kernels.
  return errno == 0 && speed > 0 && speed <= INT_MAX ? static_cast<int>(speed) : 0;
}

int counted_mbps(const std::string& interfaces, const std::string& interface, int levels) {
  const std::string folder = interfaces + interface + "/";
  const int told = told_mbps(folder + "speed");
  // access() follows the link: in a container, it may lead to a device that is hidden there.
  if (told == 0 || ::access((folder + "device").c_str(), F_OK) == 0) return told;
  if (levels == 0) return 0;
  // The kernel makes a link lower_NAME for each interface below that is in the same network namespace.
  const std::string prefix = "lower_";
  std::int64_t below = 0;
  for (const std::string& entry : directory_entries(folder)) {
    if (entry.rfind(prefix, 0) == 0) below += counted_mbps(interfaces, entry.substr(prefix.size()), levels - 1);
  }
  return static_cast<int>(std::min<std::int64_t>(told, below));
}

}  // namespace

int interface_speed_mbps(const std::string& sysfs_root, const std::string& interface) {
  return counted_mbps(sysfs_root + "/class/net/", interface, kMaxLevels);
}

namespace {

// How far above an interface's device its PCI function can be: a virtio NIC is one level below it, USB NICs several.
constexpr int kMaxLevelsToFunction = 16;

std::string real_path(const std::string& path) {
  struct Free {
    void operator()(char* text) const { std::free(text); }
  };
  const std::unique_ptr<char, Free> resolved(::realpath(path.c_str(), nullptr));
  return resolved ? resolved.get() : "";
}

}  // namespace

std::string interface_pci_path(const std::string& sysfs_root, const std::string& interface) {
  return real_path(sysfs_root + "/class/net/" + interface + "/device");
}

int interface_numa_node(const std::string& sysfs_root, const std::string& interface) {
  // Only PCI functions have the file; a virtio or USB device is a child of one.
  std::string device = interface_pci_path(sysfs_root, interface);
  for (int level = 0; level < kMaxLevelsToFunction && device.size() > sysfs_root.size(); ++level) {
    if (const auto line = read_first_line(device + "/numa_node")) {
      char* end = nullptr;
      const long node = std::strtol(line->c_str(), &end, 10);
      return end != line->c_str() && node >= 0 ? static_cast<int>(node) : -1;
    }
    const auto slash = device.find_last_of('/');
    if (slash == std::string::npos) break;
    device.resize(slash);
  }
  return -1;
}

namespace {

constexpr std::size_t kPortsNamed = 4;

// As NCCL reads NCCL_IB_HCA: "^" first turns the list round, "=" next makes names exact instead of prefixes, and ":2"
// after a name is a port.
bool hca_is_selected(const std::string& text, const std::string& device, const std::string& port) {
  std::string_view list = text;
  const bool negated = !list.empty() && list.front() == '^';
  if (negated) list.remove_prefix(1);
  const bool exact = !list.empty() && list.front() == '=';
  if (exact) list.remove_prefix(1);
  bool listed = list.empty();
  for (const std::string_view entry : split(list, ',')) {
    const auto colon = entry.find(':');
    const std::string_view name = entry.substr(0, colon);
    if (name.empty()) continue;
    const bool named = exact ? name == device : device.compare(0, name.size(), name) == 0;
    listed = listed || (named && (colon == std::string_view::npos || entry.substr(colon + 1) == port));
  }
  return listed != negated;
}

bool has_chosen_a_network(const EnvironmentReader& environment) {
  // NCCL reads NCCL_IB_DISABLE as an integer, and any but 0 disables.
  const std::optional<std::string> disabled = environment("NCCL_IB_DISABLE");
  if (disabled && std::strtol(disabled->c_str(), nullptr, 0) != 0) return true;
  const std::optional<std::string> network = environment("NCCL_NET");
  return network && !network->empty();
}

}  // namespace

std::vector<RdmaPort> rdma_ports(const EnvironmentReader& environment, const std::string& sysfs_root) {
  const bool is_free = !has_chosen_a_network(environment);
  const std::string selected = environment("NCCL_IB_HCA").value_or("");
  std::vector<RdmaPort> found;
  const std::string devices = sysfs_root + "/class/infiniband/";
  for (const std::string& device : directory_entries(devices)) {
    const std::string ports = devices + device + "/ports/";
    for (const std::string& port : directory_entries(ports)) {
      const std::string folder = ports + port + "/";
      // "4: ACTIVE"; 5 is ACTIVE_DEFER, a port that is losing its link.
      const std::string state = read_first_line(folder + "state").value_or("");
      const std::string link = read_first_line(folder + "link_layer").value_or("");
      const std::string rate = read_first_line(folder + "rate").value_or("");  // "400 Gb/sec (4X NDR)"
      const auto colon = state.find(": ");
      RdmaPort one;
      one.name = port == "1" ? device : device + ":" + port;
      one.state = colon == std::string::npos ? "unknown" : state.substr(colon + 2);
      one.link = link == "Ethernet" ? "RDMA over Ethernet" : link == "InfiniBand" ? link : "";
      one.rate = rate.substr(0, rate.find(" ("));
      one.would_be_used = is_free && one.state == "ACTIVE" && hca_is_selected(selected, device, port);
      found.push_back(one);
    }
  }
  return found;
}

std::string unused_rdma(const std::vector<RdmaPort>& ports) {
  std::string names;
  std::size_t count = 0;
  for (const RdmaPort& port : ports) {
    if (!port.would_be_used || ++count > kPortsNamed) continue;
    const std::string facts = port.link + (port.link.empty() || port.rate.empty() ? "" : ", ") + port.rate;
    names += (count == 1 ? "" : ", ") + port.name + (facts.empty() ? "" : " (" + facts + ")");
  }
  if (count == 0) return "";
  if (count > kPortsNamed) names += " and " + std::to_string(count - kPortsNamed) + " more";
  return names + (count == 1 ? " is up" : " are up");
}

std::string rdma_question(const EnvironmentReader& environment, const std::string& sysfs_root) {
  const std::string unused = unused_rdma(rdma_ports(environment, sysfs_root));
  if (unused.empty()) return "";
  return unused +
         ", and NCCL uses TCP through Bagua-Net: is that wanted? RDMA is usually faster. ENABLE_BAGUA_NET=0 uses it; "
         "NCCL_IB_DISABLE=1 keeps TCP without this question.";
}

}  // namespace bagua_net
