// Table v11, for NCCL 2.28 to 2.30 (the newest one that both sides know is taken).
#include "abi/net_types_v11.h"

#include "abi/slots.h"

namespace bagua_net::abi {
namespace {

constexpr nccl::NetTableV11 make_table() {
  nccl::NetTableV11 table{};
  slots::set_common_slots(&table);
  table.init = &slots::init_v11<11>;
  table.getProperties = &slots::get_properties<nccl::NetPropertiesV11, fill_properties_v11>;
  table.listen = &slots::listen_v11;
  table.connect = &slots::connect_v11;
  table.accept = &slots::accept_v7;
  table.regMr = &slots::reg_mr_v8;
  table.isend = &slots::isend_v10;
  table.irecv = &slots::irecv_v10;
  table.finalize = &finalize;
  return table;
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(NetTableV11, ncclNetPlugin_v11, make_table);
