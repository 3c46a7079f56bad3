#include "os/interface_speed.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>

#include "os/sysfs_file.h"

namespace bagua_net {
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

}  // namespace bagua_net
