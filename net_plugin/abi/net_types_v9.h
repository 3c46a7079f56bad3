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

struct NetTableV9 {
  const char* name;
  InitV5* init;
  DevicesV5* devices;
  GetProperties<NetPropertiesV9>* getProperties;
  ListenV5* listen;
  ConnectV7* connect;
  AcceptV7* accept;
  RegMrV8* regMr;
  RegMrDmaBufV6* regMrDmaBuf;
  DeregMrV5* deregMr;
  IsendV9* isend;
  IrecvV9* irecv;
  IflushV5* iflush;
  TestV5* test;
  CloseV5* closeSend;
  CloseV5* closeRecv;
  CloseV5* closeListen;
  GetDeviceMrV7* getDeviceMr;
  IrecvConsumedV7* irecvConsumed;
  MakeVirtualDevice<VirtualDevicePropertiesV9>* makeVDevice;
};

BAGUA_NET_ASSERT_SLOT(NetTableV9, name, 0);
BAGUA_NET_ASSERT_SLOT(NetTableV9, init, 1);
BAGUA_NET_ASSERT_SLOT(NetTableV9, devices, 2);
BAGUA_NET_ASSERT_SLOT(NetTableV9, getProperties, 3);
BAGUA_NET_ASSERT_SLOT(NetTableV9, listen, 4);
BAGUA_NET_ASSERT_SLOT(NetTableV9, connect, 5);
BAGUA_NET_ASSERT_SLOT(NetTableV9, accept, 6);
BAGUA_NET_ASSERT_SLOT(NetTableV9, regMr, 7);
BAGUA_NET_ASSERT_SLOT(NetTableV9, regMrDmaBuf, 8);
BAGUA_NET_ASSERT_SLOT(NetTableV9, deregMr, 9);
BAGUA_NET_ASSERT_SLOT(NetTableV9, isend, 10);
BAGUA_NET_ASSERT_SLOT(NetTableV9, irecv, 11);
BAGUA_NET_ASSERT_SLOT(NetTableV9, iflush, 12);
BAGUA_NET_ASSERT_SLOT(NetTableV9, test, 13);
BAGUA_NET_ASSERT_SLOT(NetTableV9, closeSend, 14);
BAGUA_NET_ASSERT_SLOT(NetTableV9, closeRecv, 15);
BAGUA_NET_ASSERT_SLOT(NetTableV9, closeListen, 16);
BAGUA_NET_ASSERT_SLOT(NetTableV9, getDeviceMr, 17);
BAGUA_NET_ASSERT_SLOT(NetTableV9, irecvConsumed, 18);
BAGUA_NET_ASSERT_SLOT(NetTableV9, makeVDevice, 19);
static_assert(sizeof(NetTableV9) == 20 * sizeof(void*));

}  // namespace bagua_net::nccl
