// Table v8, for NCCL 2.20 to 2.30 (the newest one that both sides know is taken).
#include "abi/net_types_v8.h"

#include "abi/slots.h"

namespace bagua_net::abi {
namespace {

constexpr nccl::NetTableV8 make_table() {
  nccl::NetTableV8 table{};
  slots::set_common_slots(&table);
  table.init = &slots::init_v5<8>;
  table.getProperties = &slots::get_properties<nccl::NetPropertiesV8, fill_properties_v8>;
  table.listen = &slots::listen_v5;
  table.connect = &slots::connect_v7;
  table.accept = &slots::accept_v7;
  table.regMr = &slots::reg_mr_v8;
  table.isend = &slots::isend_v5;
  table.irecv = &slots::irecv_v5;
  return table;
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(NetTableV8, ncclNetPlugin_v8, make_table);
