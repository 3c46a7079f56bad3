#include "abi/profiler.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <new>

#include "base/monotonic_clock.h"

namespace bagua_net::abi {
namespace {

constexpr const char* kWaitNames[kWaits] = {"gpu_wait_us", "peer_wait_us", "network_wait_us"};

constexpr std::uint64_t kCalls = nccl::kProfileGroupApi | nccl::kProfileCollApi | nccl::kProfileP2pApi |
                                 nccl::kProfileKernelLaunch | nccl::kProfileGroup | nccl::kProfileCeColl;
constexpr std::uint64_t kCollectives = nccl::kProfileColl | nccl::kProfileP2p;

void set_operation(MessageOrigin* origin, const char* function, std::uint64_t sequence_number) {
  if (function != nullptr) std::snprintf(origin->operation, sizeof origin->operation, "%s", function);
  origin->sequence_number = sequence_number;
}

void end_wait(ProfiledEvent* step, std::int64_t now_ns) {
  if (step->wait_since_ns != 0) step->waited_ns[static_cast<std::size_t>(step->wait)] += now_ns - step->wait_since_ns;
  step->wait_since_ns = now_ns;
}

const char* name_of(std::uint64_t type) {
  switch (type) {
    case nccl::kProfileGroupApi: return "group call";
    case nccl::kProfileKernelLaunch: return "kernel launch";
    case nccl::kProfileGroup: return "group";
    default: return "call";
  }
}

std::uint32_t track_of(const ProfiledCommunicator& communicator, std::uint64_t type) {
  switch (type) {
    case nccl::kProfileGroupApi: return communicator.group_calls;
    case nccl::kProfileKernelLaunch: return communicator.launches;
    case nccl::kProfileGroup: return communicator.groups;
    default: return communicator.calls;
  }
}

}  // namespace

int Profiler::activation_mask() {
  return static_cast<int>(kCalls | kCollectives | nccl::kProfileProxyOp | nccl::kProfileProxyStep |
                          nccl::kProfileNetPlugin);
}

// Names begin with what differs: viewers cut them.
ProfiledCommunicator::ProfiledCommunicator(AddTracks add)
    : calls(add("calls", 1)),
      group_calls(add("group calls", 1)),
      launches(add("launches", 1)),
      groups(add("groups", 1)),
      collectives(add("collectives", 1)),
      p2p(add("sends, receives", Lanes::kMax)),
      add_(std::move(add)) {}

SequentialTrack* ProfiledCommunicator::channel(const nccl::ProfiledProxyOp& operation) {
  const bool is_send = operation.isSend != 0;
  const MutexLock lock(mutex_);
  const auto key = std::make_tuple(static_cast<int>(operation.channelId), static_cast<int>(operation.peer), is_send);
  const auto found = channels_.find(key);
  if (found != channels_.end()) return &found->second;
  try {
    const std::string name = "channel " + std::to_string(operation.channelId) + (is_send ? " to " : " from ") +
                             std::to_string(operation.peer);
    return &channels_.try_emplace(key, add_(name, 1)).first->second;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

ProfiledCommunicator* Profiler::add_communicator(const std::string& name, std::uint64_t id, int rank, int ranks) {
  char number[32];
  std::snprintf(number, sizeof number, "%llx", static_cast<unsigned long long>(id));
  const std::string whose = ", NCCL " + (name.empty() ? std::string(number) : name + " " + number) + ", rank " +
                            std::to_string(rank) + " of " + std::to_string(ranks);
  const MutexLock lock(mutex_);
  return &communicators_.emplace_back([trace = trace_, whose](const std::string& of, int count) {
    return trace->add_tracks(Trace::TrackKind::kNccl, of + whose, count);
  });
}

template <typename Use>
bool Profiler::with(EventHandle handle, Use use) {
  if (handle == 0) return false;
  return (is_of_proxy(handle) ? proxy_events_ : tasks_).with(handle >> 1, use);
}

template <typename Fill>
EventHandle Profiler::begin(bool of_proxy, Fill fill) {
  const auto evict = [this](ProfiledEvent* old) {
    // A collective that has been enqueued is expected to be here still, and a step that NCCL began again.
    if ((old->type & (kCollectives | nccl::kProfileProxyStep)) == 0) trace_->count_dropped();
    if (old->lane >= 0) old->communicator->p2p_lanes.give_back(old->lane);
  };
  const EventHandle place = (of_proxy ? proxy_events_ : tasks_).begin(fill, evict);
  return place << 1 | (of_proxy ? 1 : 0);
}

EventHandle Profiler::start_call(ProfiledCommunicator* communicator, std::uint64_t type, const char* function,
                                 std::uint64_t count, const char* datatype, std::uint64_t user_tag) {
  return begin(false, [&](ProfiledEvent* call) {
    call->type = type;
    call->communicator = communicator;
    call->event = TraceEvent(track_of(*communicator, type), "nccl call", function != nullptr ? "nccl" : name_of(type),
                             monotonic_ns());
    if (function == nullptr) return;
    call->event.append_to_name(function);
    call->event.add("count", count);
    call->event.add("datatype", datatype);
    if (user_tag != 0) call->event.add("user_tag", user_tag);
  });
}

EventHandle Profiler::start_collective(ProfiledCommunicator* communicator, const nccl::ProfiledColl& collective) {
  return begin(false, [&](ProfiledEvent* started) {
    started->type = nccl::kProfileColl;
    started->communicator = communicator;
    set_operation(&started->origin, collective.func, collective.seqNumber);
    started->event = TraceEvent(communicator->calls, "nccl", started->origin.operation, monotonic_ns());
    started->event.add("seq", collective.seqNumber);
    started->event.add("count", collective.count);
    started->event.add("datatype", collective.datatype);
    started->event.add("root", static_cast<std::uint64_t>(collective.root));
    started->event.add("algorithm", collective.algo);
    started->event.add("protocol", collective.proto);
    started->event.add("channels", collective.nChannels);
    started->event.add("warps", collective.nWarps);
  });
}

EventHandle Profiler::start_p2p(ProfiledCommunicator* communicator, const nccl::ProfiledP2p& p2p) {
  return begin(false, [&](ProfiledEvent* started) {
    started->type = nccl::kProfileP2p;
    started->communicator = communicator;
    set_operation(&started->origin, p2p.func, 0);
    started->event = TraceEvent(communicator->calls, "nccl", started->origin.operation, monotonic_ns());
    started->event.add("count", p2p.count);
    started->event.add("datatype", p2p.datatype);
    started->event.add("peer", static_cast<std::uint64_t>(p2p.peer));
    started->event.add("channels", p2p.nChannels);
  });
}

void Profiler::begin_transfer(ProfiledEvent* collective, std::int64_t now_ns) {
  if (collective->running++ > 0) return;
  collective->first_ns = now_ns;
  if (collective->type == nccl::kProfileP2p) collective->lane = collective->communicator->p2p_lanes.take();
}

void Profiler::end_transfer(ProfiledEvent* collective, std::int64_t now_ns) {
  if (collective->running == 0) return;
  --collective->running;
  if (collective->running > 0) return;
  ProfiledCommunicator& communicator = *collective->communicator;
  if (collective->type == nccl::kProfileColl) {
    trace_->record(communicator.collectives.event(collective->event, collective->first_ns, now_ns));
    return;
  }
  if (collective->lane < 0) {
    trace_->count_dropped();
    return;
  }
  const std::uint32_t track = communicator.p2p + static_cast<std::uint32_t>(collective->lane);
  TraceEvent event = collective->event.moved_to(track, collective->first_ns);
  event.set_end(now_ns);
  trace_->record(event);
  communicator.p2p_lanes.give_back(std::exchange(collective->lane, -1));
}

EventHandle Profiler::start_operation(ProfiledCommunicator* communicator, EventHandle parent,
                                      const nccl::ProfiledProxyOp& operation) {
  const std::int64_t now_ns = monotonic_ns();
  MessageOrigin origin;
  // With PXN, the collective may be another process's.
  if (operation.pid != ::getpid() || is_of_proxy(parent) || !with(parent, [&](ProfiledEvent* collective) {
        if ((collective->type & kCollectives) == 0) return;
        begin_transfer(collective, now_ns);
        origin = collective->origin;
      })) {
    parent = 0;
  }
  origin.channel = operation.channelId;
  SequentialTrack* const channel = communicator->channel(operation);
  return begin(true, [&](ProfiledEvent* started) {
    started->type = nccl::kProfileProxyOp;
    started->communicator = communicator;
    started->parent = parent;
    started->origin = origin;
    started->channel = channel;
    started->event = TraceEvent(0, "nccl network", origin.operation, now_ns);
    started->event.append_to_name(operation.isSend != 0 ? " send" : " receive");
    if (parent != 0) started->event.add("seq", origin.sequence_number);
    started->event.add("channel", operation.channelId);
    started->event.add("peer", static_cast<std::uint64_t>(operation.peer));
    started->event.add("steps", static_cast<std::uint64_t>(operation.nSteps));
    started->event.add("chunk_bytes", static_cast<std::uint64_t>(operation.chunkSize));
  });
}

EventHandle Profiler::start_step(ProfiledCommunicator* communicator, EventHandle parent) {
  MessageOrigin origin;
  if (!is_of_proxy(parent) || !with(parent, [&](ProfiledEvent* operation) { origin = operation->origin; })) {
    return 0;
  }
  return begin(true, [&](ProfiledEvent* started) {
    started->type = nccl::kProfileProxyStep;
    started->communicator = communicator;
    started->parent = parent;
    started->origin = origin;
  });
}

void Profiler::record_state(EventHandle handle, nccl::ProfilerState state, const nccl::ProfilerStateArgs* arguments) {
  WaitCause wait = WaitCause::kNetwork;
  switch (state) {
    case nccl::ProfilerState::kSendGpuWait:
    case nccl::ProfilerState::kRecvFlushWait:
    case nccl::ProfilerState::kRecvGpuWait: wait = WaitCause::kGpu; break;
    case nccl::ProfilerState::kSendPeerWait: wait = WaitCause::kPeer; break;
    case nccl::ProfilerState::kSendWait:
    case nccl::ProfilerState::kRecvWait: break;
    default: return;
  }
  const std::int64_t now_ns = monotonic_ns();
  with(handle, [&](ProfiledEvent* step) {
    if (step->type != nccl::kProfileProxyStep) return;
    end_wait(step, now_ns);
    step->wait = wait;
    // At other times it may be that of another step.
    const bool has_size = state == nccl::ProfilerState::kSendWait || state == nccl::ProfilerState::kRecvFlushWait;
    if (has_size && arguments != nullptr) step->bytes = arguments->proxyStep.transSize;
  });
}

void Profiler::stop_operation(ProfiledEvent* operation, std::int64_t now_ns) {
  if (operation->channel == nullptr) {
    trace_->count_dropped();
    return;
  }
  operation->event.add("bytes", operation->bytes);
  for (std::size_t i = 0; i < kWaits; ++i) {
    operation->event.add(kWaitNames[i], static_cast<std::uint64_t>(operation->waited_ns[i] / 1000));
  }
  trace_->record(operation->channel->event(operation->event, operation->event.begin_ns(), now_ns));
}

void Profiler::stop(EventHandle handle) {
  const std::int64_t now_ns = monotonic_ns();
  EventHandle parent = 0;
  ProfiledEvent step;
  with(handle, [&](ProfiledEvent* stopped) {
    switch (stopped->type) {
      case nccl::kProfileColl:
      case nccl::kProfileP2p: trace_->record(stopped->event); return;  // its operations may come now
      case nccl::kProfileProxyOp:
        stop_operation(stopped, now_ns);
        parent = stopped->parent;
        break;
      case nccl::kProfileProxyStep:
        end_wait(stopped, now_ns);
        step.waited_ns = stopped->waited_ns;
        step.bytes = stopped->bytes;
        parent = stopped->parent;
        break;
      default: stopped->event.set_end(now_ns); trace_->record(stopped->event);
    }
    stopped->type = 0;
  });
  with(parent, [&](ProfiledEvent* above) {
    if (above->type != nccl::kProfileProxyOp) {
      end_transfer(above, now_ns);
      return;
    }
    for (std::size_t i = 0; i < kWaits; ++i) above->waited_ns[i] += step.waited_ns[i];
    above->bytes += step.bytes;
  });
}

bool Profiler::origin_of(EventHandle step, MessageOrigin* origin) {
  return is_of_proxy(step) && with(step, [&](ProfiledEvent* found) { *origin = found->origin; });
}

}  // namespace bagua_net::abi
