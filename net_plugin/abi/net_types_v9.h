// NCCL 2.24 to 2.30, network plugin interface version 9: size_t transfers, virtual NICs, largest sizes.
#pragma once

#include "abi/net_types_v8.h"

namespace bagua_net::nccl {

template <int kMaxDevices>
struct VirtualDeviceProperties {
  int ndevs;
  int devs[kMaxDevices];
};
using VirtualDevicePropertiesV9 = VirtualDeviceProperties<4>;
static_assert(sizeof(VirtualDevicePropertiesV9) == 20);

struct NetPropertiesV9 {
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
  VirtualDevicePropertiesV9 vProps;
  std::size_t maxP2pBytes;
  std::size_t maxCollBytes;
};

static_assert(offsetof(NetPropertiesV9, name) == 0);
static_assert(offsetof(NetPropertiesV9, pciPath) == 8);
static_assert(offsetof(NetPropertiesV9, guid) == 16);
static_assert(offsetof(NetPropertiesV9, ptrSupport) == 24);
static_assert(offsetof(NetPropertiesV9, regIsGlobal) == 28);
static_assert(offsetof(NetPropertiesV9, forceFlush) == 32);
static_assert(offsetof(NetPropertiesV9, speed) == 36);
static_assert(offsetof(NetPropertiesV9, port) == 40);
static_assert(offsetof(NetPropertiesV9, latency) == 44);
static_assert(offsetof(NetPropertiesV9, maxComms) == 48);
static_assert(offsetof(NetPropertiesV9, maxRecvs) == 52);
static_assert(offsetof(NetPropertiesV9, netDeviceType) == 56);
static_assert(offsetof(NetPropertiesV9, netDeviceVersion) == 60);
static_assert(offsetof(NetPropertiesV9, vProps) == 64);
static_assert(offsetof(NetPropertiesV9, maxP2pBytes) == 88);
static_assert(offsetof(NetPropertiesV9, maxCollBytes) == 96);
static_assert(sizeof(NetPropertiesV9) == 104);

using IsendV9 = Result(void* sendComm, void* data, std::size_t size, int tag, void* mhandle, void** request);
using IrecvV9 = Result(void* recvComm, int n, void** data, std::size_t* sizes, int* tags, void** mhandles,
                       void** request);
template <typename VirtualProperties>
using MakeVirtualDevice = Result(int* d, VirtualProperties* props);

// Version 10 changed these signatures, and no slot.
template <typename Init, typename Connect, typename Isend, typename Irecv>
struct NetTableSince9 {
  const char* name;
  Init* init;
  DevicesV5* devices;
  GetProperties<NetPropertiesV9>* getProperties;
  ListenV5* listen;
  Connect* connect;
  AcceptV7* accept;
  RegMrV8* regMr;
  RegMrDmaBufV6* regMrDmaBuf;
  DeregMrV5* deregMr;
  Isend* isend;
  Irecv* irecv;
  IflushV5* iflush;
  TestV5* test;
  CloseV5* closeSend;
  CloseV5* closeRecv;
  CloseV5* closeListen;
  GetDeviceMrV7* getDeviceMr;
  IrecvConsumedV7* irecvConsumed;
  MakeVirtualDevice<VirtualDevicePropertiesV9>* makeVDevice;
};

using NetTableV9 = NetTableSince9<InitV5, ConnectV7, IsendV9, IrecvV9>;

BAGUA_NET_ASSERT_SLOTS(NetTableV9, name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf,
                       deregMr, isend, irecv, iflush, test, closeSend, closeRecv, closeListen, getDeviceMr,
                       irecvConsumed, makeVDevice);

}  // namespace bagua_net::nccl
