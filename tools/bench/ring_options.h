// RingOptions: the command line of ring mode, checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "bench/plugin_transport.h"
#include "bench/ring_plan.h"
#include "os/socket_address.h"

namespace bagua_net::bench {

struct RingOptions {
  std::string transport;
  RingGeometry geometry;
  std::int64_t timeout_ms = 60000;
  PluginOptions plugin;
  SocketAddress address;
};

// `words`: the command line behind "ring".
Status parse_ring_options(const std::vector<std::string>& words, RingOptions* options);

}  // namespace bagua_net::bench
