#include "os/cpu_budget.h"

#include <dirent.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include "os/sysfs_file.h"

namespace bagua_net {
namespace {

constexpr int kBusyThreads = 2;  // per rank: the application's own and NCCL's progress thread, both of which spin

// All-reduce of 256 MiB between two GPUs over four rails: 4 workers 15 GB/s, 8 workers 22, 12 workers 29, 14 workers no
// more (docs/design/performance.md).
constexpr int kMaxDefaultWorkers = 12;

constexpr int kMaxRanks = 4096;  // more on one host is a misread variable

std::optional<int> parse_count(const std::string& text, int maximum) {
  int number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || rest != end || number < 1 || number > maximum) return std::nullopt;
  return number;
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

std::vector<std::string> directory_entries(const std::string& path) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path.c_str()), ::closedir);
  if (!directory) return names;
  while (const dirent* entry = ::readdir(directory.get())) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  return names;
}

// "0-3,8": adds the CPUs to *cpus.
void add_cpu_list(const std::string& list, std::set<int>* cpus) {
  for (const std::string& range : split(list, ',')) {
    int first = 0;
    int last = 0;
    const char* end = range.data() + range.size();
    auto parsed = std::from_chars(range.data(), end, first);
    if (parsed.ec != std::errc()) continue;
    last = first;
    if (parsed.ptr != end && *parsed.ptr == '-') std::from_chars(parsed.ptr + 1, end, last);
    for (int cpu = first; cpu <= last && last < CPU_SETSIZE * 64; ++cpu) cpus->insert(cpu);
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

// Slurm's "4(x2),1": 4 tasks on each of the first two nodes, 1 on the third. The entry of node `node`, or the largest
// if that is not known.
std::optional<int> slurm_tasks_on_node(const std::string& text, std::optional<int> node) {
  int first_node = 0;
  std::optional<int> largest;
  for (const std::string& group : split(text, ',')) {
    const auto open = group.find("(x");
    const auto tasks = parse_count(group.substr(0, open), kMaxRanks);
    if (!tasks) return std::nullopt;
    int nodes = 1;
    if (open != std::string::npos) {
      if (group.back() != ')') return std::nullopt;
      const auto repeated = parse_count(group.substr(open + 2, group.size() - open - 3), INT_MAX / 2);
      if (!repeated) return std::nullopt;
      nodes = *repeated;
    }
    if (node && *node >= first_node && *node - first_node < nodes) return tasks;
    first_node = std::min(first_node, INT_MAX / 2) + nodes;
    if (!largest || *tasks > *largest) largest = tasks;
  }
  return largest;
}

std::optional<int> environment_count(const EnvironmentReader& environment, const char* name, int maximum) {
  const auto text = environment(name);
  return text ? parse_count(*text, maximum) : std::nullopt;
}

std::optional<int> slurm_local_ranks(const EnvironmentReader& environment) {
  std::optional<int> node;
  if (const auto text = environment("SLURM_NODEID")) {
    // Node 0 is no count: parse_count starts at 1.
    node = *text == "0" ? std::optional<int>(0) : parse_count(*text, INT_MAX);
  }
  // The step's own numbers first: an `srun` may start fewer tasks than the job has room for.
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"}) {
    const auto text = environment(name);
    if (!text) continue;
    if (const auto tasks = slurm_tasks_on_node(*text, node)) return tasks;
  }
  return std::nullopt;
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
  for (const char* name : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}) {
    if (const auto ranks = environment_count(environment, name, kMaxRanks)) {
      return bound_ranks(*ranks, proc_root, cpus_in_mask);
    }
  }
  if (const auto ranks = slurm_local_ranks(environment)) {
    // Slurm can bind each task to CPUs of its own. A mask that is no larger than one task's share is such a one, and
    // nobody shares it; a mask for all tasks would be larger.
    const auto cpus_per_task = environment_count(environment, "SLURM_CPUS_PER_TASK", INT_MAX);
    return cpus_per_task && cpus_in_mask <= *cpus_per_task ? LocalRanks{1, 1} : LocalRanks{*ranks, *ranks};
  }
  const auto gpus = directory_entries(proc_root + "/driver/nvidia/gpus").size();
  const int ranks = std::clamp(static_cast<int>(gpus), 1, kMaxRanks);
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
  const int share = budget.usable_cpus / std::max(1, budget.local_ranks);
  return std::clamp(share - kBusyThreads, 0, kMaxDefaultWorkers);
}

}  // namespace bagua_net
