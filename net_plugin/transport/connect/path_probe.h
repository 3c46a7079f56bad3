// PathProbe: whether connections over a path can be opened again. It opens one and closes it, without a word: what is
// found out is only that the listener's host answers. Not thread-safe.
#pragma once

#include "base/owned_fd.h"
#include "transport/connect/nic_paths.h"

namespace bagua_net {

class PathProbe {
 public:
  // Never blocks. True: the connection that the last call began is open. Otherwise it begins another one.
  bool ask(const NicPath& path);

 private:
  OwnedFd socket_;
};

}  // namespace bagua_net
