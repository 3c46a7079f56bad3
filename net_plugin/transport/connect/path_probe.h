// PathProbe: whether packets as large as those of a chunk are answered over a path. A connection of its own to the
// peer's listener, and one packet: a hello that names nothing, and zeros behind it. Never blocks; ends when it is
// destroyed.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "transport/connect/nic_paths.h"

namespace bagua_net {

class PathProbe {
 public:
  enum class State {
    kConnecting,
    kWaiting,   // the packet is under way
    kAnswered,  // the peer's kernel has it
    kFailed,    // to connect
  };
  virtual ~PathProbe() = default;
  virtual State look() = 0;
  // From kWaiting on.
  virtual std::size_t packet_bytes() const = 0;
};

// nullptr: this host cannot, having no route or no descriptor.
std::unique_ptr<PathProbe> begin_tcp_probe(const NicPath& path);

// What begins one; tests have another network.
using BeginProbe = std::function<std::unique_ptr<PathProbe>(const NicPath&)>;

}  // namespace bagua_net
