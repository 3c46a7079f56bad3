// CpuBudget: how many CPUs this process may use, and how many ranks share them. Decides how many I/O threads are worth
// starting: where no core is free they only take turns with the threads that they should help.
#pragma once

#include <sched.h>

#include <algorithm>
#include <string>

#include "base/text_parsing.h"

namespace bagua_net {

struct CpuBudget {
  int usable_cpus = 1;  // affinity mask, cut to these ranks' part of the cgroup's CPU quota; at least 1
  int local_ranks = 1;  // ranks of this host that share these CPUs, this one included; at least 1
  // CPUs of each of these ranks.
  int share() const { return usable_cpus / std::max(1, local_ranks); }
  cpu_set_t cpus{};  // the affinity mask: what any thread of the process may use; empty if that cannot be read
};

// The environment names the ranks (torchrun, Open MPI, Intel MPI and MPICH, Slurm); if it does not, one rank per NVIDIA
// GPU is assumed. Nothing here fails: what cannot be read does not limit. Roots are other than the default in tests.
CpuBudget measure_cpu_budget(const EnvironmentReader& environment, const std::string& proc_root = "/proc",
                             const std::string& cgroup_root = "/sys/fs/cgroup");

// I/O threads for BAGUA_NET_NWORKERS=auto: the rank's share of the CPUs, less the two that the application's thread and
// NCCL's progress thread keep busy. 0 to 12.
int default_worker_count(const CpuBudget& budget);

}  // namespace bagua_net
