// What launchers say of a process, over made-up environments.
#include "os/launcher.h"

#include <string>

#include "support/check.h"
#include "support/variables.h"

namespace bagua_net {
namespace {

JobPosition position(const Variables& variables) { return job_position(reader(variables)); }

}  // namespace

TEST_CASE(the_launcher_says_which_rank_it_is) {
  CHECK_EQ(position({}).rank, -1);
  CHECK_EQ(position({{"RANK", "7"}, {"SLURM_PROCID", "0"}}).rank, 7);
  CHECK_EQ(position({{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "16"}}).world_size, 16);
  CHECK_EQ(position({{"MPI_LOCALNRANKS", "4"}}).local_world_size, 4);
  for (const char* unreadable : {"none", "-1", "7 of 8", ""}) CHECK_EQ(position({{"RANK", unreadable}}).rank, -1);
}

TEST_CASE(mpirun_inside_a_slurm_allocation_counts_for_itself) {
  // What Slurm says is said of mpirun's daemon, the same for all ranks of the host.
  const Variables variables = {{"SLURM_PROCID", "0"},
                               {"SLURM_LOCALID", "0"},
                               {"SLURM_NTASKS", "2"},
                               {"OMPI_COMM_WORLD_RANK", "5"},
                               {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                               {"OMPI_COMM_WORLD_SIZE", "8"}};
  CHECK_EQ(position(variables).rank, 5);
  CHECK_EQ(position(variables).local_rank, 1);
  CHECK_EQ(position(variables).world_size, 8);
  CHECK(!position(variables).is_first_of_its_host());
}

TEST_CASE(one_rank_of_a_host_is_the_first) {
  CHECK(position({}).is_first_of_its_host());
  CHECK(position({{"LOCAL_RANK", "0"}, {"RANK", "8"}}).is_first_of_its_host());
  CHECK(!position({{"LOCAL_RANK", "1"}}).is_first_of_its_host());
}

}  // namespace bagua_net
