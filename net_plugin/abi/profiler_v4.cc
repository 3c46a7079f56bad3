// Profiler table v4, for NCCL 2.27 to 2.30 (the newest one that both sides know is taken).
#include "abi/export_table.h"
#include "abi/plugin_name.h"
#include "abi/profiler_entry.h"

namespace bagua_net::abi {
namespace {

constexpr nccl::ProfilerTableV4 make_table() {
  nccl::ProfilerTableV4 table{};
  table.name = kPluginName;
  table.init = &profiler::init_v4;
  table.startEvent = &profiler::start_event_v4;
  table.stopEvent = &profiler::stop_event;
  table.recordEventState = &profiler::record_event_state;
  table.finalize = &profiler::finalize;
  return table;
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(ProfilerTableV4, ncclProfiler_v4, make_table);
