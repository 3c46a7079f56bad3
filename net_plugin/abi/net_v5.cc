// Table v5, for NCCL 2.12 to 2.25 (the newest one that both sides know is taken).
#include "abi/net_types_v5.h"

#include "abi/slots.h"

namespace bagua_net::abi {
namespace {

constexpr nccl::NetTableV5 make_table() {
  nccl::NetTableV5 table{};
  slots::set_common_slots(&table);
  table.init = &slots::init_v5<5>;
  table.getProperties = &slots::get_properties<nccl::NetPropertiesV5, fill_properties_v5>;
  table.listen = &slots::listen_v5;
  table.connect = &slots::connect_v5;
  table.accept = &slots::accept_v5;
  table.regMr = &slots::reg_mr_v5;
  table.isend = &slots::isend_v5;
  table.irecv = &slots::irecv_v5;
  return table;
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(NetTableV5, ncclNetPlugin_v5, make_table);
