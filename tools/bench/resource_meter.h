// What a timed section cost: wall time by the monotonic clock, CPU time and context switches of the whole process
// (every thread, so that a transport's helper threads count).
#pragma once

#include <cstdint>

#include "bench/json_line.h"

namespace bagua_net::bench {

double monotonic_seconds();

struct ResourceUsage {
  double user_s = 0;
  double system_s = 0;
  std::int64_t voluntary_switches = 0;
  std::int64_t involuntary_switches = 0;

  static ResourceUsage now();
  ResourceUsage since(const ResourceUsage& start) const;
  void add_to(JsonLine* line) const;
};

}  // namespace bagua_net::bench
