// The answer to getProperties. Each function fills what its version added to the one before; all fields of all versions
// are covered, because NCCL passes an uninitialised structure.
#pragma once

#include "abi/common_entry.h"
#include "transport/transport_context.h"

namespace bagua_net::abi {

template <typename Properties>
void fill_properties_v5(const DeviceFacts& device, Properties* props) {
  *props = Properties{};
  props->name = device.name;
  props->pciPath = device.pci_path;  // NULL: NCCL attaches the device to the first CPU
  props->guid = device.guid;         // devices that share guid and port would share one bandwidth budget
  props->port = device.port;
  props->ptrSupport = nccl::kPointerHost;
  props->speed = device.speed_mbps;
  // Enters NCCL's cost model and, alone among its inputs, is not agreed on between ranks: one constant for all of them,
  // or they could choose different algorithms. 0 is what NCCL's own socket transport says.
  props->latency = 0;
  props->maxComms = 65536;  // stored, never read
  props->maxRecvs = 1;      // grouped receives save handshakes of RDMA; TCP has none to save
}

template <typename Properties>
void fill_properties_v7(const DeviceFacts& device, Properties* props) {
  fill_properties_v5(device, props);
  props->netDeviceType = nccl::NetDeviceType::kHost;  // NCCL skips a plugin whose type it does not know
  props->netDeviceVersion = nccl::kNetDeviceInvalidVersion;
}

template <typename Properties>
void fill_properties_v8(const DeviceFacts& device, Properties* props) {
  fill_properties_v7(device, props);
  props->regIsGlobal = 0;  // deregistering stops the I/O of one comm, so a registration belongs to one
}

template <typename Properties>
void fill_properties_v9(const DeviceFacts& device, Properties* props) {
  fill_properties_v8(device, props);
  props->forceFlush = 0;  // matters with GPU memory only
  props->vProps.ndevs = 1;
  props->vProps.devs[0] = device.index;
  // test reports sizes as int, so no message may be longer than one can say; 0 or above 2^40 would fail connecting.
  props->maxP2pBytes = kMaxMessageBytes;
  props->maxCollBytes = kMaxMessageBytes;
}

template <typename Properties>
void fill_properties_v11(const DeviceFacts& device, Properties* props) {
  fill_properties_v9(device, props);
  props->maxMultiRequestSize = 1;
}

template <typename Properties>
void fill_properties_v12(const DeviceFacts& device, Properties* props) {
  fill_properties_v11(device, props);
  props->railId = nccl::kUndefined;  // undefined: NCCL keeps rings on a rail by guid and port
  props->planeId = nccl::kUndefined;
}

}  // namespace bagua_net::abi
