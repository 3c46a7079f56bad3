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

using NetTableV10 = NetTableSince9<InitV10, ConnectV10, IsendV10, IrecvV10>;

BAGUA_NET_ASSERT_SLOTS(NetTableV10, name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf,
                       deregMr, isend, irecv, iflush, test, closeSend, closeRecv, closeListen, getDeviceMr,
                       irecvConsumed, makeVDevice);

}  // namespace bagua_net::nccl
