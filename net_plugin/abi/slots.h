// Adapters from NCCL's argument lists to common_entry.h. A slot has one name here and a function for each signature
// that it has had: the type of the slot in a version's table chooses (tables.cc). They convert and do nothing else.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "abi/common_entry.h"
#include "abi/net_types.h"
#include "transport/transport_context.h"

namespace bagua_net::abi::slots {

using nccl::Logger;
using nccl::NetCommConfig;
using nccl::NetDeviceHandle;
using nccl::ProfilerCallback;
using nccl::Result;

// The answer to getProperties, with what each version added to the one before. All fields of all versions are covered,
// because NCCL passes an uninitialised structure.
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

// Sizes were int before v9; a size_t that does not fit becomes negative, and negative sizes are refused.
template <typename Size>
std::int64_t first_size(int n, const Size* sizes) {
  return n == 1 && sizes != nullptr ? static_cast<std::int64_t>(sizes[0]) : 0;
}

template <int kVersion>
Result init(Logger* logger) {
  return abi::init(kVersion, logger);
}
template <int kVersion>
Result init(Logger* logger, ProfilerCallback* profiler) {
  return abi::init(kVersion, logger, profiler);
}
// The configuration holds a traffic class for RDMA networks; TCP has no use for it.
template <int kVersion>
Result init(void** ctx, std::uint64_t comm_id, NetCommConfig* /*config*/, Logger* logger, ProfilerCallback* profiler) {
  return init_communicator(kVersion, logger, comm_id, ctx, profiler);
}

template <int kVersion, typename Properties>
Result get_properties(int dev, Properties* props) {
  DeviceFacts facts{};
  const Result result = device_facts(dev, props, &facts);
  if (result == Result::kSuccess) fill_properties<kVersion>(facts, props);
  return result;
}

template <typename Properties>
Result make_virtual_device(int* dev, Properties* props) {
  constexpr int kMost = static_cast<int>(std::size(Properties{}.devs));
  const int count = props == nullptr ? 0 : std::clamp(props->ndevs, 0, kMost);
  return abi::make_virtual_device(count == 0 ? std::vector<int>() : std::vector<int>(props->devs, props->devs + count),
                                  dev);
}

using abi::listen;  // v11
inline Result listen(int dev, void* handle, void** listen_comm) { return listen(nullptr, dev, handle, listen_comm); }

using abi::connect;  // v11
inline Result connect(int dev, void* handle, void** send_comm) {
  return connect(nullptr, dev, handle, send_comm, nullptr);
}
inline Result connect(int dev, void* handle, void** send_comm, NetDeviceHandle** device_handle) {
  return connect(nullptr, dev, handle, send_comm, device_handle);
}
inline Result connect(int dev, NetCommConfig* /*config*/, void* handle, void** send_comm,
                      NetDeviceHandle** device_handle) {
  return abi::connect(nullptr, dev, handle, send_comm, device_handle);
}

using abi::accept;  // v7
inline Result accept(void* listen_comm, void** recv_comm) { return accept(listen_comm, recv_comm, nullptr); }

template <typename Size>
Result register_memory(void* comm, void* data, Size size, int type, void** mhandle) {
  return abi::register_memory(comm, data, static_cast<std::int64_t>(size), type, mhandle);
}

// Tags choose among the buffers of a grouped receive, of which there is one.
template <typename Size>
Result isend(void* send_comm, void* data, Size size, int /*tag*/, void* mhandle, void** request) {
  return abi::isend(send_comm, data, static_cast<std::int64_t>(size), mhandle, nullptr, request);
}
template <typename Size>
Result isend(void* send_comm, void* data, Size size, int /*tag*/, void* mhandle, void* phandle, void** request) {
  return abi::isend(send_comm, data, static_cast<std::int64_t>(size), mhandle, phandle, request);
}

template <typename Size>
Result irecv(void* recv_comm, int n, void** data, Size* sizes, int* /*tags*/, void** mhandles, void** request) {
  return abi::irecv(recv_comm, n, data, first_size(n, sizes), mhandles, nullptr, request);
}
template <typename Size>
Result irecv(void* recv_comm, int n, void** data, Size* sizes, int* /*tags*/, void** mhandles, void** phandles,
             void** request) {
  return abi::irecv(recv_comm, n, data, first_size(n, sizes), mhandles, phandles, request);
}

inline Result iflush(void* /*recv_comm*/, int /*n*/, void** /*data*/, int* /*sizes*/, void** /*mhandles*/,
                     void** request) {
  return abi::iflush(request);
}

}  // namespace bagua_net::abi::slots
