// NCCL 2.19 to 2.30, network plugin interface version 7: device offload, which a host transport declines.
#pragma once

#include "abi/net_types_v6.h"

namespace bagua_net::nccl {

struct NetPropertiesV7 {
  char* name;
  char* pciPath;
  std::uint64_t guid;
  int ptrSupport;
  int speed;  // Mb/s
  int port;
  float latency;  // microseconds
  int maxComms;
  int maxRecvs;
  NetDeviceType netDeviceType;
  int netDeviceVersion;
};

static_assert(offsetof(NetPropertiesV7, name) == 0);
static_assert(offsetof(NetPropertiesV7, pciPath) == 8);
static_assert(offsetof(NetPropertiesV7, guid) == 16);
static_assert(offsetof(NetPropertiesV7, ptrSupport) == 24);
static_assert(offsetof(NetPropertiesV7, speed) == 28);
static_assert(offsetof(NetPropertiesV7, port) == 32);
static_assert(offsetof(NetPropertiesV7, latency) == 36);
static_assert(offsetof(NetPropertiesV7, maxComms) == 40);
static_assert(offsetof(NetPropertiesV7, maxRecvs) == 44);
static_assert(offsetof(NetPropertiesV7, netDeviceType) == 48);
static_assert(offsetof(NetPropertiesV7, netDeviceVersion) == 52);
static_assert(sizeof(NetPropertiesV7) == 56);

struct NetDeviceHandle {
  NetDeviceType netDeviceType;
  int netDeviceVersion;
  void* handle;
  std::size_t size;
  int needsProxyProgress;
};

static_assert(offsetof(NetDeviceHandle, netDeviceType) == 0);
static_assert(offsetof(NetDeviceHandle, netDeviceVersion) == 4);
static_assert(offsetof(NetDeviceHandle, handle) == 8);
static_assert(offsetof(NetDeviceHandle, size) == 16);
static_assert(offsetof(NetDeviceHandle, needsProxyProgress) == 24);
static_assert(sizeof(NetDeviceHandle) == 32);

using ConnectV7 = Result(int dev, void* handle, void** sendComm, NetDeviceHandle** sendDevComm);
using AcceptV7 = Result(void* listenComm, void** recvComm, NetDeviceHandle** recvDevComm);
using GetDeviceMrV7 = Result(void* comm, void* mhandle, void** dptrMhandle);
using IrecvConsumedV7 = Result(void* recvComm, int n, void* request);

// Version 8 changed how sizes are given, and no slot.
template <typename Properties, typename RegMr>
struct NetTableSince7 {
  const char* name;
  InitV5* init;
  DevicesV5* devices;
  GetProperties<Properties>* getProperties;
  ListenV5* listen;
  ConnectV7* connect;
  AcceptV7* accept;
  RegMr* regMr;
  RegMrDmaBufV6* regMrDmaBuf;
  DeregMrV5* deregMr;
  IsendV5* isend;
  IrecvV5* irecv;
  IflushV5* iflush;
  TestV5* test;
  CloseV5* closeSend;
  CloseV5* closeRecv;
  CloseV5* closeListen;
  GetDeviceMrV7* getDeviceMr;
  IrecvConsumedV7* irecvConsumed;
};

using NetTableV7 = NetTableSince7<NetPropertiesV7, RegMrV5>;

BAGUA_NET_ASSERT_SLOTS(NetTableV7, name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf,
                       deregMr, isend, irecv, iflush, test, closeSend, closeRecv, closeListen, getDeviceMr,
                       irecvConsumed);

}  // namespace bagua_net::nccl
