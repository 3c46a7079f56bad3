// Tuner table v6, for NCCL 2.30.
#include "abi/export_table.h"
#include "abi/plugin_name.h"
#include "abi/tuner_entry.h"

namespace bagua_net::abi {
namespace {

constexpr nccl::TunerTableV6 make_table() {
  nccl::TunerTableV6 table{};
  table.name = kPluginName;
  table.init = &tuner::init_v5;
  table.getCollInfo = &tuner::get_coll_info_v4;
  table.finalize = &tuner::finalize_v2;
  // getChunkSize stays NULL: NCCL's chunks are right.
  return table;
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(TunerTableV6, ncclTunerPlugin_v6, make_table);
