#include "os/launcher.h"

#include <algorithm>
#include <climits>

#include "base/text_parsing.h"

namespace bagua_net {
namespace {

struct LauncherVariables {
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;  // "": it says so in another form
};

// In the order in which they are looked for: mpirun inside a Slurm allocation leaves the SLURM_PROCID of its own daemon
// in the environment.
constexpr LauncherVariables kLaunchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""},
};

std::optional<int> read_number(const EnvironmentReader& environment, const char* name, int least, int most) {
  const std::optional<std::string> text = environment(name);
  const std::optional<int> number = text ? parse_number<int>(trimmed(*text)) : std::nullopt;
  return number && *number >= least && *number <= most ? number : std::nullopt;
}

// Of the first launcher that says it.
int first_number(const EnvironmentReader& environment, const char* LauncherVariables::* variable, int least, int most) {
  for (const LauncherVariables& launcher : kLaunchers) {
    if (const auto number = read_number(environment, launcher.*variable, least, most)) return *number;
  }
  return -1;
}

// "4(x2),1": 4 tasks on each of the first two nodes, 1 on the third. The entry of node `node`, or the largest if that
// is not known.
std::optional<int> tasks_on_node(const std::string& text, std::optional<int> node) {
  int first_node = 0;
  std::optional<int> largest;
  for (const std::string_view group : split(text, ',')) {
    const auto open = group.find("(x");
    const auto tasks = parse_number<int>(group.substr(0, open));
    if (!tasks || *tasks < 1 || *tasks > kMaxLocalRanks) return std::nullopt;
    int nodes = 1;
    if (open != std::string_view::npos) {
      if (group.back() != ')') return std::nullopt;
      const auto repeated = parse_number<int>(group.substr(open + 2, group.size() - open - 3));
      if (!repeated || *repeated < 1 || *repeated > INT_MAX / 2) return std::nullopt;
      nodes = *repeated;
    }
    if (node && *node >= first_node && *node - first_node < nodes) return tasks;
    first_node = std::min(first_node, INT_MAX / 2) + nodes;
    if (!largest || *tasks > *largest) largest = tasks;
  }
  return largest;
}

}  // namespace

JobPosition job_position(const EnvironmentReader& environment) {
  return {first_number(environment, &LauncherVariables::rank, 0, INT_MAX),
          first_number(environment, &LauncherVariables::local_rank, 0, INT_MAX),
          first_number(environment, &LauncherVariables::world_size, 0, INT_MAX),
          first_number(environment, &LauncherVariables::local_world_size, 1, kMaxLocalRanks)};
}

std::optional<SlurmTasks> slurm_tasks(const EnvironmentReader& environment) {
  const std::optional<int> node = read_number(environment, "SLURM_NODEID", 0, INT_MAX);
  // The step's own numbers first: an `srun` may start fewer tasks than the job has room for.
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"}) {
    const std::optional<std::string> text = environment(name);
    const std::optional<int> tasks = text ? tasks_on_node(*text, node) : std::nullopt;
    if (tasks) return SlurmTasks{*tasks, read_number(environment, "SLURM_CPUS_PER_TASK", 1, INT_MAX)};
  }
  return std::nullopt;
}

}  // namespace bagua_net
