// The network tables that NCCL finds, v5 to v12: it takes the newest one that both sides know.
#include <strings.h>

#include <cstdlib>

#include "abi/export_table.h"
#include "abi/plugin_name.h"
#include "abi/slots.h"

namespace bagua_net::abi {
namespace {

// NCCL joins devices where the table has makeVDevice, by default those on one card: the two ports of a NIC, and rails
// of one port, which are there to be apart. Ours are joined where the user has asked NCCL for it; all else stays as it
// was. Read when NCCL opens the library; NCCL has put what its configuration files say into the environment before.
bool nccl_is_to_join() {
  const char* const level = std::getenv("NCCL_NET_MERGE_LEVEL");
  const char* const groups = std::getenv("NCCL_NET_FORCE_MERGE");
  return (groups != nullptr && *groups != 0) || (level != nullptr && *level != 0 && strcasecmp(level, "LOC") != 0);
}

// Slots that stay NULL, as NCCL allows: regMrDmaBuf (no DMABUF in ptrSupport), getDeviceMr and irecvConsumed (no device
// offload), setNetAttr (hints without use here).
template <int kVersion, typename Table>
Table make_table() {
  Table table{};
  table.name = kPluginName;
  table.init = &slots::init<kVersion>;
  table.devices = &devices;
  table.getProperties = &slots::get_properties<kVersion>;
  table.listen = &slots::listen;
  table.connect = &slots::connect;
  table.accept = &slots::accept;
  table.regMr = &slots::register_memory;
  table.deregMr = &deregister_memory;
  table.isend = &slots::isend;
  table.irecv = &slots::irecv;
  table.iflush = &slots::iflush;
  table.test = &test;
  table.closeSend = &close;
  table.closeRecv = &close;
  table.closeListen = &close;
  if constexpr (kVersion >= 9) {
    if (nccl_is_to_join()) table.makeVDevice = &slots::make_virtual_device;
  }
  if constexpr (kVersion >= 11) table.finalize = &finalize;
  return table;
}

}  // namespace
}  // namespace bagua_net::abi

BAGUA_NET_EXPORT_TABLE(NetTableV5, ncclNetPlugin_v5, make_table<5, NetTableV5>());      // NCCL 2.12 to 2.25
BAGUA_NET_EXPORT_TABLE(NetTableV6, ncclNetPlugin_v6, make_table<6, NetTableV6>());      // 2.13 to 2.30
BAGUA_NET_EXPORT_TABLE(NetTableV7, ncclNetPlugin_v7, make_table<7, NetTableV7>());      // 2.19 to 2.30
BAGUA_NET_EXPORT_TABLE(NetTableV8, ncclNetPlugin_v8, make_table<8, NetTableV8>());      // 2.20 to 2.30
BAGUA_NET_EXPORT_TABLE(NetTableV9, ncclNetPlugin_v9, make_table<9, NetTableV9>());      // 2.24 to 2.30
BAGUA_NET_EXPORT_TABLE(NetTableV10, ncclNetPlugin_v10, make_table<10, NetTableV10>());  // 2.26 to 2.30
BAGUA_NET_EXPORT_TABLE(NetTableV11, ncclNetPlugin_v11, make_table<11, NetTableV11>());  // 2.28 to 2.30
BAGUA_NET_EXPORT_TABLE(NetTableV12, ncclNetPlugin_v12, make_table<12, NetTableV12>());  // 2.30
