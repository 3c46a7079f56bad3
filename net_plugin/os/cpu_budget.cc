#include "os/cpu_budget.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>
#include <thread>
#include <vector>

#include "base/text_parsing.h"
#include "os/launcher.h"
#include "os/sysfs.h"

namespace bagua_net {
namespace {

constexpr int kBusyThreads = 2;  // per rank: the application's own and NCCL's progress thread, both of which spin

// All-reduce of 256 MiB between two GPUs over four rails: 4 workers 15 GB/s, 8 workers 22, 12 workers 29, 14 workers no
// more (docs/design/performance.md).
constexpr int kMaxDefaultWorkers = 12;

// "0-3,8": adds the CPUs to *cpus.
void add_cpu_list(const std::string& list, std::set<int>* cpus) {
  for (const std::string_view range : split(list, ',')) {
    const auto dash = range.find('-');
    const auto first = parse_number<int>(range.substr(0, dash));
    if (!first) continue;
    const int last =
        dash == std::string_view::npos ? *first : parse_number<int>(range.substr(dash + 1)).value_or(*first);
    for (int cpu = *first; cpu <= last && last < CPU_SETSIZE * 64; ++cpu) cpus->insert(cpu);
  }
}

// Of a "status" of procfs; empty if it cannot be read.
std::string status_field(const std::string& path, const std::string& name) {
  std::ifstream status(path);
  for (std::string line; std::getline(status, line);) {
    if (line.compare(0, name.size(), name) != 0 || line[name.size()] != ':') continue;
    const auto value = line.find_first_not_of(" \t", name.size() + 1);
    return value == std::string::npos ? "" : line.substr(value);
  }
  return "";
}

// The CPUs that any thread of a process may use, "/proc/self" or another; empty if that cannot be read.
std::set<int> cpus_of_process(const std::string& process) {
  std::set<int> cpus;
  const std::string tasks = process + "/task";
  for (const std::string& task : directory_entries(tasks)) {
    add_cpu_list(status_field(tasks + "/" + task + "/status", "Cpus_allowed_list"), &cpus);
  }
  return cpus;
}

// Not the calling thread's mask: NCCL narrows its proxy threads to the CPUs near their GPU. Nor the main thread's
// alone: OpenMP pins that one to a core when it binds threads.
std::set<int> cpus_in_affinity_masks(const std::string& proc_root) {
  std::set<int> cpus = cpus_of_process(proc_root + "/self");
  if (!cpus.empty()) return cpus;

  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (::sched_getaffinity(::getpid(), sizeof mask, &mask) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &mask)) cpus.insert(cpu);
  }
  return cpus;
}

// Whole CPUs in quota/period: rounded down, for a thread on the fraction would be throttled. INT_MAX: no limit.
int cpus_in_quota(double quota_us, double period_us) {
  if (quota_us <= 0 || period_us <= 0 || quota_us / period_us >= INT_MAX) return INT_MAX;
  return std::max(1, static_cast<int>(quota_us / period_us));
}

int version2_limit(const std::string& group) {
  const auto line = read_first_line(group + "/cpu.max");  // "200000 100000" or "max 100000"
  if (!line) return INT_MAX;
  double quota_us = 0;
  double period_us = 0;
  std::istringstream stream(*line);
  if (!(stream >> quota_us >> period_us)) return INT_MAX;
  return cpus_in_quota(quota_us, period_us);
}

int version1_limit(const std::string& group) {
  const auto quota = read_first_line(group + "/cpu.cfs_quota_us");  // -1: none
  const auto period = read_first_line(group + "/cpu.cfs_period_us");
  if (!quota || !period) return INT_MAX;
  return cpus_in_quota(std::strtod(quota->c_str(), nullptr), std::strtod(period->c_str(), nullptr));
}

// The least of the limits of a group and all groups above it. Inside a container the path may be the host's, which does
// not exist here, and the container's own group is then the root of the mount: climbing gets there.
int least_limit(const std::string& mount, std::string path, int (*limit)(const std::string& group)) {
  int least = INT_MAX;
  while (!path.empty() && path != "/") {
    least = std::min(least, limit(mount + path));
    path.resize(std::min(path.find_last_of('/'), path.size()));
  }
  return std::min(least, limit(mount));
}

