// Table v9, for NCCL 2.24 to 2.30 (the newest one that both sides know is taken).
#include "abi/net_types_v9.h"

#include "abi/slots.h"

namespace bagua_net::abi {
namespace {

constexpr nccl::NetTableV9 make_table() {
  nccl::NetTableV9 table{};
  slots::set_common_slots(&table);
  table.init = &slots::init_v5<9>;
  table.getProperties = &slots::get_properties<nccl::NetPropertiesV9, fill_properties_v9>;
  table.listen = &slots::listen_v5;
  table.connect = &slots::connect_v7;
  table.accept = &slots::accept_v7;
  table.regMr = &slots::reg_mr_v8;
  table.isend = &slots::isend_v9;
  table.irecv = &slots::irecv_v9;
  return table;
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(NetTableV9, ncclNetPlugin_v9, make_table);
