// One interface over NCCL's profiler tables v4 to v7, and what NCCL does with them in the life of a collective. Each
// call goes through the real table of the built library.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "abi/profiler_types.h"
#include "abi_support_transfer.h"

namespace abi_test {

namespace nccl = bagua_net::nccl;

constexpr int kOldestProfiler = 4;
constexpr int kNewestProfiler = 7;
constexpr std::uint64_t kUserTag = 77;  // of every call, in v7

class ProfilerTable {
 public:
  virtual ~ProfilerTable() = default;
  virtual const char* name() const = 0;
  virtual Result init(void** context, int* mask) const = 0;
  virtual Result finalize(void* context) const = 0;
  virtual Result stop(void* handle) const = 0;
  virtual Result state(void* handle, nccl::ProfilerState state, std::size_t bytes) const = 0;
  // Each returns the handle. With v4 there are no calls: nullptr.
  virtual void* start_call(void* context, std::uint64_t type, const char* function) const = 0;
  virtual void* start_group(void* context) const = 0;
  virtual void* start_collective(void* context, void* group, const char* function, std::uint64_t number) const = 0;
  virtual void* start_p2p(void* context, void* group, const char* function, int peer) const = 0;
  virtual void* start_operation(void* context, void* parent, bool is_send, int channel, int pid) const = 0;
  virtual void* start_step(void* context, void* operation, int step) const = 0;
  virtual void* start_net_event(void* context, void* step, std::int64_t id, void* data) const = 0;
};

template <int kVersion, typename Table, typename Event>
class ProfilerTableOf final : public ProfilerTable {
 public:
  explicit ProfilerTableOf(const Table* table) : table_(table) {}

  const char* name() const override { return table_->name; }
  Result init(void** context, int* mask) const override {
    if constexpr (kVersion == 4) {
      return table_->init(context, mask, "default_pg", 0xabc, 2, 2, 1, &CapturedLog::log);
    } else {
      return table_->init(context, 0xabc, mask, "default_pg", 2, 2, 1, &CapturedLog::log);
    }
  }
  Result finalize(void* context) const override { return table_->finalize(context); }
  Result stop(void* handle) const override { return table_->stopEvent(handle); }
  Result state(void* handle, nccl::ProfilerState state, std::size_t bytes) const override {
    nccl::ProfilerStateArgs arguments{};
    arguments.proxyStep.transSize = bytes;
    return table_->recordEventState(handle, state, &arguments);
  }
  void* start_call(void* context, std::uint64_t type, const char* function) const override {
    if constexpr (kVersion == 4) {
      return nullptr;
    } else {
      return start(context, type, nullptr, [&](Event* event) {
        if constexpr (kVersion >= 7) {
          if (type == nccl::kProfileCollApi) {
            event->collApi = {function, 1000, "ncclFloat32", 0, nullptr, false, kUserTag};
          }
        } else if (type == nccl::kProfileCollApi) {
          event->collApi = {function, 1000, "ncclFloat32", 0, nullptr, false};
        }
        if (type == nccl::kProfileGroupApi) event->groupApi = {false, 1};
      });
    }
  }
  void* start_group(void* context) const override {
    return start(context, nccl::kProfileGroup, nullptr, [](Event*) {});
  }
  void* start_collective(void* context, void* group, const char* function, std::uint64_t number) const override {
    return start(context, nccl::kProfileColl, group, [&](Event* event) {
      const nccl::ProfiledColl collective{number,        function, nullptr, nullptr, 1000,    0,
                                          "ncclFloat32", 2,        16,      "RING",  "SIMPLE"};
      if constexpr (kVersion == 4) {
        event->coll = collective;
      } else if constexpr (kVersion < 7) {
        event->coll = {collective, group};
      } else {
        event->coll = {collective, group, "variant", false, kUserTag};
      }
    });
  }
  void* start_p2p(void* context, void* group, const char* function, int peer) const override {
    return start(context, nccl::kProfileP2p, group, [&](Event* event) {
      const nccl::ProfiledP2p p2p{function, nullptr, "ncclInt8", 77, peer, 1};
      if constexpr (kVersion == 4) {
        event->p2p = p2p;
      } else if constexpr (kVersion < 7) {
        event->p2p = {p2p, group};
      } else {
        event->p2p = {p2p, group, kUserTag};
      }
    });
  }
  void* start_operation(void* context, void* parent, bool is_send, int channel, int pid) const override {
    return start(context, nccl::kProfileProxyOp, parent, [&](Event* event) {
      event->proxyOp = {pid, static_cast<std::uint8_t>(channel), 0, 2, 4096, is_send ? 1 : 0};
    });
  }
  void* start_step(void* context, void* operation, int step) const override {
    return start(context, nccl::kProfileProxyStep, operation, [&](Event* event) { event->proxyStep = {step}; });
  }
  void* start_net_event(void* context, void* step, std::int64_t id, void* data) const override {
    return start(context, nccl::kProfileNetPlugin, step, [&](Event* event) { event->netPlugin = {id, data}; });
  }

 private:
  template <typename Fill>
  void* start(void* context, std::uint64_t type, void* parent, Fill fill) const {
    Event event;
    std::memset(static_cast<void*>(&event), 0xA5, sizeof event);  // v4 has padding behind its type
    event.type = static_cast<decltype(event.type)>(type);
    event.parentObj = parent;
    event.rank = 1;
    fill(&event);
    void* handle = slot_content(2);
    CHECK_SUCCESS(table_->startEvent(context, &handle, &event));
    CHECK(handle != slot_content(2));
    return handle;
  }

  const Table* const table_;
};

inline std::unique_ptr<ProfilerTable> profiler_table(int version) {
  // Never closed: the library stays in memory in any case.
  void* const library = dlopen(PluginLibrary::path(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(std::string("cannot open the plugin: ") + dlerror());
  const std::string symbol = "ncclProfiler_v" + std::to_string(version);
  const void* const table = dlsym(library, symbol.c_str());
  if (table == nullptr) throw std::runtime_error(symbol + " is not exported");
  const auto make = [table](auto* kind, auto* event, auto number) -> std::unique_ptr<ProfilerTable> {
    using Table = std::remove_pointer_t<decltype(kind)>;
    using Event = std::remove_pointer_t<decltype(event)>;
    return std::make_unique<ProfilerTableOf<number(), Table, Event>>(static_cast<const Table*>(table));
  };
  using nccl::ProfilerEventV4, nccl::ProfilerEventV5, nccl::ProfilerEventV6, nccl::ProfilerEventV7;
  switch (version) {
    case 4:
      return make(static_cast<nccl::ProfilerTableV4*>(nullptr), static_cast<ProfilerEventV4*>(nullptr),
                  std::integral_constant<int, 4>());
    case 5:
      return make(static_cast<nccl::ProfilerTableV5*>(nullptr), static_cast<ProfilerEventV5*>(nullptr),
                  std::integral_constant<int, 5>());
    case 6:
      return make(static_cast<nccl::ProfilerTableV6*>(nullptr), static_cast<ProfilerEventV6*>(nullptr),
                  std::integral_constant<int, 6>());
    default:
      return make(static_cast<nccl::ProfilerTableV7*>(nullptr), static_cast<ProfilerEventV7*>(nullptr),
                  std::integral_constant<int, 7>());
  }
}

}  // namespace abi_test
