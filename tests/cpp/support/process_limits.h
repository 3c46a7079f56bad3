// Limits of this process that a test lowers for a while.
#pragma once

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>

#include "support/check.h"

namespace bagua_net {

inline std::size_t open_descriptors() {
  DIR* const directory = ::opendir("/proc/self/fd");
  CHECK(directory != nullptr);
  std::size_t count = 0;
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count - 3;  // ".", ".." and the directory itself
}

// The next descriptor that is opened has this number, and those after it probably the next ones.
inline int next_descriptor() {
  const int next = ::dup(0);
  CHECK(next >= 0);
  ::close(next);
  return next;
}

// Until it goes out of scope.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(std::size_t limit) {
    CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    rlimit low = before_;
    low.rlim_cur = limit;
    CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  DescriptorLimit(const DescriptorLimit&) = delete;
  DescriptorLimit& operator=(const DescriptorLimit&) = delete;

 private:
  rlimit before_{};
};

}  // namespace bagua_net
