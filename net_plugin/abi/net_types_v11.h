// NCCL 2.28 to 2.30, network plugin interface version 11: a context per communicator, finalize, attributes.
#pragma once

#include "abi/net_types_v10.h"

namespace bagua_net::nccl {

struct NetPropertiesV11 {
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
  int maxMultiRequestSize;
};

static_assert(offsetof(NetPropertiesV11, name) == 0);
static_assert(offsetof(NetPropertiesV11, pciPath) == 8);
static_assert(offsetof(NetPropertiesV11, guid) == 16);
static_assert(offsetof(NetPropertiesV11, ptrSupport) == 24);
static_assert(offsetof(NetPropertiesV11, regIsGlobal) == 28);
static_assert(offsetof(NetPropertiesV11, forceFlush) == 32);
static_assert(offsetof(NetPropertiesV11, speed) == 36);
static_assert(offsetof(NetPropertiesV11, port) == 40);
static_assert(offsetof(NetPropertiesV11, latency) == 44);
static_assert(offsetof(NetPropertiesV11, maxComms) == 48);
static_assert(offsetof(NetPropertiesV11, maxRecvs) == 52);
static_assert(offsetof(NetPropertiesV11, netDeviceType) == 56);
static_assert(offsetof(NetPropertiesV11, netDeviceVersion) == 60);
static_assert(offsetof(NetPropertiesV11, vProps) == 64);
static_assert(offsetof(NetPropertiesV11, maxP2pBytes) == 88);
static_assert(offsetof(NetPropertiesV11, maxCollBytes) == 96);
static_assert(offsetof(NetPropertiesV11, maxMultiRequestSize) == 104);
static_assert(sizeof(NetPropertiesV11) == 112);

struct NetCommAttr {
  std::int32_t maxConcurrentPeers;
  std::int32_t minConcurrentPeers;
  std::int32_t maxFlowsPerPeer;
  std::int32_t minFlowsPerPeer;
};

struct NetAttr {
  NetCommAttr sendCommAttr;
  NetCommAttr recvCommAttr;
  std::uint32_t op;
  std::uint32_t algo;
  std::uint32_t proto;
};

static_assert(offsetof(NetCommAttr, maxConcurrentPeers) == 0);
static_assert(offsetof(NetCommAttr, minConcurrentPeers) == 4);
static_assert(offsetof(NetCommAttr, maxFlowsPerPeer) == 8);
static_assert(offsetof(NetCommAttr, minFlowsPerPeer) == 12);
static_assert(offsetof(NetAttr, sendCommAttr) == 0);
static_assert(offsetof(NetAttr, recvCommAttr) == 16);
static_assert(offsetof(NetAttr, op) == 32);
static_assert(offsetof(NetAttr, algo) == 36);
static_assert(offsetof(NetAttr, proto) == 40);
static_assert(sizeof(NetAttr) == 44);

using InitV11 = Result(void** ctx, std::uint64_t commId, NetCommConfig* config, Logger* logFunction,
                       ProfilerCallback* profFunction);
using ListenV11 = Result(void* ctx, int dev, void* handle, void** listenComm);
using ConnectV11 = Result(void* ctx, int dev, void* handle, void** sendComm, NetDeviceHandle** sendDevComm);
using FinalizeV11 = Result(void* ctx);
using SetNetAttrV11 = Result(void* ctx, NetAttr* netAttr);

// Version 12 changed what properties look like, and no slot.
template <typename Properties, typename VirtualProperties>
struct NetTableSince11 {
  const char* name;
  InitV11* init;
  DevicesV5* devices;
  GetProperties<Properties>* getProperties;
  ListenV11* listen;
  ConnectV11* connect;
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
  MakeVirtualDevice<VirtualProperties>* makeVDevice;
  FinalizeV11* finalize;
  SetNetAttrV11* setNetAttr;
};

using NetTableV11 = NetTableSince11<NetPropertiesV11, VirtualDevicePropertiesV9>;

BAGUA_NET_ASSERT_SLOTS(NetTableV11, name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf,
                       deregMr, isend, irecv, iflush, test, closeSend, closeRecv, closeListen, getDeviceMr,
                       irecvConsumed, makeVDevice, finalize, setNetAttr);

}  // namespace bagua_net::nccl
