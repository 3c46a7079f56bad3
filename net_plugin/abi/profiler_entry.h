// What every version of NCCL's profiler table does; tables.cc puts the functions into the tables. NCCL looks
// for the table in NCCL_PROFILER_PLUGIN, in libnccl-profiler.so, and then in the library of the network plugin, which
// is this one. Without BAGUA_NET_TRACE the table asks for no events, and NCCL calls none of these but init.
//
// Nothing here fails, and nothing but init logs or allocates. Any thread.
#pragma once

#include "abi/profiler_types.h"
#include "trace/comm_trace.h"

namespace bagua_net::abi::profiler {

nccl::Result init(void** context, int* mask, const char* name, std::uint64_t id, int ranks, int rank,
                  nccl::Logger* logger) noexcept;

inline nccl::Result init(void** context, int* mask, const char* name, std::uint64_t id, int /*nodes*/, int ranks,
                         int rank, nccl::Logger* logger) {
  return init(context, mask, name, id, ranks, rank, logger);
}
inline nccl::Result init(void** context, std::uint64_t id, int* mask, const char* name, int /*nodes*/, int ranks,
                         int rank, nccl::Logger* logger) {
  return init(context, mask, name, id, ranks, rank, logger);
}
nccl::Result start_event(void* context, void** handle, nccl::ProfilerEventV4* event);
nccl::Result start_event(void* context, void** handle, nccl::ProfilerEventV5* event);
nccl::Result start_event(void* context, void** handle, nccl::ProfilerEventV6* event);
nccl::Result start_event(void* context, void** handle, nccl::ProfilerEventV7* event);
nccl::Result stop_event(void* handle);
nccl::Result record_event_state(void* handle, nccl::ProfilerState state, nccl::ProfilerStateArgs* arguments);
nccl::Result finalize(void* context);

// What a message belongs to of which NCCL tells by `phandle`: NCCL calls start_event with the event that it is part of.
// False: not known.
bool origin_of_message(nccl::ProfilerCallback* callback, void* phandle, MessageOrigin* origin);

}  // namespace bagua_net::abi::profiler
