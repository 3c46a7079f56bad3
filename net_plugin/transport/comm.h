// What a send comm and a receive comm share, as far as their user sees it: the peer's name, registered memory and the
// promise that no thread of ours touches a buffer once its deregistration returned.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"

namespace bagua_net {

struct MemoryRegistration {
  void* data;
  std::size_t bytes;
};

class Comm {
 public:
  virtual ~Comm() = default;

  Status register_memory(void* data, std::size_t bytes, MemoryRegistration** registration);
  // If requests on that memory are unfinished, the comm is aborted: its I/O has stopped for good when this returns,
  // its requests fail, the peer sees a closed connection. Never waits for the peer.
  Status deregister_memory(MemoryRegistration* registration);

  const std::string& peer() const;  // "10.0.0.2:4711 (host node2, process 4242)"
};

}  // namespace bagua_net
