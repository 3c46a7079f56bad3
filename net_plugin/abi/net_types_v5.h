// NCCL 2.12 to 2.25, network plugin interface version 5: tags, grouped receives, latency, non-blocking connect. Slot
// signatures are named after the version that introduced them; later headers reuse them.
#pragma once

#include "abi/nccl_types.h"

namespace bagua_net::nccl {

struct NetPropertiesV5 {
  char* name;  // keys the topology node: unique per device
  char* pciPath;
  std::uint64_t guid;
  int ptrSupport;
  int speed;  // Mb/s
  int port;
  float latency;  // microseconds
  int maxComms;
  int maxRecvs;
};

static_assert(offsetof(NetPropertiesV5, name) == 0);
static_assert(offsetof(NetPropertiesV5, pciPath) == 8);
static_assert(offsetof(NetPropertiesV5, guid) == 16);
static_assert(offsetof(NetPropertiesV5, ptrSupport) == 24);
static_assert(offsetof(NetPropertiesV5, speed) == 28);
static_assert(offsetof(NetPropertiesV5, port) == 32);
static_assert(offsetof(NetPropertiesV5, latency) == 36);
static_assert(offsetof(NetPropertiesV5, maxComms) == 40);
static_assert(offsetof(NetPropertiesV5, maxRecvs) == 44);
static_assert(sizeof(NetPropertiesV5) == 48);

using InitV5 = Result(Logger* logFunction);
using DevicesV5 = Result(int* ndev);
template <typename Properties>
using GetProperties = Result(int dev, Properties* props);
using ListenV5 = Result(int dev, void* handle, void** listenComm);
using ConnectV5 = Result(int dev, void* handle, void** sendComm);
using AcceptV5 = Result(void* listenComm, void** recvComm);
using RegMrV5 = Result(void* comm, void* data, int size, int type, void** mhandle);
using DeregMrV5 = Result(void* comm, void* mhandle);
using IsendV5 = Result(void* sendComm, void* data, int size, int tag, void* mhandle, void** request);
using IrecvV5 = Result(void* recvComm, int n, void** data, int* sizes, int* tags, void** mhandles, void** request);
using IflushV5 = Result(void* recvComm, int n, void** data, int* sizes, void** mhandles, void** request);
using TestV5 = Result(void* request, int* done, int* sizes);
using CloseV5 = Result(void* comm);

struct NetTableV5 {
  const char* name;
  InitV5* init;
  DevicesV5* devices;
  GetProperties<NetPropertiesV5>* getProperties;
  ListenV5* listen;
  ConnectV5* connect;
  AcceptV5* accept;
  RegMrV5* regMr;
  DeregMrV5* deregMr;
  IsendV5* isend;
  IrecvV5* irecv;
  IflushV5* iflush;
  TestV5* test;
  CloseV5* closeSend;
  CloseV5* closeRecv;
  CloseV5* closeListen;
};

BAGUA_NET_ASSERT_SLOTS(NetTableV5, name, init, devices, getProperties, listen, connect, accept, regMr, deregMr, isend,
                       irecv, iflush, test, closeSend, closeRecv, closeListen);

}  // namespace bagua_net::nccl
