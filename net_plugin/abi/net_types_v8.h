// NCCL 2.20 to 2.30, network plugin interface version 8: size_t registrations.
#pragma once

#include "abi/net_types_v7.h"

namespace bagua_net::nccl {

struct NetPropertiesV8 {
  char* name;
  char* pciPath;
  std::uint64_t guid;
  int ptrSupport;
  int regIsGlobal;  // a registration holds for all comms of the device
  int speed;        // Mb/s
  int port;
  float latency;  // microseconds
  int maxComms;
  int maxRecvs;
  NetDeviceType netDeviceType;
  int netDeviceVersion;
};

static_assert(offsetof(NetPropertiesV8, name) == 0);
static_assert(offsetof(NetPropertiesV8, pciPath) == 8);
static_assert(offsetof(NetPropertiesV8, guid) == 16);
static_assert(offsetof(NetPropertiesV8, ptrSupport) == 24);
static_assert(offsetof(NetPropertiesV8, regIsGlobal) == 28);
static_assert(offsetof(NetPropertiesV8, speed) == 32);
static_assert(offsetof(NetPropertiesV8, port) == 36);
static_assert(offsetof(NetPropertiesV8, latency) == 40);
static_assert(offsetof(NetPropertiesV8, maxComms) == 44);
static_assert(offsetof(NetPropertiesV8, maxRecvs) == 48);
static_assert(offsetof(NetPropertiesV8, netDeviceType) == 52);
static_assert(offsetof(NetPropertiesV8, netDeviceVersion) == 56);
static_assert(sizeof(NetPropertiesV8) == 64);

using RegMrV8 = Result(void* comm, void* data, std::size_t size, int type, void** mhandle);

using NetTableV8 = NetTableSince7<NetPropertiesV8, RegMrV8>;

BAGUA_NET_ASSERT_SLOTS(NetTableV8, name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf,
                       deregMr, isend, irecv, iflush, test, closeSend, closeRecv, closeListen, getDeviceMr,
                       irecvConsumed);

}  // namespace bagua_net::nccl
