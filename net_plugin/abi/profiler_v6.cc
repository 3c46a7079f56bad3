// Profiler table v6, for NCCL 2.29 and 2.30.
#include "abi/export_table.h"
#include "abi/plugin_name.h"
#include "abi/profiler_entry.h"

namespace bagua_net::abi {
namespace {

constexpr nccl::ProfilerTableV6 make_table() {
  nccl::ProfilerTableV6 table{};
  table.name = kPluginName;
  table.init = &profiler::init_v5;
  table.startEvent = &profiler::start_event_v6;
  table.stopEvent = &profiler::stop_event;
  table.recordEventState = &profiler::record_event_state;
  table.finalize = &profiler::finalize;
  return table;
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(ProfilerTableV6, ncclProfiler_v6, make_table);
