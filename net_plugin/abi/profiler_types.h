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
static_assert(offsetof(ProfiledGroupApi, groupDepth) == 4 && sizeof(ProfiledGroupApi) == 8);
static_assert(offsetof(ProfiledCollApi, func) == 0 && offsetof(ProfiledCollApi, count) == 8);
static_assert(offsetof(ProfiledCollApi, datatype) == 16 && offsetof(ProfiledCollApi, root) == 24);
static_assert(offsetof(ProfiledCollApi, stream) == 32 && offsetof(ProfiledCollApi, graphCaptured) == 40);
static_assert(offsetof(ProfiledP2pApi, func) == 0 && offsetof(ProfiledP2pApi, count) == 8);
static_assert(offsetof(ProfiledP2pApi, datatype) == 16 && offsetof(ProfiledP2pApi, stream) == 24);
static_assert(offsetof(ProfiledP2pApi, graphCaptured) == 32);
static_assert(offsetof(ProfiledColl, seqNumber) == 0 && offsetof(ProfiledColl, func) == 8);
static_assert(offsetof(ProfiledColl, sendBuff) == 16 && offsetof(ProfiledColl, recvBuff) == 24);
static_assert(offsetof(ProfiledColl, count) == 32 && offsetof(ProfiledColl, root) == 40);
static_assert(offsetof(ProfiledColl, datatype) == 48 && offsetof(ProfiledColl, nChannels) == 56);
static_assert(offsetof(ProfiledColl, nWarps) == 57 && offsetof(ProfiledColl, algo) == 64);
static_assert(offsetof(ProfiledColl, proto) == 72 && offsetof(ProfiledCollV5, parentGroup) == 80);
static_assert(offsetof(ProfiledP2p, func) == 0 && offsetof(ProfiledP2p, buff) == 8);
static_assert(offsetof(ProfiledP2p, datatype) == 16 && offsetof(ProfiledP2p, count) == 24);
static_assert(offsetof(ProfiledP2p, peer) == 32 && offsetof(ProfiledP2p, nChannels) == 36);
static_assert(offsetof(ProfiledP2pV5, parentGroup) == 40);
static_assert(offsetof(ProfiledProxyOp, pid) == 0 && offsetof(ProfiledProxyOp, channelId) == 4);
static_assert(offsetof(ProfiledProxyOp, peer) == 8 && offsetof(ProfiledProxyOp, nSteps) == 12);
static_assert(offsetof(ProfiledProxyOp, chunkSize) == 16 && offsetof(ProfiledProxyOp, isSend) == 20);
static_assert(offsetof(ProfiledKernelChannel, pTimer) == 8 && offsetof(ProfiledNetEvent, data) == 8);
static_assert(offsetof(ProfiledCeColl, syncStrategy) == 56 && offsetof(ProfiledCeColl, intraBatchSync) == 64);
static_assert(offsetof(ProfiledCeColl, batchSize) == 68 && offsetof(ProfiledCeColl, ceSeqNum) == 76);
static_assert(offsetof(ProfiledCeColl, stream) == 80 && sizeof(ProfiledCeColl) == 88);
static_assert(offsetof(ProfilerEventV4, parentObj) == 8 && offsetof(ProfilerEventV4, rank) == 16);
static_assert(offsetof(ProfilerEventV4, coll) == 24 && sizeof(ProfilerEventV4) == 104);
static_assert(offsetof(ProfilerEventV5, parentObj) == 8 && offsetof(ProfilerEventV5, rank) == 16);
static_assert(offsetof(ProfilerEventV5, coll) == 24 && sizeof(ProfilerEventV5) == 112);
static_assert(offsetof(ProfilerEventV6, parentObj) == 8 && offsetof(ProfilerEventV6, rank) == 16);
static_assert(offsetof(ProfilerEventV6, ceColl) == 24 && sizeof(ProfilerEventV6) == 112);
static_assert(offsetof(ProfiledCollApiV7, root) == 24 && offsetof(ProfiledCollApiV7, graphCaptured) == 40);
static_assert(offsetof(ProfiledCollApiV7, userTag) == 48 && sizeof(ProfiledCollApiV7) == 56);
static_assert(offsetof(ProfiledP2pApiV7, stream) == 24 && offsetof(ProfiledP2pApiV7, graphCaptured) == 32);
static_assert(offsetof(ProfiledP2pApiV7, userTag) == 40 && sizeof(ProfiledP2pApiV7) == 48);
static_assert(offsetof(ProfiledCollV7, parentGroup) == 80 && offsetof(ProfiledCollV7, kernelVariant) == 88);
static_assert(offsetof(ProfiledCollV7, isSymColl) == 96 && offsetof(ProfiledCollV7, userTag) == 104);
static_assert(offsetof(ProfiledP2pV7, parentGroup) == 40 && offsetof(ProfiledP2pV7, userTag) == 48);
static_assert(offsetof(ProfiledCeCollV7, userTag) == 88);
static_assert(offsetof(ProfilerEventV7, parentObj) == 8 && offsetof(ProfilerEventV7, rank) == 16);
static_assert(offsetof(ProfilerEventV7, coll) == 24 && sizeof(ProfilerEventV7) == 136);
static_assert(sizeof(ProfilerStateArgs) == 8);
BAGUA_NET_ASSERT_SLOTS(ProfilerTableV4, name, init, startEvent, stopEvent, recordEventState, finalize);
BAGUA_NET_ASSERT_SLOTS(ProfilerTableV5, name, init, startEvent, stopEvent, recordEventState, finalize);
BAGUA_NET_ASSERT_SLOTS(ProfilerTableV6, name, init, startEvent, stopEvent, recordEventState, finalize);
BAGUA_NET_ASSERT_SLOTS(ProfilerTableV7, name, init, startEvent, stopEvent, recordEventState, finalize);

}  // namespace bagua_net::nccl
