// The answer to getProperties, with what each version added to the one before. All fields of all versions are covered,
// because NCCL passes an uninitialised structure.
#pragma once

#include <cstddef>
#include <iterator>

#include "abi/common_entry.h"
#include "transport/transport_context.h"

namespace bagua_net::abi {

template <int kVersion, typename Properties>
void fill_properties(const DeviceFacts& device, Properties* props) {
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
  if constexpr (kVersion >= 7) {
    props->netDeviceType = nccl::NetDeviceType::kHost;  // NCCL skips a plugin whose type it does not know
    props->netDeviceVersion = nccl::kNetDeviceInvalidVersion;
  }
  if constexpr (kVersion >= 8) {
    props->regIsGlobal = 0;  // deregistering stops the I/O of one comm, so a registration belongs to one
  }
  if constexpr (kVersion >= 9) {
    props->forceFlush = 0;  // matters with GPU memory only
    for (const int part : device.parts) {
      if (static_cast<std::size_t>(props->vProps.ndevs) < std::size(props->vProps.devs)) {
        props->vProps.devs[props->vProps.ndevs++] = part;
      }
    }
    // test reports sizes as int, so no message may be longer than one can say; 0 or above 2^40 would fail connecting.
    props->maxP2pBytes = kMaxMessageBytes;
    props->maxCollBytes = kMaxMessageBytes;
  }
  if constexpr (kVersion >= 11) props->maxMultiRequestSize = 1;
  if constexpr (kVersion >= 12) {
    props->railId = nccl::kUndefined;  // undefined: NCCL keeps rings on a rail by guid and port
    props->planeId = nccl::kUndefined;
  }
}

}  // namespace bagua_net::abi
