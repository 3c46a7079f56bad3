#include "abi/profiler_entry.h"

#include "abi/nccl_log.h"
#include "abi/process_instance.h"
#include "abi/profiler.h"

namespace bagua_net::abi::profiler {
namespace {

// Network plugins name their events by type (the upper 16 bits; NCCL's own are 1 and 2) and version.
constexpr std::int64_t kOurEvents = (std::int64_t{0xBA9A} << 16) | 1;
constexpr int kStart = 0;

EventHandle event_of(void* handle) { return reinterpret_cast<std::uintptr_t>(handle); }
void* handle_of(EventHandle event) {
  return reinterpret_cast<void*>(event);  // NOLINT(performance-no-int-to-ptr): NCCL gives it back, and no more
}

void start_net_event(Profiler* profiler, EventHandle parent, const nccl::ProfiledNetEvent& event) {
  // Other plugins' are theirs.
  if (event.id != kOurEvents || event.data == nullptr) return;
  profiler->origin_of(parent, static_cast<MessageOrigin*>(event.data));
}

// What v7 added.
template <typename Call>
std::uint64_t user_tag(const Call& /*call*/) {
  return 0;
}
std::uint64_t user_tag(const nccl::ProfiledCollApiV7& call) { return call.userTag; }
std::uint64_t user_tag(const nccl::ProfiledP2pApiV7& call) { return call.userTag; }
std::uint64_t user_tag(const nccl::ProfiledCeCollV7& call) { return call.userTag; }

// What stands at the beginning of a structure that later versions have extended.
const nccl::ProfiledColl* original(const nccl::ProfiledColl* collective) { return collective; }
const nccl::ProfiledColl* original(const nccl::ProfiledCollV5* collective) { return &collective->coll; }
const nccl::ProfiledColl* original(const nccl::ProfiledCollV7* collective) { return &collective->coll; }
const nccl::ProfiledP2p* original(const nccl::ProfiledP2p* p2p) { return p2p; }
const nccl::ProfiledP2p* original(const nccl::ProfiledP2pV5* p2p) { return &p2p->p2p; }
const nccl::ProfiledP2p* original(const nccl::ProfiledP2pV7* p2p) { return &p2p->p2p; }
const nccl::ProfiledCeColl* original(const nccl::ProfiledCeColl* collective) { return collective; }
const nccl::ProfiledCeColl* original(const nccl::ProfiledCeCollV7* collective) { return &collective->ceColl; }

template <typename Call>
EventHandle start_call(Profiler* profiler, ProfiledCommunicator* communicator, std::uint64_t type, const Call& call,
                       std::uint64_t tag) {
  return profiler->start_call(communicator, type, call.func, call.count, call.datatype, tag);
}

template <int kVersion, typename Event>
EventHandle start(Profiler* profiler, ProfiledCommunicator* communicator, const Event& event) {
  switch (event.type) {
    case nccl::kProfileGroup: return profiler->start_call(communicator, event.type, nullptr, 0, nullptr);
    case nccl::kProfileColl: return profiler->start_collective(communicator, *original(&event.coll));
    case nccl::kProfileP2p: return profiler->start_p2p(communicator, *original(&event.p2p));
    case nccl::kProfileProxyOp:
      return profiler->start_operation(communicator, event_of(event.parentObj), event.proxyOp);
    case nccl::kProfileProxyStep: return profiler->start_step(communicator, event_of(event.parentObj));
    case nccl::kProfileNetPlugin: start_net_event(profiler, event_of(event.parentObj), event.netPlugin); return 0;
    default: break;
  }
  if constexpr (kVersion >= 5) {
    switch (event.type) {
      case nccl::kProfileCollApi:
        return start_call(profiler, communicator, event.type, event.collApi, user_tag(event.collApi));
      case nccl::kProfileP2pApi:
        return start_call(profiler, communicator, event.type, event.p2pApi, user_tag(event.p2pApi));
      case nccl::kProfileGroupApi:
      case nccl::kProfileKernelLaunch: return profiler->start_call(communicator, event.type, nullptr, 0, nullptr);
      default: break;
    }
  }
  if constexpr (kVersion >= 6) {
    if (event.type == nccl::kProfileCeColl) {
      return start_call(profiler, communicator, event.type, *original(&event.ceColl), user_tag(event.ceColl));
    }
  }
  return 0;
}

template <int kVersion, typename Event>
nccl::Result start_event_of(void* context, void** handle, const Event* event) {
  if (handle == nullptr) return nccl::Result::kSuccess;
  *handle = nullptr;
  Profiler* const profiler = ProcessInstance::get().profiler();
  if (profiler == nullptr || context == nullptr || event == nullptr) return nccl::Result::kSuccess;
  *handle = handle_of(start<kVersion>(profiler, static_cast<ProfiledCommunicator*>(context), *event));
  return nccl::Result::kSuccess;
}

}  // namespace

nccl::Result init(void** context, int* mask, const char* name, std::uint64_t id, int ranks, int rank,
                  nccl::Logger* logger) noexcept {
  if (context == nullptr || mask == nullptr) return nccl::Result::kInvalidArgument;
  *context = nullptr;
  *mask = 0;
  // Where there is nothing to do, success: after an error, NCCL 2.27 and 2.28 go on with the table all the same.
  try {
    install_nccl_logger(logger);
    Profiler* const profiler = ProcessInstance::get().start_profiler();
    if (profiler == nullptr) return nccl::Result::kSuccess;
    *context = profiler->add_communicator(name == nullptr ? "" : name, id, rank, ranks);
    *mask = Profiler::activation_mask();
    return nccl::Result::kSuccess;
  } catch (...) {
    return nccl::Result::kSystemError;
  }
}

nccl::Result start_event(void* context, void** handle, nccl::ProfilerEventV4* event) {
  return start_event_of<4>(context, handle, event);
}
nccl::Result start_event(void* context, void** handle, nccl::ProfilerEventV5* event) {
  return start_event_of<5>(context, handle, event);
}
nccl::Result start_event(void* context, void** handle, nccl::ProfilerEventV6* event) {
  return start_event_of<6>(context, handle, event);
}
nccl::Result start_event(void* context, void** handle, nccl::ProfilerEventV7* event) {
  return start_event_of<7>(context, handle, event);
}

nccl::Result stop_event(void* handle) {
  Profiler* const profiler = ProcessInstance::get().profiler();
  if (profiler != nullptr) profiler->stop(event_of(handle));
  return nccl::Result::kSuccess;
}

nccl::Result record_event_state(void* handle, nccl::ProfilerState state, nccl::ProfilerStateArgs* arguments) {
  Profiler* const profiler = ProcessInstance::get().profiler();
  if (profiler != nullptr) profiler->record_state(event_of(handle), state, arguments);
  return nccl::Result::kSuccess;
}

nccl::Result finalize(void* /*context*/) { return nccl::Result::kSuccess; }

bool origin_of_message(nccl::ProfilerCallback* callback, void* phandle, MessageOrigin* origin) {
  // Without our table, NCCL would ask somebody else's.
  if (callback == nullptr || phandle == nullptr || ProcessInstance::get().profiler() == nullptr) return false;
  void* handle = nullptr;
  callback(&handle, kStart, phandle, kOurEvents, origin);
  return origin->operation[0] != '\0';
}

}  // namespace bagua_net::abi::profiler
