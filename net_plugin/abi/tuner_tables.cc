// Tuner tables v2 (NCCL 2.21), v3 (2.22), v4 (2.24), v5 (2.28) and v6 (2.30): the newest one that both sides know is
// taken.
#include "abi/export_table.h"
#include "abi/plugin_name.h"
#include "abi/tuner_entry.h"

namespace bagua_net::abi {
namespace {

template <typename Table>
constexpr Table make_table() {
  return {kPluginName, &tuner::init, &tuner::get_coll_info, &tuner::finalize};
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(TunerTableV2, ncclTunerPlugin_v2, make_table<TunerTableV2>());
BAGUA_NET_EXPORT_TABLE(TunerTableV3, ncclTunerPlugin_v3, make_table<TunerTableV3>());
BAGUA_NET_EXPORT_TABLE(TunerTableV4, ncclTunerPlugin_v4, make_table<TunerTableV4>());
BAGUA_NET_EXPORT_TABLE(TunerTableV5, ncclTunerPlugin_v5, make_table<TunerTableV5>());
// No getChunkSize: NCCL's chunks are right.
BAGUA_NET_EXPORT_TABLE(TunerTableV6, ncclTunerPlugin_v6,
                       {kPluginName, &tuner::init, &tuner::get_coll_info, &tuner::finalize, nullptr});
