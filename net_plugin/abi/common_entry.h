// What every version of NCCL's table does, with arguments that fit all versions. The adapters in slots.h bring each
// version's arguments into this form; everything is decided here: checks, NULL for "later", exceptions, log lines.
//
// Rules that hold for all of them (NCCL 2.12 to 2.30):
// - any thread; nothing waits for a peer;
// - no exception leaves; every failure is logged once as a WARN and becomes a result code;
// - `*request` and `*comm` are always written: NULL on "later" and on failure. NCCL clears neither (the slot of an
//   irecv may hold the hint 0x1) and tests whatever it finds.
#pragma once

#include <cstdint>
#include <vector>

#include "abi/net_types.h"

namespace bagua_net::abi {

// Before v11: any number of times, never finalized.
nccl::Result init(int table_version, nccl::Logger* logger, nccl::ProfilerCallback* profiler = nullptr);
// v11+: once per communicator; *ctx is NULL after a failure.
nccl::Result init_communicator(int table_version, nccl::Logger* logger, std::uint64_t communicator_id, void** ctx,
                               nccl::ProfilerCallback* profiler);
nccl::Result finalize(void* ctx);

nccl::Result devices(int* ndev);

// What getProperties needs to know of a device; the strings live indefinitely.
struct DeviceFacts {
  std::vector<int> parts;  // itself, or the devices that NCCL joined into it
  char* name;
  char* pci_path;  // nullptr for a virtual device
  std::uint64_t guid;
  int speed_mbps;
  int port;
};
nccl::Result device_facts(int dev, const void* props, DeviceFacts* facts);

// v9+: *dev takes the place of these devices. NCCL counts the devices again afterwards.
nccl::Result make_virtual_device(const std::vector<int>& devs, int* dev);

// ctx is NULL before v11. The device handle pointers are NULL before v7, and may be NULL later.
nccl::Result listen(void* ctx, int dev, void* handle, void** listen_comm);
nccl::Result connect(void* ctx, int dev, void* handle, void** send_comm, nccl::NetDeviceHandle** device_handle);
nccl::Result accept(void* listen_comm, void** recv_comm, nccl::NetDeviceHandle** device_handle);
nccl::Result close(void* comm);  // any of the three kinds

nccl::Result register_memory(void* comm, void* data, std::int64_t bytes, int type, void** mhandle);
nccl::Result deregister_memory(void* comm, void* mhandle);

// phandle: NCCL's event that the message is part of (v10+), or NULL.
nccl::Result isend(void* send_comm, void* data, std::int64_t bytes, void* mhandle, void* phandle, void** request);
// `bytes` is the first of the n sizes.
nccl::Result irecv(void* recv_comm, int n, void** data, std::int64_t bytes, void** mhandles, void** phandles,
                   void** request);
nccl::Result iflush(void** request);
nccl::Result test(void* request, int* done, int* sizes);

}  // namespace bagua_net::abi
