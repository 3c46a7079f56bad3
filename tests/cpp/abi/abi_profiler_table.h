// NCCL's profiler tables of the built library, v4 to v7, as one type for all of them; as abi_tables.h.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>
#include <variant>

#include "abi/profiler_types.h"
#include "abi_tables.h"

namespace abi_test {

constexpr int kOldestProfiler = 4;
constexpr int kNewestProfiler = 7;
constexpr std::uint64_t kUserTag = 77;  // of every call, in v7

class ProfilerTable {
  using Table = std::variant<TableOf<4, nccl::ProfilerTableV4, nccl::ProfilerEventV4>,
                             TableOf<5, nccl::ProfilerTableV5, nccl::ProfilerEventV5>,
                             TableOf<6, nccl::ProfilerTableV6, nccl::ProfilerEventV6>,
                             TableOf<7, nccl::ProfilerTableV7, nccl::ProfilerEventV7>>;

  template <typename Call>
  auto visit(Call call) const {
    return std::visit(call, table_);
  }

 public:
  ProfilerTable(const PluginLibrary& library, int version, Logger* log)
      : logger_(log), table_(table_of_version<Table>(version, library.table("ncclProfiler", version))) {}

  const char* name() const {
    return visit([](auto table) { return table->name; });
  }
  Result init(void** context, int* mask) const {
    return visit([&](auto table) {
      if constexpr (table.version == 4) {
        return table->init(context, mask, "default_pg", 0xabc, 2, 2, 1, logger_);
      } else {
        return table->init(context, 0xabc, mask, "default_pg", 2, 2, 1, logger_);
      }
    });
  }
  Result finalize(void* context) const {
    return visit([&](auto table) { return table->finalize(context); });
  }
  Result stop(void* handle) const {
    return visit([&](auto table) { return table->stopEvent(handle); });
  }
  Result state(void* handle, nccl::ProfilerState state, std::size_t bytes) const {
    nccl::ProfilerStateArgs arguments{};
    arguments.proxyStep.transSize = bytes;
    return visit([&](auto table) { return table->recordEventState(handle, state, &arguments); });
  }

  // Each returns the handle. With v4 there are no calls: nullptr.
  void* start_call(void* context, std::uint64_t type, const char* function) const {
    if (std::holds_alternative<std::variant_alternative_t<0, Table>>(table_)) return nullptr;
    return start(context, type, nullptr, [&](auto number, [[maybe_unused]] auto* event) {
      if constexpr (number >= 5) {
        if (type == nccl::kProfileGroupApi) event->groupApi = {false, 1};
        if (type != nccl::kProfileCollApi) return;
        if constexpr (number >= 7) {
          event->collApi = {function, 1000, "ncclFloat32", 0, nullptr, false, kUserTag};
        } else {
          event->collApi = {function, 1000, "ncclFloat32", 0, nullptr, false};
        }
      }
    });
  }
  void* start_group(void* context) const {
    return start(context, nccl::kProfileGroup, nullptr, [](auto, auto*) {});
  }
  void* start_collective(void* context, void* group, const char* function, std::uint64_t number) const {
    const nccl::ProfiledColl collective{number,        function, nullptr, nullptr, 1000,    0,
                                        "ncclFloat32", 2,        16,      "RING",  "SIMPLE"};
    return start(context, nccl::kProfileColl, group, [&](auto version, auto* event) {
      if constexpr (version == 4) {
        event->coll = collective;
      } else if constexpr (version < 7) {
        event->coll = {collective, group};
      } else {
        event->coll = {collective, group, "variant", false, kUserTag};
      }
    });
  }
  void* start_p2p(void* context, void* group, const char* function, int peer) const {
    const nccl::ProfiledP2p p2p{function, nullptr, "ncclInt8", 77, peer, 1};
    return start(context, nccl::kProfileP2p, group, [&](auto version, auto* event) {
      if constexpr (version == 4) {
        event->p2p = p2p;
      } else if constexpr (version < 7) {
        event->p2p = {p2p, group};
      } else {
        event->p2p = {p2p, group, kUserTag};
      }
    });
  }
  void* start_operation(void* context, void* parent, bool is_send, int channel, int pid) const {
    return start(context, nccl::kProfileProxyOp, parent, [&](auto, auto* event) {
      event->proxyOp = {pid, static_cast<std::uint8_t>(channel), 0, 2, 4096, is_send ? 1 : 0};
    });
  }
  void* start_step(void* context, void* operation, int step) const {
    return start(context, nccl::kProfileProxyStep, operation, [&](auto, auto* event) { event->proxyStep = {step}; });
  }
  void* start_net_event(void* context, void* step, std::int64_t id, void* data) const {
    return start(context, nccl::kProfileNetPlugin, step, [&](auto, auto* event) { event->netPlugin = {id, data}; });
  }

 private:
  // `fill` gets the version and the event.
  template <typename Fill>
  void* start(void* context, std::uint64_t type, void* parent, Fill fill) const {
    return visit([&](auto table) {
      typename decltype(table)::record event;
      std::memset(static_cast<void*>(&event), 0xA5, sizeof event);  // v4 has padding behind its type
      event.type = static_cast<decltype(event.type)>(type);
      event.parentObj = parent;
      event.rank = 1;
      fill(std::integral_constant<int, table.version>(), &event);
      static int stale = 0;
      void* handle = &stale;
      const Result result = table->startEvent(context, &handle, &event);
      if (result != Result::kSuccess || handle == &stale) throw std::runtime_error("startEvent wrote no handle");
      return handle;
    });
  }

  Logger* const logger_;
  const Table table_;
};

}  // namespace abi_test
