// RingOptions: the command line of ring mode, checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "bench/ring_plan.h"
#include "bench/transport_choice.h"

namespace bagua_net::bench {

struct RingOptions {
  RingGeometry geometry;
  std::int64_t timeout_ms = 60000;
  TransportChoice transport;
};

// `words`: the command line behind "ring".
Status parse_ring_options(const std::vector<std::string>& words, RingOptions* options);

}  // namespace bagua_net::bench
