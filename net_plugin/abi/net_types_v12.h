// NCCL 2.30, network plugin interface version 12: 8-way virtual NICs, rail and plane. NCCL uses this table in place.
#pragma once

#include "abi/net_types_v11.h"

namespace bagua_net::nccl {

using VirtualDevicePropertiesV12 = VirtualDeviceProperties<8>;
static_assert(sizeof(VirtualDevicePropertiesV12) == 36);

struct NetPropertiesV12 {
  char* name;
  char* pciPath;
  std::uint64_t guid;
  int ptrSupport;
  int regIsGlobal;
  int forceFlush;
  int speed;  // Mb/s
  int port;
  float latency;  // microseconds
  int maxComms;
  int maxRecvs;
  NetDeviceType netDeviceType;
  int netDeviceVersion;
  VirtualDevicePropertiesV12 vProps;
  std::size_t maxP2pBytes;
  std::size_t maxCollBytes;
  int maxMultiRequestSize;
  std::int16_t railId;
  std::int16_t planeId;
};

static_assert(offsetof(NetPropertiesV12, name) == 0);
static_assert(offsetof(NetPropertiesV12, pciPath) == 8);
static_assert(offsetof(NetPropertiesV12, guid) == 16);
static_assert(offsetof(NetPropertiesV12, ptrSupport) == 24);
static_assert(offsetof(NetPropertiesV12, regIsGlobal) == 28);
static_assert(offsetof(NetPropertiesV12, forceFlush) == 32);
static_assert(offsetof(NetPropertiesV12, speed) == 36);
static_assert(offsetof(NetPropertiesV12, port) == 40);
static_assert(offsetof(NetPropertiesV12, latency) == 44);
static_assert(offsetof(NetPropertiesV12, maxComms) == 48);
static_assert(offsetof(NetPropertiesV12, maxRecvs) == 52);
static_assert(offsetof(NetPropertiesV12, netDeviceType) == 56);
static_assert(offsetof(NetPropertiesV12, netDeviceVersion) == 60);
static_assert(offsetof(NetPropertiesV12, vProps) == 64);
static_assert(offsetof(NetPropertiesV12, maxP2pBytes) == 104);
static_assert(offsetof(NetPropertiesV12, maxCollBytes) == 112);
static_assert(offsetof(NetPropertiesV12, maxMultiRequestSize) == 120);
static_assert(offsetof(NetPropertiesV12, railId) == 124);
static_assert(offsetof(NetPropertiesV12, planeId) == 126);
static_assert(sizeof(NetPropertiesV12) == 128);

using NetTableV12 = NetTableSince11<NetPropertiesV12, VirtualDevicePropertiesV12>;

BAGUA_NET_ASSERT_SLOTS(NetTableV12, name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf,
                       deregMr, isend, irecv, iflush, test, closeSend, closeRecv, closeListen, getDeviceMr,
                       irecvConsumed, makeVDevice, finalize, setNetAttr);

}  // namespace bagua_net::nccl
