// Tuner table v2, for NCCL 2.21 to 2.30 (the newest one that both sides know is taken).
#include "abi/export_table.h"
#include "abi/plugin_name.h"
#include "abi/tuner_entry.h"

namespace bagua_net::abi {
namespace {

constexpr nccl::TunerTableV2 make_table() {
  nccl::TunerTableV2 table{};
  table.name = kPluginName;
  table.init = &tuner::init_v2;
  table.getCollInfo = &tuner::get_coll_info_v2;
  table.destroy = &tuner::finalize_v2;
  return table;
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(TunerTableV2, ncclTunerPlugin_v2, make_table);
