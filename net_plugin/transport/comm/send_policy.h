// SendPolicy: what a send comm is told when it is created.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "stats/stall_report.h"
#include "transport/chunks/path_shares.h"
#include "transport/connect/nic_paths.h"
#include "transport/connect/optional_connections.h"
#include "transport/connect/path_states.h"
#include "transport/connect/stream_arrivals.h"
#include "transport/faults/fault_injector.h"
#include "transport/tuning/stream_growth.h"

namespace bagua_net {

struct SendPolicy {
  std::size_t turn = 0;  // of its connect, see WorkerPool::open_lane
  // Messages up to this size are sent on stream 0 if workers drive the other streams; if a worker is awake, up to a
  // quarter of it.
  std::size_t inline_bytes = 65536;
  std::size_t min_chunk_bytes = 65536;
  std::size_t max_chunk_bytes = 524288;
  bool measures_rates = false;  // the comm is between hosts, so its streams may differ in speed
  bool zero_copy = false;       // workers send large chunks zero-copy, and the peer acknowledges them
  int max_silence_s = 0;        // after which a host that does not answer is an error; 0: never

  StreamGrowth* growth = nullptr;  // of the interface, outlives the comm; nullptr: the number of streams is fixed
  // Requests this many further streams, which arrive in StreamArrivals, or do not if the peer refuses.
  std::function<void(int count)> open_streams;
  int most_streams = 1;
  std::shared_ptr<OptionalConnections::Share> optional;  // limits them; nullptr: no limit

  // Recovery: requests a replacement of a lost stream, which arrives in StreamArrivals, or a failure is reported there.
  // Empty: no recovery.
  std::function<void(Joining joining, std::size_t first_path)> replace_stream;
  // Opens that replacement for a stream that is still there, as far as possible without its end, and says how far it
  // is; of one that is ready, a request over the same path completes it. Empty: it begins when it is requested.
  std::function<Prepared(std::size_t place, std::size_t path)> prepare_stream;
  // Over which connections may go (transport/connect/nic_paths.h), and of each stream that the comm begins with: its
  // path, and the one that it should have. first_path above: where a replacement is tried first.
  std::vector<NicPath> paths;
  std::vector<std::size_t> first_paths;
  std::vector<std::size_t> own_paths;
  std::vector<std::shared_ptr<PathLoad>> path_loads;  // of each path, shared with other comms; empty: it has one path
  std::shared_ptr<PathStates> path_states = std::make_shared<PathStates>();  // of the process

  bool checksums = false;           // both ends use them
  FaultInjector* faults = nullptr;  // outlives the comm; nullptr: nothing damages its connections
  StallReport* stalls = nullptr;    // outlives the comm; nullptr: nothing is reported
};

// Messages up to inline_bytes / kAwakeShare are not passed to workers, even if they are awake: passing a message costs
// as much as copying 16 KiB. A receiver wakes its workers for the same sizes.
constexpr std::size_t kAwakeShare = 4;

// If a comm has grown, each of its connections is slow, and chunks are smaller by this factor.
constexpr std::size_t kLimitedFlowShare = 4;

}  // namespace bagua_net
