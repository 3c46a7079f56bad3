#include "os/pci_path.h"

#include <cstdlib>
#include <memory>

#include "os/sysfs_file.h"

namespace bagua_net {
namespace {

// How far above an interface's device its PCI function can be: a virtio NIC is one level below it, USB NICs several.
constexpr int kMaxLevels = 16;

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
  for (int level = 0; level < kMaxLevels && device.size() > sysfs_root.size(); ++level) {
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

}  // namespace bagua_net
