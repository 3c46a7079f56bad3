// What every version of NCCL's tuner table does, with arguments that fit all versions, and the adapters to NCCL's
// argument lists; tables.cc puts them into the tables.
//
// The tuner tells NCCL what collective_policy.h says: fewer channels, and between few nodes also the protocol. NCCL
// calls it for every collective, of every network, from any thread; a result other than success fails the collective.
// It takes no locks and touches no network state: NCCL finalizes it before its proxy threads end.
//
// All ranks must answer alike, or the collective hangs. So the answer depends on the arguments that are equal on all of
// them, and on environment variables, which a job has to set alike on every rank, as it has to for NCCL's own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "abi/tuner_types.h"

namespace bagua_net::abi::tuner {

// Once per communicator. *ctx is NULL where everything is left to NCCL, and that is no failure.
nccl::Result init(std::size_t ranks, std::size_t nodes, nccl::Logger* logger, void** ctx) noexcept;
// What table v2 is told: the pair itself.
void choose(const void* ctx, nccl::TunedFunction function, std::size_t bytes, int* algorithm, int* protocol,
            int* channels) noexcept;
// What the later ones are told: the cost of the pair.
void choose(const void* ctx, nccl::TunedFunction function, std::size_t bytes, float** cost_table, int algorithms,
            int protocols, int* channels) noexcept;
nccl::Result finalize(void* ctx) noexcept;

// The same from the argument lists of the versions; the type of a table's slot chooses.
inline nccl::Result init(void** ctx, std::uint64_t /*comm_id*/, std::size_t ranks, std::size_t nodes,
                         nccl::Logger* logger, nccl::TunerNvlDomain* /*nvl_domain*/,
                         nccl::TunerConstants* /*constants*/) {
  return init(ranks, nodes, logger, ctx);
}

inline nccl::Result get_coll_info(void* ctx, nccl::TunedFunction function, std::size_t bytes, int /*coll_net_support*/,
                                  int /*nvls_support*/, int /*pipe_ops*/, int* algorithm, int* protocol,
                                  int* channels) {
  choose(ctx, function, bytes, algorithm, protocol, channels);
  return nccl::Result::kSuccess;
}
inline nccl::Result get_coll_info(void* ctx, nccl::TunedFunction function, std::size_t bytes, int /*pipe_ops*/,
                                  float** cost_table, int algorithms, int protocols, int* channels) {
  choose(ctx, function, bytes, cost_table, algorithms, protocols, channels);
  return nccl::Result::kSuccess;
}
// Whether buffers are registered is each rank's own view, and so of no use here.
inline nccl::Result get_coll_info(void* ctx, nccl::TunedFunction function, std::size_t bytes, int /*pipe_ops*/,
                                  float** cost_table, int algorithms, int protocols, int /*registered*/,
                                  int* channels) {
  choose(ctx, function, bytes, cost_table, algorithms, protocols, channels);
  return nccl::Result::kSuccess;
}

}  // namespace bagua_net::abi::tuner
