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

struct NetTableV8 {
  const char* name;
  InitV5* init;
  DevicesV5* devices;
  GetProperties<NetPropertiesV8>* getProperties;
  ListenV5* listen;
  ConnectV7* connect;
  AcceptV7* accept;
  RegMrV8* regMr;
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

BAGUA_NET_ASSERT_SLOT(NetTableV8, name, 0);
BAGUA_NET_ASSERT_SLOT(NetTableV8, init, 1);
BAGUA_NET_ASSERT_SLOT(NetTableV8, devices, 2);
BAGUA_NET_ASSERT_SLOT(NetTableV8, getProperties, 3);
BAGUA_NET_ASSERT_SLOT(NetTableV8, listen, 4);
BAGUA_NET_ASSERT_SLOT(NetTableV8, connect, 5);
BAGUA_NET_ASSERT_SLOT(NetTableV8, accept, 6);
BAGUA_NET_ASSERT_SLOT(NetTableV8, regMr, 7);
BAGUA_NET_ASSERT_SLOT(NetTableV8, regMrDmaBuf, 8);
BAGUA_NET_ASSERT_SLOT(NetTableV8, deregMr, 9);
BAGUA_NET_ASSERT_SLOT(NetTableV8, isend, 10);
BAGUA_NET_ASSERT_SLOT(NetTableV8, irecv, 11);
BAGUA_NET_ASSERT_SLOT(NetTableV8, iflush, 12);
BAGUA_NET_ASSERT_SLOT(NetTableV8, test, 13);
BAGUA_NET_ASSERT_SLOT(NetTableV8, closeSend, 14);
BAGUA_NET_ASSERT_SLOT(NetTableV8, closeRecv, 15);
BAGUA_NET_ASSERT_SLOT(NetTableV8, closeListen, 16);
BAGUA_NET_ASSERT_SLOT(NetTableV8, getDeviceMr, 17);
BAGUA_NET_ASSERT_SLOT(NetTableV8, irecvConsumed, 18);
static_assert(sizeof(NetTableV8) == 19 * sizeof(void*));

}  // namespace bagua_net::nccl
