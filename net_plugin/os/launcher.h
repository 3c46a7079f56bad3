// What the launcher of a job tells a process through its environment: torchrun, Open MPI, Intel MPI and MPICH, Slurm.
// The one place in C++ that names their variables; bagua/launch_environment.py is the one in Python.
#pragma once

#include <optional>

#include "base/text_parsing.h"

namespace bagua_net {

// Ranks on one host: more are a misread variable.
constexpr int kMaxLocalRanks = 4096;

// -1: no launcher says.
struct JobPosition {
  int rank = -1;
  int local_rank = -1;
  int world_size = -1;
  int local_world_size = -1;

  // Also if nobody says. What all ranks of a host would log is logged by this one.
  bool is_first_of_its_host() const { return local_rank <= 0; }
};

JobPosition job_position(const EnvironmentReader& environment);

// Slurm's own form of the local world size, which differs from node to node.
struct SlurmTasks {
  int on_node = 0;
  std::optional<int> cpus_per_task;
};
std::optional<SlurmTasks> slurm_tasks(const EnvironmentReader& environment);

}  // namespace bagua_net
