// NCCL 2.26 to 2.30, network plugin interface version 10: profiler events, traffic class.
#pragma once

#include "abi/net_types_v9.h"

namespace bagua_net::nccl {

using NetPropertiesV10 = NetPropertiesV9;

struct NetCommConfig {
  int trafficClass;
};
static_assert(sizeof(NetCommConfig) == 4);

using InitV10 = Result(Logger* logFunction, ProfilerCallback* profFunction);
using ConnectV10 = Result(int dev, NetCommConfig* config, void* handle, void** sendComm, NetDeviceHandle** sendDevComm);
using IsendV10 = Result(void* sendComm, void* data, std::size_t size, int tag, void* mhandle, void* phandle,
                        void** request);
using IrecvV10 = Result(void* recvComm, int n, void** data, std::size_t* sizes, int* tags, void** mhandles,
                        void** phandles, void** request);

struct NetTableV10 {
  const char* name;
  InitV10* init;
  DevicesV5* devices;
  GetProperties<NetPropertiesV10>* getProperties;
  ListenV5* listen;
  ConnectV10* connect;
  AcceptV7* accept;
  RegMrV8* regMr;
  RegMrDmaBufV6* regMrDmaBuf;
  DeregMrV5* deregMr;
  IsendV10* isend;
  IrecvV10* irecv;
  IflushV5* iflush;
  TestV5* test;
  CloseV5* closeSend;
  CloseV5* closeRecv;
  CloseV5* closeListen;
  GetDeviceMrV7* getDeviceMr;
  IrecvConsumedV7* irecvConsumed;
  MakeVirtualDevice<VirtualDevicePropertiesV9>* makeVDevice;
};

BAGUA_NET_ASSERT_SLOT(NetTableV10, name, 0);
BAGUA_NET_ASSERT_SLOT(NetTableV10, init, 1);
BAGUA_NET_ASSERT_SLOT(NetTableV10, devices, 2);
BAGUA_NET_ASSERT_SLOT(NetTableV10, getProperties, 3);
BAGUA_NET_ASSERT_SLOT(NetTableV10, listen, 4);
BAGUA_NET_ASSERT_SLOT(NetTableV10, connect, 5);
BAGUA_NET_ASSERT_SLOT(NetTableV10, accept, 6);
BAGUA_NET_ASSERT_SLOT(NetTableV10, regMr, 7);
BAGUA_NET_ASSERT_SLOT(NetTableV10, regMrDmaBuf, 8);
BAGUA_NET_ASSERT_SLOT(NetTableV10, deregMr, 9);
BAGUA_NET_ASSERT_SLOT(NetTableV10, isend, 10);
BAGUA_NET_ASSERT_SLOT(NetTableV10, irecv, 11);
BAGUA_NET_ASSERT_SLOT(NetTableV10, iflush, 12);
BAGUA_NET_ASSERT_SLOT(NetTableV10, test, 13);
BAGUA_NET_ASSERT_SLOT(NetTableV10, closeSend, 14);
BAGUA_NET_ASSERT_SLOT(NetTableV10, closeRecv, 15);
BAGUA_NET_ASSERT_SLOT(NetTableV10, closeListen, 16);
BAGUA_NET_ASSERT_SLOT(NetTableV10, getDeviceMr, 17);
BAGUA_NET_ASSERT_SLOT(NetTableV10, irecvConsumed, 18);
BAGUA_NET_ASSERT_SLOT(NetTableV10, makeVDevice, 19);
static_assert(sizeof(NetTableV10) == 20 * sizeof(void*));

}  // namespace bagua_net::nccl
