// The name of a process's trace file: each process has one of its own.
#pragma once

#include <string>

namespace bagua_net {

struct TraceIdentity {
  int rank = -1;  // in the job; -1: not known
  std::string host;
  int process_id = 0;
};

// %r, %h and %p in `pattern` become rank, host and process id, %% a percent sign. Without %p, rank, host and process id
// are put before the extension: "trace.json" becomes "trace.rank3.node1.4242.json".
std::string trace_path(const std::string& pattern, const TraceIdentity& identity);

}  // namespace bagua_net
