// Adapters from NCCL's argument lists to common_entry.h, each written once and named after the first version that has
// the signature. net_v<N>.cc puts them into its table. They convert and do nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/common_entry.h"
#include "abi/device_properties.h"
#include "abi/export_table.h"
#include "abi/net_types_v12.h"
#include "abi/plugin_name.h"

namespace bagua_net::abi::slots {

using nccl::Logger;
using nccl::NetCommConfig;
using nccl::NetDeviceHandle;
using nccl::ProfilerCallback;
using nccl::Result;

// Sizes were int before v9; a size_t that does not fit becomes negative, and negative sizes are refused.
template <typename Size>
std::int64_t first_size(int n, const Size* sizes) {
  return n == 1 && sizes != nullptr ? static_cast<std::int64_t>(sizes[0]) : 0;
}

template <int kVersion>
Result init_v5(Logger* logger) {
  return init(kVersion, logger);
}
template <int kVersion>
Result init_v10(Logger* logger, ProfilerCallback* profiler) {
  return init(kVersion, logger, profiler);
}
// The configuration holds a traffic class for RDMA networks; TCP has no use for it.
template <int kVersion>
Result init_v11(void** ctx, std::uint64_t comm_id, NetCommConfig* /*config*/, Logger* logger,
                ProfilerCallback* profiler) {
  return init_communicator(kVersion, logger, comm_id, ctx, profiler);
}

template <typename Properties, void (*kFill)(const DeviceFacts&, Properties*)>
Result get_properties(int dev, Properties* props) {
  DeviceFacts facts{};
  const Result result = device_facts(dev, props, &facts);
  if (result == Result::kSuccess) kFill(facts, props);
  return result;
}

inline Result listen_v5(int dev, void* handle, void** listen_comm) { return listen(nullptr, dev, handle, listen_comm); }
inline Result listen_v11(void* ctx, int dev, void* handle, void** listen_comm) {
  return listen(ctx, dev, handle, listen_comm);
}

inline Result connect_v5(int dev, void* handle, void** send_comm) {
  return connect(nullptr, dev, handle, send_comm, nullptr);
}
inline Result connect_v7(int dev, void* handle, void** send_comm, NetDeviceHandle** device_handle) {
  return connect(nullptr, dev, handle, send_comm, device_handle);
}
inline Result connect_v10(int dev, NetCommConfig* /*config*/, void* handle, void** send_comm,
                          NetDeviceHandle** device_handle) {
  return connect(nullptr, dev, handle, send_comm, device_handle);
}
inline Result connect_v11(void* ctx, int dev, void* handle, void** send_comm, NetDeviceHandle** device_handle) {
  return connect(ctx, dev, handle, send_comm, device_handle);
}

inline Result accept_v5(void* listen_comm, void** recv_comm) { return accept(listen_comm, recv_comm, nullptr); }
inline Result accept_v7(void* listen_comm, void** recv_comm, NetDeviceHandle** device_handle) {
  return accept(listen_comm, recv_comm, device_handle);
}

inline Result reg_mr_v5(void* comm, void* data, int size, int type, void** mhandle) {
  return register_memory(comm, data, size, type, mhandle);
}
inline Result reg_mr_v8(void* comm, void* data, std::size_t size, int type, void** mhandle) {
  return register_memory(comm, data, static_cast<std::int64_t>(size), type, mhandle);
}

// Tags choose among the buffers of a grouped receive, of which there is one.
inline Result isend_v5(void* send_comm, void* data, int size, int /*tag*/, void* mhandle, void** request) {
  return isend(send_comm, data, size, mhandle, nullptr, request);
}
inline Result isend_v9(void* send_comm, void* data, std::size_t size, int /*tag*/, void* mhandle, void** request) {
  return isend(send_comm, data, static_cast<std::int64_t>(size), mhandle, nullptr, request);
}
inline Result isend_v10(void* send_comm, void* data, std::size_t size, int /*tag*/, void* mhandle, void* phandle,
                        void** request) {
  return isend(send_comm, data, static_cast<std::int64_t>(size), mhandle, phandle, request);
}

inline Result irecv_v5(void* recv_comm, int n, void** data, int* sizes, int* /*tags*/, void** mhandles,
                       void** request) {
  return irecv(recv_comm, n, data, first_size(n, sizes), mhandles, nullptr, request);
}
inline Result irecv_v9(void* recv_comm, int n, void** data, std::size_t* sizes, int* /*tags*/, void** mhandles,
                       void** request) {
  return irecv(recv_comm, n, data, first_size(n, sizes), mhandles, nullptr, request);
}
inline Result irecv_v10(void* recv_comm, int n, void** data, std::size_t* sizes, int* /*tags*/, void** mhandles,
                        void** phandles, void** request) {
  return irecv(recv_comm, n, data, first_size(n, sizes), mhandles, phandles, request);
}

inline Result iflush_v5(void* /*recv_comm*/, int /*n*/, void** /*data*/, int* /*sizes*/, void** /*mhandles*/,
                        void** request) {
  return iflush(request);
}

// The slots that have the same signature in every version, v5 to v12.
template <typename Table>
constexpr void set_common_slots(Table* table) {
  table->name = kPluginName;
  table->devices = &devices;
  table->deregMr = &deregister_memory;
  table->iflush = &iflush_v5;
  table->test = &test;
  table->closeSend = &close;
  table->closeRecv = &close;
  table->closeListen = &close;
}

// Slots that stay NULL, as NCCL allows: regMrDmaBuf (no DMABUF in ptrSupport), getDeviceMr and irecvConsumed (no device
// offload), makeVDevice (NCCL then does not merge NICs), setNetAttr (hints without use here).

}  // namespace bagua_net::abi::slots
