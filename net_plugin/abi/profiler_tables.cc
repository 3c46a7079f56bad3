// Profiler tables v4 (NCCL 2.27), v5 (2.28), v6 (2.29 and 2.30) and v7 (2.31): the newest one that both sides know is
// taken. v7 has not been run with NCCL yet.
#include "abi/export_table.h"
#include "abi/plugin_name.h"
#include "abi/profiler_entry.h"

namespace bagua_net::abi {
namespace {

template <typename Table>
constexpr Table make_table() {
  return {
      kPluginName,        &profiler::init, &profiler::start_event, &profiler::stop_event, &profiler::record_event_state,
      &profiler::finalize};
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(ProfilerTableV4, ncclProfiler_v4, make_table<ProfilerTableV4>());
BAGUA_NET_EXPORT_TABLE(ProfilerTableV5, ncclProfiler_v5, make_table<ProfilerTableV5>());
BAGUA_NET_EXPORT_TABLE(ProfilerTableV6, ncclProfiler_v6, make_table<ProfilerTableV6>());
BAGUA_NET_EXPORT_TABLE(ProfilerTableV7, ncclProfiler_v7, make_table<ProfilerTableV7>());
