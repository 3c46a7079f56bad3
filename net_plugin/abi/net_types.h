// NCCL's network plugin interface, versions 5 to 12. Field and slot names are NCCL's; slot signatures are named after
// the version that introduced them, and later ones reuse them.
#pragma once

#include "abi/nccl_types.h"

namespace bagua_net::nccl {

// --- NCCL 2.12 to 2.25, version 5: tags, grouped receives, latency, non-blocking connect.

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

BAGUA_NET_ASSERT_OFFSETS(NetPropertiesV5, (name, 0), (pciPath, 8), (guid, 16), (ptrSupport, 24), (speed, 28),
                         (port, 32), (latency, 36), (maxComms, 40), (maxRecvs, 44));
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

// --- NCCL 2.13 to 2.30, version 6: memory registration by DMA-BUF.

using NetPropertiesV6 = NetPropertiesV5;

using RegMrDmaBufV6 = Result(void* comm, void* data, std::size_t size, int type, std::uint64_t offset, int fd,
                             void** mhandle);

struct NetTableV6 {
  const char* name;
  InitV5* init;
  DevicesV5* devices;
  GetProperties<NetPropertiesV6>* getProperties;
  ListenV5* listen;
  ConnectV5* connect;
  AcceptV5* accept;
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
};

BAGUA_NET_ASSERT_SLOTS(NetTableV6, name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf,
                       deregMr, isend, irecv, iflush, test, closeSend, closeRecv, closeListen);

// --- NCCL 2.19 to 2.30, version 7: device offload, which a host transport declines.

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

BAGUA_NET_ASSERT_OFFSETS(NetPropertiesV7, (name, 0), (pciPath, 8), (guid, 16), (ptrSupport, 24), (speed, 28),
                         (port, 32), (latency, 36), (maxComms, 40), (maxRecvs, 44), (netDeviceType, 48),
                         (netDeviceVersion, 52));
static_assert(sizeof(NetPropertiesV7) == 56);

struct NetDeviceHandle {
  NetDeviceType netDeviceType;
  int netDeviceVersion;
  void* handle;
  std::size_t size;
  int needsProxyProgress;
};

BAGUA_NET_ASSERT_OFFSETS(NetDeviceHandle, (netDeviceType, 0), (netDeviceVersion, 4), (handle, 8), (size, 16),
                         (needsProxyProgress, 24));
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

// --- NCCL 2.20 to 2.30, version 8: size_t registrations.

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

BAGUA_NET_ASSERT_OFFSETS(NetPropertiesV8, (name, 0), (pciPath, 8), (guid, 16), (ptrSupport, 24), (regIsGlobal, 28),
                         (speed, 32), (port, 36), (latency, 40), (maxComms, 44), (maxRecvs, 48), (netDeviceType, 52),
                         (netDeviceVersion, 56));
static_assert(sizeof(NetPropertiesV8) == 64);

using RegMrV8 = Result(void* comm, void* data, std::size_t size, int type, void** mhandle);

using NetTableV8 = NetTableSince7<NetPropertiesV8, RegMrV8>;

BAGUA_NET_ASSERT_SLOTS(NetTableV8, name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf,
                       deregMr, isend, irecv, iflush, test, closeSend, closeRecv, closeListen, getDeviceMr,
                       irecvConsumed);

// --- NCCL 2.24 to 2.30, version 9: size_t transfers, virtual NICs, largest sizes.

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

BAGUA_NET_ASSERT_OFFSETS(NetPropertiesV9, (name, 0), (pciPath, 8), (guid, 16), (ptrSupport, 24), (regIsGlobal, 28),
                         (forceFlush, 32), (speed, 36), (port, 40), (latency, 44), (maxComms, 48), (maxRecvs, 52),
                         (netDeviceType, 56), (netDeviceVersion, 60), (vProps, 64), (maxP2pBytes, 88),
                         (maxCollBytes, 96));
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

// --- NCCL 2.26 to 2.30, version 10: profiler events, traffic class.

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

using NetTableV10 = NetTableSince9<InitV10, ConnectV10, IsendV10, IrecvV10>;

BAGUA_NET_ASSERT_SLOTS(NetTableV10, name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf,
                       deregMr, isend, irecv, iflush, test, closeSend, closeRecv, closeListen, getDeviceMr,
                       irecvConsumed, makeVDevice);

// --- NCCL 2.28 to 2.30, version 11: a context per communicator, finalize, attributes.

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

BAGUA_NET_ASSERT_OFFSETS(NetPropertiesV11, (name, 0), (pciPath, 8), (guid, 16), (ptrSupport, 24), (regIsGlobal, 28),
                         (forceFlush, 32), (speed, 36), (port, 40), (latency, 44), (maxComms, 48), (maxRecvs, 52),
                         (netDeviceType, 56), (netDeviceVersion, 60), (vProps, 64), (maxP2pBytes, 88),
                         (maxCollBytes, 96), (maxMultiRequestSize, 104));
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

BAGUA_NET_ASSERT_OFFSETS(NetCommAttr, (maxConcurrentPeers, 0), (minConcurrentPeers, 4), (maxFlowsPerPeer, 8),
                         (minFlowsPerPeer, 12));
BAGUA_NET_ASSERT_OFFSETS(NetAttr, (sendCommAttr, 0), (recvCommAttr, 16), (op, 32), (algo, 36), (proto, 40));
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

// --- NCCL 2.30, version 12: 8-way virtual NICs, rail and plane. NCCL uses this table in place.

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

BAGUA_NET_ASSERT_OFFSETS(NetPropertiesV12, (name, 0), (pciPath, 8), (guid, 16), (ptrSupport, 24), (regIsGlobal, 28),
                         (forceFlush, 32), (speed, 36), (port, 40), (latency, 44), (maxComms, 48), (maxRecvs, 52),
                         (netDeviceType, 56), (netDeviceVersion, 60), (vProps, 64), (maxP2pBytes, 104),
                         (maxCollBytes, 112), (maxMultiRequestSize, 120), (railId, 124), (planeId, 126));
static_assert(sizeof(NetPropertiesV12) == 128);

using NetTableV12 = NetTableSince11<NetPropertiesV12, VirtualDevicePropertiesV12>;

BAGUA_NET_ASSERT_SLOTS(NetTableV12, name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf,
                       deregMr, isend, irecv, iflush, test, closeSend, closeRecv, closeListen, getDeviceMr,
                       irecvConsumed, makeVDevice, finalize, setNetAttr);

}  // namespace bagua_net::nccl
