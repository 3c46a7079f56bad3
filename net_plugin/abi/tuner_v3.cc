// Tuner table v3, for NCCL 2.22 to 2.30 (the newest one that both sides know is taken).
#include "abi/export_table.h"
#include "abi/plugin_name.h"
#include "abi/tuner_entry.h"

namespace bagua_net::abi {
namespace {

constexpr nccl::TunerTableV3 make_table() {
  nccl::TunerTableV3 table{};
  table.name = kPluginName;
  table.init = &tuner::init_v2;
  table.getCollInfo = &tuner::get_coll_info_v3;
  table.destroy = &tuner::finalize_v2;
  return table;
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(TunerTableV3, ncclTunerPlugin_v3, make_table);
