// The tables that NCCL finds by their C names: of each kind it takes the newest that both sides know. exports.map names
// them all.
#include "abi/nccl_log.h"
#include "abi/profiler_entry.h"
#include "abi/slots.h"
#include "abi/tuner_entry.h"
#include "config/plugin_config.h"
#include "transport/device.h"

// The table is data that NCCL finds by its C name and uses in place: constant, and there as long as the library is.
// What follows the symbol is its value, with the names of bagua_net::abi and bagua_net::nccl.
#define BAGUA_NET_EXPORT_TABLE(Table, symbol, ...)                        \
  namespace bagua_net::abi {                                              \
  using namespace nccl;                                                   \
  extern "C" {                                                            \
  extern __attribute__((visibility("default"))) const nccl::Table symbol; \
  const nccl::Table symbol = __VA_ARGS__;                                 \
  }                                                                       \
  }                                                                       \
  static_assert(sizeof(bagua_net::abi::symbol) == sizeof(bagua_net::nccl::Table))

namespace bagua_net::abi {
namespace {

// Slots that stay NULL, as NCCL allows: regMrDmaBuf (no DMABUF in ptrSupport), getDeviceMr and irecvConsumed (no device
// offload), setNetAttr (hints without use here).
template <int kVersion, typename Table>
Table make_net_table() {
  Table table{};
  table.name = kPluginName;
  table.init = &slots::init<kVersion>;
  table.devices = &devices;
  table.getProperties = &slots::get_properties<kVersion>;
  table.listen = &slots::listen;
  table.connect = &slots::connect;
  table.accept = &slots::accept;
  table.regMr = &slots::register_memory;
  table.deregMr = &deregister_memory;
  table.isend = &slots::isend;
  table.irecv = &slots::irecv;
  table.iflush = &slots::iflush;
  table.test = &test;
  table.closeSend = &close;
  table.closeRecv = &close;
  table.closeListen = &close;
  if constexpr (kVersion >= 9) {
    // NCCL joins devices where the table has this, by default those on one card: the two ports of a NIC, and rails of
    // one port, which are there to be apart. Ours are joined where the user has asked NCCL for it; all else stays as it
    // was. Read when NCCL opens the library; NCCL has put what its configuration files say into the environment before.
    if (nccl_is_to_join(process_environment())) table.makeVDevice = &slots::make_virtual_device;
  }
  if constexpr (kVersion >= 11) table.finalize = &finalize;
  return table;
}

template <typename Table>
constexpr Table make_profiler_table() {
  return {
      kPluginName,        &profiler::init, &profiler::start_event, &profiler::stop_event, &profiler::record_event_state,
      &profiler::finalize};
}

template <typename Table>
constexpr Table make_tuner_table() {
  return {kPluginName, &tuner::init, &tuner::get_coll_info, &tuner::finalize};
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(NetTableV5, ncclNetPlugin_v5, make_net_table<5, NetTableV5>());      // NCCL 2.12 to 2.25
BAGUA_NET_EXPORT_TABLE(NetTableV6, ncclNetPlugin_v6, make_net_table<6, NetTableV6>());      // 2.13 to 2.30
BAGUA_NET_EXPORT_TABLE(NetTableV7, ncclNetPlugin_v7, make_net_table<7, NetTableV7>());      // 2.19 to 2.30
BAGUA_NET_EXPORT_TABLE(NetTableV8, ncclNetPlugin_v8, make_net_table<8, NetTableV8>());      // 2.20 to 2.30
BAGUA_NET_EXPORT_TABLE(NetTableV9, ncclNetPlugin_v9, make_net_table<9, NetTableV9>());      // 2.24 to 2.30
BAGUA_NET_EXPORT_TABLE(NetTableV10, ncclNetPlugin_v10, make_net_table<10, NetTableV10>());  // 2.26 to 2.30
BAGUA_NET_EXPORT_TABLE(NetTableV11, ncclNetPlugin_v11, make_net_table<11, NetTableV11>());  // 2.28 to 2.30
BAGUA_NET_EXPORT_TABLE(NetTableV12, ncclNetPlugin_v12, make_net_table<12, NetTableV12>());  // 2.30

BAGUA_NET_EXPORT_TABLE(ProfilerTableV4, ncclProfiler_v4, make_profiler_table<ProfilerTableV4>());  // NCCL 2.27
BAGUA_NET_EXPORT_TABLE(ProfilerTableV5, ncclProfiler_v5, make_profiler_table<ProfilerTableV5>());  // 2.28
BAGUA_NET_EXPORT_TABLE(ProfilerTableV6, ncclProfiler_v6, make_profiler_table<ProfilerTableV6>());  // 2.29, 2.30
BAGUA_NET_EXPORT_TABLE(ProfilerTableV7, ncclProfiler_v7,
                       make_profiler_table<ProfilerTableV7>());  // 2.31; not run with it yet

BAGUA_NET_EXPORT_TABLE(TunerTableV2, ncclTunerPlugin_v2, make_tuner_table<TunerTableV2>());  // NCCL 2.21
BAGUA_NET_EXPORT_TABLE(TunerTableV3, ncclTunerPlugin_v3, make_tuner_table<TunerTableV3>());  // 2.22
BAGUA_NET_EXPORT_TABLE(TunerTableV4, ncclTunerPlugin_v4, make_tuner_table<TunerTableV4>());  // 2.24
BAGUA_NET_EXPORT_TABLE(TunerTableV5, ncclTunerPlugin_v5, make_tuner_table<TunerTableV5>());  // 2.28
// 2.30. No getChunkSize: NCCL's chunks are right.
BAGUA_NET_EXPORT_TABLE(TunerTableV6, ncclTunerPlugin_v6,
                       {kPluginName, &tuner::init, &tuner::get_coll_info, &tuner::finalize, nullptr});
