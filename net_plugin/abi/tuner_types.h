// NCCL's tuner plugin interface, versions 2 to 6 (NCCL 2.21 to 2.30). Slot signatures are named after the version that
// introduced them.
#pragma once

#include "abi/nccl_types.h"

namespace bagua_net::nccl {

enum class TunedFunction : int {
  kBroadcast = 0,
  kReduce = 1,
  kAllGather = 2,
  kReduceScatter = 3,
  kAllReduce = 4,
};

// v5+: how ranks share NVLink, and the constants of NCCL's cost model. Never looked at here, nor may they be: NCCL 2.31
// passes constants that it has not written yet.
struct TunerNvlDomain;
struct TunerConstants;

using TunerInitV2 = Result(std::size_t nRanks, std::size_t nNodes, Logger* logFunction, void** context);
using TunerInitV5 = Result(void** context, std::uint64_t commId, std::size_t nRanks, std::size_t nNodes,
                           Logger* logFunction, TunerNvlDomain* nvlDomainInfo, TunerConstants* constants);

// nChannels is 0 on entry; a value written there replaces NCCL's own. It lands in a signed byte: 1 to 127.
using GetCollInfoV2 = Result(void* context, TunedFunction collType, std::size_t nBytes, int collNetSupport,
                             int nvlsSupport, int numPipeOps, int* algorithm, int* protocol, int* nChannels);
// The table is float[numAlgo][numProto], whatever its type says.
using GetCollInfoV3 = Result(void* context, TunedFunction collType, std::size_t nBytes, int numPipeOps,
                             float** collCostTable, int numAlgo, int numProto, int* nChannels);
using GetCollInfoV4 = Result(void* context, TunedFunction collType, std::size_t nBytes, int numPipeOps,
                             float** collCostTable, int numAlgo, int numProto, int regBuff, int* nChannels);

using TunerFinalizeV2 = Result(void* context);  // named destroy before v5

using GetChunkSizeV6 = Result(void* context, TunedFunction collType, std::size_t nBytes, int algorithm, int protocol,
                              int nChannels, std::size_t* chunkSize);

struct TunerTableV2 {
  const char* name;
  TunerInitV2* init;
  GetCollInfoV2* getCollInfo;
  TunerFinalizeV2* destroy;
};

struct TunerTableV3 {
  const char* name;
  TunerInitV2* init;
  GetCollInfoV3* getCollInfo;
  TunerFinalizeV2* destroy;
};

struct TunerTableV4 {
  const char* name;
  TunerInitV2* init;
  GetCollInfoV4* getCollInfo;
  TunerFinalizeV2* destroy;
};

struct TunerTableV5 {
  const char* name;
  TunerInitV5* init;
  GetCollInfoV4* getCollInfo;
  TunerFinalizeV2* finalize;
};

struct TunerTableV6 {
  const char* name;
  TunerInitV5* init;
  GetCollInfoV4* getCollInfo;
  TunerFinalizeV2* finalize;
  GetChunkSizeV6* getChunkSize;  // may be NULL
};

static_assert(sizeof(TunedFunction) == sizeof(int), "C enums are ints");
BAGUA_NET_ASSERT_SLOTS(TunerTableV2, name, init, getCollInfo, destroy);
BAGUA_NET_ASSERT_SLOTS(TunerTableV3, name, init, getCollInfo, destroy);
BAGUA_NET_ASSERT_SLOTS(TunerTableV4, name, init, getCollInfo, destroy);
BAGUA_NET_ASSERT_SLOTS(TunerTableV5, name, init, getCollInfo, finalize);
BAGUA_NET_ASSERT_SLOTS(TunerTableV6, name, init, getCollInfo, finalize, getChunkSize);

}  // namespace bagua_net::nccl
