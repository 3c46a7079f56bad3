// NCCL 2.13 to 2.30, network plugin interface version 6: memory registration by DMA-BUF.
#pragma once

#include "abi/net_types_v5.h"

namespace bagua_net::nccl {

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

BAGUA_NET_ASSERT_SLOT(NetTableV6, name, 0);
BAGUA_NET_ASSERT_SLOT(NetTableV6, init, 1);
BAGUA_NET_ASSERT_SLOT(NetTableV6, devices, 2);
BAGUA_NET_ASSERT_SLOT(NetTableV6, getProperties, 3);
BAGUA_NET_ASSERT_SLOT(NetTableV6, listen, 4);
BAGUA_NET_ASSERT_SLOT(NetTableV6, connect, 5);
BAGUA_NET_ASSERT_SLOT(NetTableV6, accept, 6);
BAGUA_NET_ASSERT_SLOT(NetTableV6, regMr, 7);
BAGUA_NET_ASSERT_SLOT(NetTableV6, regMrDmaBuf, 8);
BAGUA_NET_ASSERT_SLOT(NetTableV6, deregMr, 9);
BAGUA_NET_ASSERT_SLOT(NetTableV6, isend, 10);
BAGUA_NET_ASSERT_SLOT(NetTableV6, irecv, 11);
BAGUA_NET_ASSERT_SLOT(NetTableV6, iflush, 12);
BAGUA_NET_ASSERT_SLOT(NetTableV6, test, 13);
BAGUA_NET_ASSERT_SLOT(NetTableV6, closeSend, 14);
BAGUA_NET_ASSERT_SLOT(NetTableV6, closeRecv, 15);
BAGUA_NET_ASSERT_SLOT(NetTableV6, closeListen, 16);
static_assert(sizeof(NetTableV6) == 17 * sizeof(void*));

}  // namespace bagua_net::nccl
