// Profiler: records what NCCL's profiler interface tells into the trace of this process: calls, launches, collectives
// while their data moves, and the operations of its proxy threads, with what those waited for. It also says which
// collective a message belongs to.
//
// NCCL stops a collective when it is enqueued, and not when its data has moved. So a collective is recorded twice: as
// an instant, with its arguments, and, where it uses the network, from the first of its operations to the last.
//
// Owned by the process instance. Any thread; init allocates, and the first operation of a channel with a peer.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "abi/profiled_events.h"
#include "abi/profiler_types.h"
#include "base/mutex.h"
#include "trace/trace.h"

namespace bagua_net::abi {

// The tracks of one communicator.
struct ProfiledCommunicator {
  using AddTracks = std::function<std::uint32_t(const std::string& of, int count)>;
  explicit ProfiledCommunicator(AddTracks add);
  SequentialTrack* channel(const nccl::ProfiledProxyOp& operation);  // nullptr: there is no memory for it

  const std::uint32_t calls;
  const std::uint32_t group_calls;
  const std::uint32_t launches;
  const std::uint32_t groups;
  SequentialTrack collectives;
  const std::uint32_t p2p;  // sends and receives, which may overlap: the first of Lanes::kMax
  Lanes p2p_lanes;

 private:
  const AddTracks add_;
  Mutex mutex_;
  std::map<std::tuple<int, int, bool>, SequentialTrack> channels_ GUARDED_BY(mutex_);
};

class Profiler {
 public:
  explicit Profiler(std::shared_ptr<Trace> trace) : trace_(std::move(trace)) {}

  // What is wanted of NCCL.
  static int activation_mask();
  // Lives as long as the profiler: proxy threads may outlive the communicator.
  ProfiledCommunicator* add_communicator(const std::string& name, std::uint64_t id, int rank, int ranks);

  EventHandle start_call(ProfiledCommunicator* communicator, std::uint64_t type, const char* function,
                         std::uint64_t count, const char* datatype, std::uint64_t user_tag = 0);
  EventHandle start_collective(ProfiledCommunicator* communicator, const nccl::ProfiledColl& collective);
  EventHandle start_p2p(ProfiledCommunicator* communicator, const nccl::ProfiledP2p& p2p);
  EventHandle start_operation(ProfiledCommunicator* communicator, EventHandle parent,
                              const nccl::ProfiledProxyOp& operation);
  EventHandle start_step(ProfiledCommunicator* communicator, EventHandle parent);

  // A handle of another process or one that is too old is ignored.
  void record_state(EventHandle handle, nccl::ProfilerState state, const nccl::ProfilerStateArgs* arguments);
  void stop(EventHandle handle);

  // What the step belongs to.
  bool origin_of(EventHandle step, MessageOrigin* origin);

 private:
  // Handles of proxy operations and steps are odd, so that their many cannot take the places of collectives.
  static bool is_of_proxy(EventHandle handle) { return (handle & 1) != 0; }
  template <typename Use>
  bool with(EventHandle handle, Use use);
  template <typename Fill>
  EventHandle begin(bool of_proxy, Fill fill);
  void begin_transfer(ProfiledEvent* collective, std::int64_t now_ns);
  void end_transfer(ProfiledEvent* collective, std::int64_t now_ns);
  void stop_operation(ProfiledEvent* operation, std::int64_t now_ns);

  static constexpr std::size_t kTasks = 4096;
  static constexpr std::size_t kProxyEvents = 4096;

  const std::shared_ptr<Trace> trace_;
  ProfiledEvents tasks_{kTasks};
  ProfiledEvents proxy_events_{kProxyEvents};
  Mutex mutex_;
  std::deque<ProfiledCommunicator> communicators_ GUARDED_BY(mutex_);
};

}  // namespace bagua_net::abi
