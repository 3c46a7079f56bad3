// Profiler tables v4 (NCCL 2.27), v5 (2.28), v6 (2.29 and 2.30) and v7 (2.31): the newest one that both sides know is
// taken. v7 has not been run with NCCL yet.
#include "abi/export_table.h"
#include "abi/plugin_name.h"
#include "abi/profiler_entry.h"

namespace bagua_net::abi {
namespace {

template <typename Table, typename Init, typename Start>
constexpr Table make_table(Init* init, Start* start_event) {
  return {kPluginName, init, start_event, &profiler::stop_event, &profiler::record_event_state, &profiler::finalize};
}
constexpr nccl::ProfilerTableV4 make_v4() {
  return make_table<nccl::ProfilerTableV4>(&profiler::init_v4, &profiler::start_event_v4);
}
constexpr nccl::ProfilerTableV5 make_v5() {
  return make_table<nccl::ProfilerTableV5>(&profiler::init_v5, &profiler::start_event_v5);
}
constexpr nccl::ProfilerTableV6 make_v6() {
  return make_table<nccl::ProfilerTableV6>(&profiler::init_v5, &profiler::start_event_v6);
}
constexpr nccl::ProfilerTableV7 make_v7() {
  return make_table<nccl::ProfilerTableV7>(&profiler::init_v5, &profiler::start_event_v7);
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(ProfilerTableV4, ncclProfiler_v4, make_v4);
BAGUA_NET_EXPORT_TABLE(ProfilerTableV5, ncclProfiler_v5, make_v5);
BAGUA_NET_EXPORT_TABLE(ProfilerTableV6, ncclProfiler_v6, make_v6);
BAGUA_NET_EXPORT_TABLE(ProfilerTableV7, ncclProfiler_v7, make_v7);
