#include "os/sysfs_file.h"

#include <fstream>

namespace bagua_net {

std::optional<std::string> read_first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

}  // namespace bagua_net
