// Profiler: records what NCCL's profiler interface tells into the trace of this process: calls, launches, collectives
// while their data moves, and the operations of its proxy threads, with what those waited for. It also says which
// collective a message belongs to.
//
// NCCL stops a collective when it is enqueued, and not when its data has moved. So a collective is recorded twice: as
// an instant, with its arguments, and, where it uses the network, from the first of its operations to the last.
//
// Owned by the process instance. Any thread; init allocates, and the first operation of a channel with a peer.
//
// ProfiledEvents: the events of NCCL's profiler that have begun and not ended. A fixed number of them: the place of the
// oldest is taken when there is none left, since NCCL refers to a collective as a parent long after it has stopped it,
// and never says when that is over. A handle is a place and a generation, so that one that is too old finds nothing.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "abi/profiler_types.h"
#include "base/mutex.h"
#include "trace/comm_trace.h"
#include "trace/trace.h"

namespace bagua_net::abi {

struct ProfiledCommunicator;

// A track of things that follow each other. NCCL begins them together, long before it is their turn: they are shown
// from the end of the one before.
class SequentialTrack {
 public:
  explicit SequentialTrack(std::uint32_t id = 0) : id_(id) {}

  TraceEvent event(const TraceEvent& what, std::int64_t begin_ns, std::int64_t end_ns) {
    const std::int64_t last_ns = ended_ns_.exchange(end_ns, std::memory_order_relaxed);
    TraceEvent event = what.moved_to(id_, begin_ns < last_ns ? last_ns : begin_ns);
    event.set_end(end_ns);
    return event;
  }

 private:
  const std::uint32_t id_;
  std::atomic<std::int64_t> ended_ns_{0};
};

// What NCCL holds of an event; 0: nothing.
using EventHandle = std::uint64_t;

// What a message waits for, in the order of kWaitNames.
enum class WaitCause : std::uint8_t { kGpu, kPeer, kNetwork };
constexpr std::size_t kWaits = 3;

struct ProfiledEvent {
  std::uint64_t type = 0;  // 0: none
  ProfiledCommunicator* communicator = nullptr;
  EventHandle parent = 0;  // of a proxy operation its collective, of a step its operation
  TraceEvent event;
  MessageOrigin origin;

  // Of a collective: its operations that run. Of a send or receive: the lane that it has meanwhile.
  int running = 0;
  std::int64_t first_ns = 0;
  int lane = -1;

  SequentialTrack* channel = nullptr;  // of a proxy operation

  // Of a proxy operation: what all its steps waited for. Of a step: what it has waited for.
  std::array<std::int64_t, kWaits> waited_ns{};
  std::uint64_t bytes = 0;
  WaitCause wait = WaitCause::kGpu;
  std::int64_t wait_since_ns = 0;
};

class ProfiledEvents {
 public:
  explicit ProfiledEvents(std::size_t count) : mask_(count - 1), places_(new Place[count]) {}  // a power of two

  // A place, locked: to be filled in. What it held before and has not ended is given to `evict`.
  template <typename Fill, typename Evict>
  EventHandle begin(Fill fill, Evict evict) {
    const std::uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
    Place& place = places_[number & mask_];
    const MutexLock lock(place.mutex);
    if (place.event.type != 0) evict(&place.event);
    place.number = number;
    place.event = {};
    fill(&place.event);
    return number + 1;
  }

  // Calls `use` with the event, locked; false: it is not there any more. `use` must not ask for another event.
  template <typename Use>
  bool with(EventHandle handle, Use use) {
    if (handle == 0) return false;
    const std::uint64_t number = handle - 1;
    Place& place = places_[number & mask_];
    const MutexLock lock(place.mutex);
    if (place.number != number || place.event.type == 0) return false;
    use(&place.event);
    return true;
  }

 private:
  struct Place {
    Mutex mutex;  // uncontended, but for a collective's operations that start and end at the same time
    std::uint64_t number GUARDED_BY(mutex) = ~std::uint64_t{0};
    ProfiledEvent event GUARDED_BY(mutex);
  };

  const std::uint64_t mask_;
  const std::unique_ptr<Place[]> places_;
  std::atomic<std::uint64_t> next_{0};
};

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
