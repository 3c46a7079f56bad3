// Profiler table v5, for NCCL 2.28 to 2.30 (the newest one that both sides know is taken).
#include "abi/export_table.h"
#include "abi/plugin_name.h"
#include "abi/profiler_entry.h"

namespace bagua_net::abi {
namespace {

constexpr nccl::ProfilerTableV5 make_table() {
  nccl::ProfilerTableV5 table{};
  table.name = kPluginName;
  table.init = &profiler::init_v5;
  table.startEvent = &profiler::start_event_v5;
  table.stopEvent = &profiler::stop_event;
  table.recordEventState = &profiler::record_event_state;
  table.finalize = &profiler::finalize;
  return table;
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(ProfilerTableV5, ncclProfiler_v5, make_table);