int cpus_in_cgroup_quota(const std::string& proc_root, const std::string& cgroup_root) {
  int least = INT_MAX;
  std::ifstream groups(proc_root + "/self/cgroup");
  // "0::/user.slice" for version 2, "4:cpu,cpuacct:/user.slice" for a hierarchy of version 1; both on hybrid systems.
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':');
    const auto second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      least = std::min(least, least_limit(cgroup_root, path, version2_limit));
      least = std::min(least, least_limit(cgroup_root + "/unified", path, version2_limit));
      continue;
    }
    const auto names = split(controllers, ',');
    if (std::find(names.begin(), names.end(), "cpu") == names.end()) continue;
    least = std::min(least, least_limit(cgroup_root + "/" + controllers, path, version1_limit));
    least = std::min(least, least_limit(cgroup_root + "/cpu", path, version1_limit));
  }
  return least;
}

struct LocalRanks {
  int all;      // of this host
  int in_mask;  // that share this rank's CPUs
};

// A launcher that may use more CPUs than its rank has bound each rank to a part of them: mpirun does, and so does a
// wrapper with numactl. It is taken to have spread the ranks evenly, by socket or by core.
LocalRanks bound_ranks(int all, const std::string& proc_root, int cpus_in_mask) {
  const std::string parent = status_field(proc_root + "/self/status", "PPid");
  const auto cpus_of_launcher = static_cast<int>(parent.empty() ? 0 : cpus_of_process(proc_root + "/" + parent).size());
  if (cpus_of_launcher <= cpus_in_mask) return {all, all};
  const std::int64_t shares = std::int64_t{all} * cpus_in_mask;
  return {all, static_cast<int>((shares + cpus_of_launcher - 1) / cpus_of_launcher)};
}

LocalRanks ranks_that_share(const EnvironmentReader& environment, const std::string& proc_root, int cpus_in_mask) {
  const int started = job_position(environment).local_world_size;
  if (started > 0) return bound_ranks(started, proc_root, cpus_in_mask);
  if (const auto tasks = slurm_tasks(environment)) {
    // Slurm can bind each task to CPUs of its own. A mask that is no larger than one task's share is such a one, and
    // nobody shares it; a mask for all tasks would be larger.
    const bool is_bound = tasks->cpus_per_task && cpus_in_mask <= *tasks->cpus_per_task;
    return is_bound ? LocalRanks{1, 1} : LocalRanks{tasks->on_node, tasks->on_node};
  }
  const auto gpus = directory_entries(proc_root + "/driver/nvidia/gpus").size();
  const int ranks = std::clamp(static_cast<int>(gpus), 1, kMaxLocalRanks);
  return {ranks, ranks};
}

}  // namespace

CpuBudget measure_cpu_budget(const EnvironmentReader& environment, const std::string& proc_root,
                             const std::string& cgroup_root) {
  const std::set<int> cpus = cpus_in_affinity_masks(proc_root);
  const int cpus_in_mask =
      std::max(1, cpus.empty() ? static_cast<int>(std::thread::hardware_concurrency()) : static_cast<int>(cpus.size()));
  CpuBudget budget;
  for (const int cpu : cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &budget.cpus);
  }
  const LocalRanks ranks = ranks_that_share(environment, proc_root, cpus_in_mask);
  budget.local_ranks = ranks.in_mask;
  // The quota is one for all ranks, whatever they are bound to.
  const std::int64_t quota = cpus_in_cgroup_quota(proc_root, cgroup_root);
  const std::int64_t part = std::max<std::int64_t>(1, quota * ranks.in_mask / ranks.all);
  budget.usable_cpus = static_cast<int>(std::min<std::int64_t>(cpus_in_mask, part));
  return budget;
}

int default_worker_count(const CpuBudget& budget) {
  return std::clamp(budget.share() - kBusyThreads, 0, kMaxDefaultWorkers);
}

}  // namespace bagua_net
