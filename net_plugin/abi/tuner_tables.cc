// Tuner tables v2 (NCCL 2.21), v3 (2.22), v4 (2.24), v5 (2.28) and v6 (2.30): the newest one that both sides know is
// taken.
#include "abi/export_table.h"
#include "abi/plugin_name.h"
#include "abi/tuner_entry.h"

namespace bagua_net::abi {
namespace {

constexpr nccl::TunerTableV2 make_v2() {
  return {kPluginName, &tuner::init_v2, &tuner::get_coll_info_v2, &tuner::finalize_v2};
}
constexpr nccl::TunerTableV3 make_v3() {
  return {kPluginName, &tuner::init_v2, &tuner::get_coll_info_v3, &tuner::finalize_v2};
}
constexpr nccl::TunerTableV4 make_v4() {
  return {kPluginName, &tuner::init_v2, &tuner::get_coll_info_v4, &tuner::finalize_v2};
}
constexpr nccl::TunerTableV5 make_v5() {
  return {kPluginName, &tuner::init_v5, &tuner::get_coll_info_v4, &tuner::finalize_v2};
}
constexpr nccl::TunerTableV6 make_v6() {
  // No getChunkSize: NCCL's chunks are right.
  return {kPluginName, &tuner::init_v5, &tuner::get_coll_info_v4, &tuner::finalize_v2, nullptr};
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(TunerTableV2, ncclTunerPlugin_v2, make_v2);
BAGUA_NET_EXPORT_TABLE(TunerTableV3, ncclTunerPlugin_v3, make_v3);
BAGUA_NET_EXPORT_TABLE(TunerTableV4, ncclTunerPlugin_v4, make_v4);
BAGUA_NET_EXPORT_TABLE(TunerTableV5, ncclTunerPlugin_v5, make_v5);
BAGUA_NET_EXPORT_TABLE(TunerTableV6, ncclTunerPlugin_v6, make_v6);
