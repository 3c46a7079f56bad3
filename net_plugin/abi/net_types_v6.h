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

BAGUA_NET_ASSERT_SLOTS(NetTableV6, name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf,
                       deregMr, isend, irecv, iflush, test, closeSend, closeRecv, closeListen);

}  // namespace bagua_net::nccl
