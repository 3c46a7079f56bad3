// PathProbes: whether connections over a path can be opened again. It opens one and closes it, without a word: what is
// found out is only that the listener's host answers. One for all comms of the process, so that a listener sees one
// connection a second, however many comms ask.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "base/owned_fd.h"
#include "transport/connect/nic_paths.h"

namespace bagua_net {

class PathProbes {
 public:
  // Never blocks. True: a connection was opened within the last second. Otherwise one is being opened, and the answer
  // is that of a later call. Any thread.
  bool works(const NicPath& path, std::int64_t now_ms);

 private:
  struct Probe {
    OwnedFd socket;  // of a connection that is being opened
    std::int64_t asked_ms = 0;
    std::int64_t opened_ms = 0;  // 0: never
  };

  Mutex mutex_;
  std::map<std::pair<std::string, std::string>, Probe> probes_ GUARDED_BY(mutex_);  // by interface and address
};

}  // namespace bagua_net
