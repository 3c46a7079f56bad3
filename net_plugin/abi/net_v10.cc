// Table v10, for NCCL 2.26 to 2.30 (the newest one that both sides know is taken).
#include "abi/net_types_v10.h"

#include "abi/slots.h"

namespace bagua_net::abi {
namespace {

constexpr nccl::NetTableV10 make_table() {
  nccl::NetTableV10 table{};
  slots::set_common_slots(&table);
  table.init = &slots::init_v10<10>;
  table.getProperties = &slots::get_properties<nccl::NetPropertiesV10, fill_properties_v9>;
  table.listen = &slots::listen_v5;
  table.connect = &slots::connect_v10;
  table.accept = &slots::accept_v7;
  table.regMr = &slots::reg_mr_v8;
  table.isend = &slots::isend_v10;
  table.irecv = &slots::irecv_v10;
  return table;
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(NetTableV10, ncclNetPlugin_v10, make_table);
