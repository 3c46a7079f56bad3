// NCCL's profiler plugin interface, versions 4 to 7 (NCCL 2.27, 2.28, 2.29 to 2.30 and 2.31). Field and slot names are
// NCCL's.
#pragma once

#include "abi/nccl_types.h"

namespace bagua_net::nccl {

// What an event is, and which ones a profiler asks for: bits of the activation mask.
constexpr std::uint64_t kProfileGroup = 1u << 0;          // a launch of a plan: collectives that run together
constexpr std::uint64_t kProfileColl = 1u << 1;           // a collective, until it is enqueued
constexpr std::uint64_t kProfileP2p = 1u << 2;            // a send or receive, until it is enqueued
constexpr std::uint64_t kProfileProxyOp = 1u << 3;        // what a channel of one of them sends or receives
constexpr std::uint64_t kProfileProxyStep = 1u << 4;      // one message of that
constexpr std::uint64_t kProfileNetPlugin = 1u << 7;      // what a network plugin reports through ProfilerCallback
constexpr std::uint64_t kProfileGroupApi = 1u << 8;       // v5+: from ncclGroupStart to the end of ncclGroupEnd
constexpr std::uint64_t kProfileCollApi = 1u << 9;        // v5+: a call such as ncclAllReduce
constexpr std::uint64_t kProfileP2pApi = 1u << 10;        // v5+: ncclSend, ncclRecv
constexpr std::uint64_t kProfileKernelLaunch = 1u << 11;  // v5+
constexpr std::uint64_t kProfileCeColl = 1u << 12;        // v6+: a collective by the copy engines, until it is enqueued

// The states of an event that say what a message waits for. Others exist, and are not looked at.
enum class ProfilerState : int {
  kSendGpuWait = 8,  // the GPU has not written the data yet
  kSendWait = 9,     // it is being sent
  kRecvWait = 10,    // it is being received
  kRecvFlushWait = 11,
  kRecvGpuWait = 12,   // the GPU has not read the data yet
  kSendPeerWait = 20,  // the receiver has no room yet
};

struct ProfiledGroupApi {
  bool graphCaptured;
  int groupDepth;
};

struct ProfiledCollApi {
  const char* func;
  std::size_t count;
  const char* datatype;
  int root;
  void* stream;
  bool graphCaptured;
};

struct ProfiledP2pApi {
  const char* func;
  std::size_t count;
  const char* datatype;
  void* stream;
  bool graphCaptured;
};

struct ProfiledKernelLaunch {
  void* stream;
};

struct ProfiledColl {
  std::uint64_t seqNumber;
  const char* func;
  const void* sendBuff;
  void* recvBuff;
  std::size_t count;
  int root;
  const char* datatype;
  std::uint8_t nChannels;
  std::uint8_t nWarps;
  const char* algo;
  const char* proto;
};

struct ProfiledP2p {
  const char* func;
  void* buff;
  const char* datatype;
  std::size_t count;
  int peer;
  std::uint8_t nChannels;
};

struct ProfiledProxyOp {
  int pid;
  std::uint8_t channelId;
  int peer;
  int nSteps;
  int chunkSize;
  int isSend;
};

struct ProfiledProxyStep {
  int step;
};

struct ProfiledKernelChannel {
  std::uint8_t channelId;
  std::uint64_t pTimer;
};

struct ProfiledNetEvent {
  std::int64_t id;
  void* data;
};

// v5 adds a field at the end of these.
struct ProfiledCollV5 {
  ProfiledColl coll;
  void* parentGroup;
};
struct ProfiledP2pV5 {
  ProfiledP2p p2p;
  void* parentGroup;
};

struct ProfiledCeColl {
  std::uint64_t seqNumber;
  const char* func;
  const void* sendBuff;
  void* recvBuff;
  std::size_t count;
  int root;
  const char* datatype;
  const char* syncStrategy;
  bool intraBatchSync;
  std::uint32_t batchSize;
  std::uint32_t numBatches;
  std::uint32_t ceSeqNum;
  void* stream;
};

// v7 adds fields at the end of these: what the user has named a call with (0: nothing), and which kernel runs.
struct ProfiledCollApiV7 {
  const char* func;
  std::size_t count;
  const char* datatype;
  int root;
  void* stream;
  bool graphCaptured;
  std::uint64_t userTag;
};
struct ProfiledP2pApiV7 {
  const char* func;
  std::size_t count;
  const char* datatype;
  void* stream;
  bool graphCaptured;
  std::uint64_t userTag;
};
struct ProfiledCollV7 {
  ProfiledColl coll;
  void* parentGroup;
  const char* kernelVariant;
  bool isSymColl;
  std::uint64_t userTag;
};
struct ProfiledP2pV7 {
  ProfiledP2p p2p;
  void* parentGroup;
  std::uint64_t userTag;
};
struct ProfiledCeCollV7 {
  ProfiledCeColl ceColl;
  std::uint64_t userTag;
};

struct ProfilerEventV4 {
  std::uint8_t type;
  void* parentObj;
  int rank;
  union {
    ProfiledColl coll;
    ProfiledP2p p2p;
    ProfiledProxyOp proxyOp;
    ProfiledProxyStep proxyStep;
    ProfiledKernelChannel kernelCh;
    ProfiledNetEvent netPlugin;
  };
};

struct ProfilerEventV5 {
  std::uint64_t type;
  void* parentObj;
  int rank;
  union {
    ProfiledGroupApi groupApi;
    ProfiledCollApi collApi;
    ProfiledP2pApi p2pApi;
    ProfiledKernelLaunch kernelLaunch;
    ProfiledCollV5 coll;
    ProfiledP2pV5 p2p;
    ProfiledProxyOp proxyOp;
    ProfiledProxyStep proxyStep;
    ProfiledKernelChannel kernelCh;
    ProfiledNetEvent netPlugin;
  };
};

struct ProfilerEventV6 {
  std::uint64_t type;
  void* parentObj;
  int rank;
  union {
    ProfiledGroupApi groupApi;
    ProfiledCollApi collApi;
    ProfiledP2pApi p2pApi;
    ProfiledKernelLaunch kernelLaunch;
    ProfiledCollV5 coll;
    ProfiledP2pV5 p2p;
    ProfiledProxyOp proxyOp;
    ProfiledProxyStep proxyStep;
    ProfiledKernelChannel kernelCh;
    ProfiledNetEvent netPlugin;
    ProfiledCeColl ceColl;
  };
};

struct ProfilerEventV7 {
  std::uint64_t type;
  void* parentObj;
  int rank;
  union {
    ProfiledGroupApi groupApi;
    ProfiledCollApiV7 collApi;
    ProfiledP2pApiV7 p2pApi;
    ProfiledKernelLaunch kernelLaunch;
    ProfiledCollV7 coll;
    ProfiledP2pV7 p2p;
    ProfiledProxyOp proxyOp;
    ProfiledProxyStep proxyStep;
    ProfiledKernelChannel kernelCh;
    ProfiledNetEvent netPlugin;
    ProfiledCeCollV7 ceColl;
  };
};

union ProfilerStateArgs {
  struct {
    std::size_t transSize;
  } proxyStep;
  struct {
    int appendedProxyOps;
  } proxyCtrl;
  struct {
    void* data;
  } netPlugin;
  struct {
    std::uint64_t pTimer;
  } kernelCh;
};

// An error of init makes some versions of NCCL call the table all the same.
using ProfilerInitV4 = Result(void** context, int* eActivationMask, const char* commName, std::uint64_t commHash,
                              int nNodes, int nRanks, int rank, Logger* logFunction);
using ProfilerInitV5 = Result(void** context, std::uint64_t commId, int* eActivationMask, const char* commName,
                              int nNodes, int nRanks, int rank, Logger* logFunction);
template <typename Event>
using StartEvent = Result(void* context, void** eHandle, Event* eDescr);
using StopEventV4 = Result(void* eHandle);
using RecordEventStateV4 = Result(void* eHandle, ProfilerState eState, ProfilerStateArgs* eStateArgs);
using ProfilerFinalizeV4 = Result(void* context);

template <typename Init, typename Event>
struct ProfilerTable {
  const char* name;
  Init* init;
  StartEvent<Event>* startEvent;
  StopEventV4* stopEvent;
  RecordEventStateV4* recordEventState;
  ProfilerFinalizeV4* finalize;
};
using ProfilerTableV4 = ProfilerTable<ProfilerInitV4, ProfilerEventV4>;
using ProfilerTableV5 = ProfilerTable<ProfilerInitV5, ProfilerEventV5>;
using ProfilerTableV6 = ProfilerTable<ProfilerInitV5, ProfilerEventV6>;
using ProfilerTableV7 = ProfilerTable<ProfilerInitV5, ProfilerEventV7>;

static_assert(sizeof(ProfilerState) == sizeof(int), "C enums are ints");
BAGUA_NET_ASSERT_OFFSETS(ProfiledGroupApi, (groupDepth, 4));
BAGUA_NET_ASSERT_OFFSETS(ProfiledCollApi, (func, 0), (count, 8), (datatype, 16), (root, 24), (stream, 32),
                         (graphCaptured, 40));
BAGUA_NET_ASSERT_OFFSETS(ProfiledP2pApi, (func, 0), (count, 8), (datatype, 16), (stream, 24), (graphCaptured, 32));
BAGUA_NET_ASSERT_OFFSETS(ProfiledColl, (seqNumber, 0), (func, 8), (sendBuff, 16), (recvBuff, 24), (count, 32),
                         (root, 40), (datatype, 48), (nChannels, 56), (nWarps, 57), (algo, 64), (proto, 72));
BAGUA_NET_ASSERT_OFFSETS(ProfiledCollV5, (parentGroup, 80));
BAGUA_NET_ASSERT_OFFSETS(ProfiledP2p, (func, 0), (buff, 8), (datatype, 16), (count, 24), (peer, 32), (nChannels, 36));
BAGUA_NET_ASSERT_OFFSETS(ProfiledP2pV5, (parentGroup, 40));
BAGUA_NET_ASSERT_OFFSETS(ProfiledProxyOp, (pid, 0), (channelId, 4), (peer, 8), (nSteps, 12), (chunkSize, 16),
                         (isSend, 20));
BAGUA_NET_ASSERT_OFFSETS(ProfiledKernelChannel, (pTimer, 8));
BAGUA_NET_ASSERT_OFFSETS(ProfiledNetEvent, (data, 8));
BAGUA_NET_ASSERT_OFFSETS(ProfiledCeColl, (syncStrategy, 56), (intraBatchSync, 64), (batchSize, 68), (ceSeqNum, 76),
                         (stream, 80));
BAGUA_NET_ASSERT_OFFSETS(ProfilerEventV4, (parentObj, 8), (rank, 16), (coll, 24));
BAGUA_NET_ASSERT_OFFSETS(ProfilerEventV5, (parentObj, 8), (rank, 16), (coll, 24));
BAGUA_NET_ASSERT_OFFSETS(ProfilerEventV6, (parentObj, 8), (rank, 16), (ceColl, 24));
BAGUA_NET_ASSERT_OFFSETS(ProfiledCollApiV7, (root, 24), (graphCaptured, 40), (userTag, 48));
BAGUA_NET_ASSERT_OFFSETS(ProfiledP2pApiV7, (stream, 24), (graphCaptured, 32), (userTag, 40));
BAGUA_NET_ASSERT_OFFSETS(ProfiledCollV7, (parentGroup, 80), (kernelVariant, 88), (isSymColl, 96), (userTag, 104));
BAGUA_NET_ASSERT_OFFSETS(ProfiledP2pV7, (parentGroup, 40), (userTag, 48));
BAGUA_NET_ASSERT_OFFSETS(ProfiledCeCollV7, (userTag, 88));
BAGUA_NET_ASSERT_OFFSETS(ProfilerEventV7, (parentObj, 8), (rank, 16), (coll, 24));
static_assert(sizeof(ProfiledGroupApi) == 8 && sizeof(ProfiledCeColl) == 88 && sizeof(ProfilerEventV4) == 104 &&
              sizeof(ProfilerEventV5) == 112 && sizeof(ProfilerEventV6) == 112 && sizeof(ProfiledCollApiV7) == 56 &&
              sizeof(ProfiledP2pApiV7) == 48 && sizeof(ProfilerEventV7) == 136);
static_assert(sizeof(ProfilerStateArgs) == 8);
BAGUA_NET_ASSERT_SLOTS(ProfilerTableV4, name, init, startEvent, stopEvent, recordEventState, finalize);
BAGUA_NET_ASSERT_SLOTS(ProfilerTableV5, name, init, startEvent, stopEvent, recordEventState, finalize);
BAGUA_NET_ASSERT_SLOTS(ProfilerTableV6, name, init, startEvent, stopEvent, recordEventState, finalize);
BAGUA_NET_ASSERT_SLOTS(ProfilerTableV7, name, init, startEvent, stopEvent, recordEventState, finalize);

}  // namespace bagua_net::nccl
