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

struct NetTableV7 {
  const char* name;
  InitV5* init;
  DevicesV5* devices;
  GetProperties<NetPropertiesV7>* getProperties;
  ListenV5* listen;
  ConnectV7* connect;
  AcceptV7* accept;
  RegMrV5* regMr;
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

BAGUA_NET_ASSERT_SLOT(NetTableV7, name, 0);
BAGUA_NET_ASSERT_SLOT(NetTableV7, init, 1);
BAGUA_NET_ASSERT_SLOT(NetTableV7, devices, 2);
BAGUA_NET_ASSERT_SLOT(NetTableV7, getProperties, 3);
BAGUA_NET_ASSERT_SLOT(NetTableV7, listen, 4);
BAGUA_NET_ASSERT_SLOT(NetTableV7, connect, 5);
BAGUA_NET_ASSERT_SLOT(NetTableV7, accept, 6);
BAGUA_NET_ASSERT_SLOT(NetTableV7, regMr, 7);
BAGUA_NET_ASSERT_SLOT(NetTableV7, regMrDmaBuf, 8);
BAGUA_NET_ASSERT_SLOT(NetTableV7, deregMr, 9);
BAGUA_NET_ASSERT_SLOT(NetTableV7, isend, 10);
BAGUA_NET_ASSERT_SLOT(NetTableV7, irecv, 11);
BAGUA_NET_ASSERT_SLOT(NetTableV7, iflush, 12);
BAGUA_NET_ASSERT_SLOT(NetTableV7, test, 13);
BAGUA_NET_ASSERT_SLOT(NetTableV7, closeSend, 14);
BAGUA_NET_ASSERT_SLOT(NetTableV7, closeRecv, 15);
BAGUA_NET_ASSERT_SLOT(NetTableV7, closeListen, 16);
BAGUA_NET_ASSERT_SLOT(NetTableV7, getDeviceMr, 17);
BAGUA_NET_ASSERT_SLOT(NetTableV7, irecvConsumed, 18);
static_assert(sizeof(NetTableV7) == 19 * sizeof(void*));

}  // namespace bagua_net::nccl
