// Reading the small text files of sysfs, procfs and cgroupfs, and their folders.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace bagua_net {

// The first line without its newline; nullopt if the file is missing or unreadable. The speed of an interface that is
// down, for one, exists but answers EINVAL.
std::optional<std::string> read_first_line(const std::string& path);

// Sorted, without those that begin with a point; none if the folder cannot be read.
std::vector<std::string> directory_entries(const std::string& path);

}  // namespace bagua_net
