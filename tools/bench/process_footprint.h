// ProcessFootprint: what this process holds at a moment: memory, descriptors, the buffers of its TCP sockets, and what
// every thread but the main one has used so far. The main thread is the driver's own; NCCL's would be in its place.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "bench/json_line.h"

namespace bagua_net::bench {

struct ThreadUsage {
  int id = 0;
  std::string name;
  double cpu_s = 0;
  std::int64_t voluntary_switches = 0;  // one for each time that it went to sleep, so one for each wake-up
  std::int64_t involuntary_switches = 0;
};

struct ProcessFootprint {
  std::int64_t resident_bytes = 0;
  std::int64_t descriptors = 0;
  std::int64_t tcp_sockets = 0;          // listening ones as well
  std::int64_t socket_memory_bytes = 0;  // what the kernel holds for their data and has reserved for more
  std::vector<ThreadUsage> other_threads;

  static Status measure(ProcessFootprint* footprint);
  // Keys begin with `prefix`.
  void add_totals_to(const std::string& prefix, JsonLine* line) const;
  void add_threads_to(JsonLine* line) const;
};

}  // namespace bagua_net::bench
