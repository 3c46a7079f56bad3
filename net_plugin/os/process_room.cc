#include "os/process_room.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <climits>
#include <fstream>
#include <memory>

namespace bagua_net {
namespace {

// Eight ranks of a host, and what is not optional.
constexpr int kPortShare = 16;
constexpr int kDescriptorShare = 2;

int open_descriptors() {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir("/proc/self/fd"), ::closedir);
  if (directory == nullptr) return 0;
  int count = 0;
  while (::readdir(directory.get()) != nullptr) ++count;
  return count;
}

}  // namespace

int optional_descriptors() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return INT_MAX;
  const auto share = static_cast<int>(std::min<rlim_t>(limit.rlim_cur / kDescriptorShare, INT_MAX));
  return std::max(share - open_descriptors(), 0);
}

int optional_ports() {
  std::ifstream range("/proc/sys/net/ipv4/ip_local_port_range");
  int first = 0;
  int last = 0;
  if (!(range >> first >> last)) return INT_MAX;
  return std::max(last - first + 1, 0) / kPortShare;
}

}  // namespace bagua_net
