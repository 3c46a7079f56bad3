// PathHealth: what the comms of a process have found out about paths, one for all.
//
// - Whether connections over a path can be opened again. It opens one and closes it, without a word: what is found out
//   is only that the listener's host answers. A listener sees one connection a second, however many comms ask.
// - Which paths are silent. A collective goes over several comms in turn, and each would wait for the silence by
// itself.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "base/owned_fd.h"
#include "transport/connect/nic_paths.h"

namespace bagua_net {

class PathHealth {
 public:
  // Never blocks. True: a connection was opened within the last second. Otherwise one is being opened, and the answer
  // is that of a later call. Any thread.
  bool works(const NicPath& path, std::int64_t now_ms);
  // A stream over the path was not answered. Any thread.
  void on_silent(const NicPath& path, std::int64_t now_ms);
  // When that was last; 0: never. Any thread.
  std::int64_t silent_ms(const NicPath& path);

 private:
  struct Known {
    OwnedFd socket;  // of a connection that is being opened
    std::int64_t asked_ms = 0;
    std::int64_t opened_ms = 0;  // 0: never
    std::int64_t silent_ms = 0;
  };
  Known& known(const NicPath& path) REQUIRES(mutex_) { return paths_[{path.interface.name, path.address.to_string()}]; }

  Mutex mutex_;
  std::map<std::pair<std::string, std::string>, Known> paths_ GUARDED_BY(mutex_);  // by interface and address
};

}  // namespace bagua_net
