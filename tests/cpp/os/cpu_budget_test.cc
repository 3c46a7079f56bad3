// CPU masks, quotas and rank counts over made-up procfs and cgroupfs trees, and the real ones of this machine.
#include "os/cpu_budget.h"

#include <sched.h>
#include <unistd.h>

#include <thread>

#include "support/check.h"
#include "support/temporary_tree.h"
#include "support/variables.h"

using bagua_net::CpuBudget;
using bagua_net::default_worker_count;
using bagua_net::reader;
using bagua_net::Variables;

namespace {

// A host with /proc and /sys/fs/cgroup below one directory.
class Host {
 public:
  explicit Host(const std::string& main_thread_cpus = "0-15") { thread(100, main_thread_cpus); }

  Host& thread(int id, const std::string& cpus) {
    tree_.write("proc/self/task/" + std::to_string(id) + "/status",
                "Name:\tpython\nCpus_allowed:\tffff\nCpus_allowed_list:\t" + cpus + "\nMems_allowed_list:\t0\n");
    return *this;
  }
  Host& file(const std::string& path, const std::string& text) {
    tree_.write(path, text);
    return *this;
  }
  // The process that started this one.
  Host& launcher(const std::string& cpus) {
    tree_.write("proc/self/status", "Name:\tpython\nPPid:\t77\n");
    tree_.write("proc/77/task/77/status", "Name:\tmpirun\nCpus_allowed_list:\t" + cpus + "\n");
    return *this;
  }
  Host& gpu(const std::string& address) {
    tree_.make_directory("proc/driver/nvidia/gpus/" + address);
    return *this;
  }
  CpuBudget measure(const Variables& variables = {}) const {
    return bagua_net::measure_cpu_budget(reader(variables), tree_.root() + "/proc", tree_.root() + "/cgroup");
  }
  int cpus() const { return measure().usable_cpus; }
  int ranks(const Variables& variables) const { return measure(variables).local_ranks; }

 private:
  TemporaryTree tree_;
};

}  // namespace

TEST_CASE(cpus_of_the_affinity_mask) {
  CHECK_EQ(Host("0-15").cpus(), 16);
  CHECK_EQ(Host("3").cpus(), 1);
  CHECK_EQ(Host("0-3,8,10-11").cpus(), 7);
  CHECK_EQ(Host("0-1023").cpus(), 1024);
}

TEST_CASE(the_widest_view_of_all_threads_counts) {
  // A main thread that OpenMP pinned, and a proxy thread that NCCL bound to one socket.
  CHECK_EQ(Host("0").thread(101, "0-7").thread(102, "4-11").cpus(), 12);
}

TEST_CASE(the_cpus_of_all_threads_are_handed_out) {
  const CpuBudget budget = Host("0").thread(101, "2-3").thread(102, "3,1023").measure();
  CHECK_EQ(CPU_COUNT(&budget.cpus), 4);
  for (const int cpu : {0, 2, 3, 1023}) CHECK(CPU_ISSET(cpu, &budget.cpus));
  // More than the set has room for.
  const CpuBudget large = Host("1020-2047").measure();
  CHECK_EQ(large.usable_cpus, 1028);
  CHECK_EQ(CPU_COUNT(&large.cpus), 4);
}

TEST_CASE(quota_of_cgroup_version_2) {
  const auto limited = [](const std::string& cpu_max) {
    return Host("0-15").file("proc/self/cgroup", "0::/job\n").file("cgroup/job/cpu.max", cpu_max).cpus();
  };
  CHECK_EQ(limited("400000 100000\n"), 4);
  CHECK_EQ(limited("250000 100000\n"), 2);  // not 3: the third thread would be throttled half the time
  CHECK_EQ(limited("50000 100000\n"), 1);
  CHECK_EQ(limited("max 100000\n"), 16);
  CHECK_EQ(limited("6400000 100000\n"), 16);
  CHECK_EQ(limited("nonsense\n"), 16);
  CHECK_EQ(limited("100000 0\n"), 16);
}

TEST_CASE(quotas_of_all_groups_above_count) {
  Host host("0-15");
  host.file("proc/self/cgroup", "0::/slurm/job_7/step_0\n")
      .file("cgroup/slurm/job_7/step_0/cpu.max", "max 100000\n")
      .file("cgroup/slurm/job_7/cpu.max", "300000 100000\n")
      .file("cgroup/slurm/cpu.max", "800000 100000\n");
  CHECK_EQ(host.cpus(), 3);
}

TEST_CASE(a_container_sees_its_group_at_the_root_of_the_mount) {
  CHECK_EQ(Host().file("proc/self/cgroup", "0::/\n").file("cgroup/cpu.max", "500000 100000\n").cpus(), 5);
  // Without a namespace the path is the host's, which is not there.
  CHECK_EQ(Host().file("proc/self/cgroup", "0::/docker/1a2b\n").file("cgroup/cpu.max", "600000 100000\n").cpus(), 6);
}

TEST_CASE(quota_of_cgroup_version_1) {
  const std::string groups = "7:memory:/a\n4:cpu,cpuacct:/kube/pod\n0::/init.scope\n";
  CHECK_EQ(Host()
               .file("proc/self/cgroup", groups)
               .file("cgroup/cpu,cpuacct/kube/pod/cpu.cfs_quota_us", "700000\n")
               .file("cgroup/cpu,cpuacct/kube/pod/cpu.cfs_period_us", "100000\n")
               .cpus(),
           7);
  CHECK_EQ(Host()
               .file("proc/self/cgroup", groups)
               .file("cgroup/cpu/kube/cpu.cfs_quota_us", "200000\n")
               .file("cgroup/cpu/kube/cpu.cfs_period_us", "100000\n")
               .file("cgroup/cpu/kube/pod/cpu.cfs_quota_us", "-1\n")
               .file("cgroup/cpu/kube/pod/cpu.cfs_period_us", "100000\n")
               .cpus(),
           2);
}

TEST_CASE(quota_of_a_hybrid_system) {
  CHECK_EQ(Host()
               .file("proc/self/cgroup", "1:name=systemd:/x\n0::/x\n")
               .file("cgroup/unified/x/cpu.max", "200000 100000\n")
               .cpus(),
           2);
}

TEST_CASE(ranks_from_the_launchers) {
  const Host host;
  CHECK_EQ(host.ranks({}), 1);
  CHECK_EQ(host.ranks({{"LOCAL_WORLD_SIZE", "8"}}), 8);
  CHECK_EQ(host.ranks({{"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}), 4);
  CHECK_EQ(host.ranks({{"MPI_LOCALNRANKS", "2"}}), 2);
  // torchrun inside a Slurm job of one task per node.
  CHECK_EQ(host.ranks({{"LOCAL_WORLD_SIZE", "8"}, {"SLURM_NTASKS_PER_NODE", "1"}}), 8);
}

TEST_CASE(ranks_that_the_launcher_bound_share_with_those_beside_them) {
  const auto sharing = [](const std::string& cpus, const std::string& of_launcher, const char* variable) {
    return Host(cpus).launcher(of_launcher).ranks({{variable, "8"}});
  };
  for (const char* variable : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"}) {
    CHECK_EQ(sharing("0-63", "0-63", variable), 8);   // nobody is bound
    CHECK_EQ(sharing("32-63", "0-63", variable), 4);  // to one of two sockets
    CHECK_EQ(sharing("8-15", "0-63", variable), 1);   // to eight cores of its own
    CHECK_EQ(sharing("3", "0-63", variable), 1);
    CHECK_EQ(sharing("0-23", "0-63", variable), 3);  // rounded up
    CHECK_EQ(sharing("0-62", "0-63", variable), 8);
    CHECK_EQ(sharing("0-15", "0-7", variable), 8);  // a launcher that was bound itself says nothing
  }
  CHECK_EQ(Host("8-15").file("proc/self/status", "PPid:\t0\n").ranks({{"LOCAL_WORLD_SIZE", "8"}}), 8);
  CHECK_EQ(Host("8-15").file("proc/self/status", "PPid:\n").ranks({{"LOCAL_WORLD_SIZE", "8"}}), 8);
}

TEST_CASE(the_quota_is_for_all_ranks_whatever_they_are_bound_to) {
  const auto usable = [](const std::string& cpus, const std::string& cpu_max) {
    Host host(cpus);
    host.launcher("0-63").file("proc/self/cgroup", "0::/job\n").file("cgroup/job/cpu.max", cpu_max);
    return host.measure({{"LOCAL_WORLD_SIZE", "8"}}).usable_cpus;
  };
  CHECK_EQ(usable("0-63", "3200000 100000\n"), 32);
  CHECK_EQ(usable("0-31", "3200000 100000\n"), 16);
  CHECK_EQ(usable("0-7", "3200000 100000\n"), 4);
  CHECK_EQ(usable("0-7", "200000 100000\n"), 1);
  CHECK_EQ(usable("0-7", "max 100000\n"), 8);
}

TEST_CASE(unreadable_rank_counts_are_passed_over) {
  const Host host;
  for (const char* bad : {"", "0", "-2", "four", "4x", "1000000"}) {
    CHECK_EQ(host.ranks({{"LOCAL_WORLD_SIZE", bad}, {"MPI_LOCALNRANKS", "3"}}), 3);
  }
}

TEST_CASE(ranks_from_slurm) {
  const Host host;
  const auto tasks = [&host](const std::string& text, const std::string& node) {
    return host.ranks({{"SLURM_STEP_TASKS_PER_NODE", text}, {"SLURM_NODEID", node}});
  };
  CHECK_EQ(host.ranks({{"SLURM_NTASKS_PER_NODE", "8"}}), 8);
  CHECK_EQ(tasks("4(x2)", "1"), 4);
  CHECK_EQ(tasks("8(x2),3", "0"), 8);
  CHECK_EQ(tasks("8(x2),3", "1"), 8);
  CHECK_EQ(tasks("8(x2),3", "2"), 3);
  CHECK_EQ(tasks("1,2(x3),5", "3"), 2);
  CHECK_EQ(tasks("1,2(x3),5", "9"), 5);  // beyond the list: the largest
  CHECK_EQ(host.ranks({{"SLURM_STEP_TASKS_PER_NODE", "1,6"}}), 6);
  // The step before the job, and a broken list is no number.
  CHECK_EQ(host.ranks({{"SLURM_STEP_TASKS_PER_NODE", "2"}, {"SLURM_NTASKS_PER_NODE", "8"}}), 2);
  for (const char* bad : {"4(x", "4(x)", "4(x0)", "4(x2", "a(x2)", ","}) {
    CHECK_EQ(host.ranks({{"SLURM_STEP_TASKS_PER_NODE", bad}, {"SLURM_NTASKS_PER_NODE", "5"}}), 5);
  }
}

TEST_CASE(a_task_that_slurm_bound_shares_its_cpus_with_nobody) {
  const Variables slurm = {{"SLURM_STEP_TASKS_PER_NODE", "4"}, {"SLURM_CPUS_PER_TASK", "16"}};
  CHECK_EQ(Host("0-15").ranks(slurm), 1);  // bound: 16 CPUs of its own
  CHECK_EQ(Host("0-63").ranks(slurm), 4);  // not bound: the four share the 64
}

TEST_CASE(gpus_stand_for_ranks_when_nobody_tells) {
  Host host;
  host.gpu("0000:18:00.0").gpu("0000:2a:00.0").gpu("0000:3a:00.0").gpu("0000:5d:00.0");
  CHECK_EQ(host.ranks({}), 4);
  CHECK_EQ(host.ranks({{"LOCAL_WORLD_SIZE", "2"}}), 2);
}

TEST_CASE(workers_from_the_budget) {
  CHECK_EQ(default_worker_count({2, 1}), 0);
  CHECK_EQ(default_worker_count({2, 2}), 0);
  CHECK_EQ(default_worker_count({3, 1}), 1);
  CHECK_EQ(default_worker_count({32, 8}), 2);
  CHECK_EQ(default_worker_count({128, 8}), 12);
  CHECK_EQ(default_worker_count({1024, 1}), 12);
  CHECK_EQ(default_worker_count({0, 0}), 0);
}

TEST_CASE(this_machine) {
  const CpuBudget budget = bagua_net::measure_cpu_budget(reader({{"LOCAL_WORLD_SIZE", "3"}}));
  CHECK(budget.usable_cpus >= 1);
  CHECK(budget.usable_cpus <= static_cast<int>(::sysconf(_SC_NPROCESSORS_CONF)));
  CHECK_EQ(budget.local_ranks, 3);
}

// NCCL narrows the thread that calls us: the budget must not shrink with it.
TEST_CASE(a_narrowed_calling_thread_does_not_narrow_the_budget) {
  const int whole = bagua_net::measure_cpu_budget(reader({})).usable_cpus;
  int seen = 0;
  std::thread narrowed([&seen] {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CPU_SET(::sched_getcpu(), &mask);
    if (::sched_setaffinity(0, sizeof mask, &mask) != 0) return;
    seen = bagua_net::measure_cpu_budget(reader({})).usable_cpus;
  });
  narrowed.join();
  CHECK_EQ(seen, whole);
}

TEST_CASE(without_a_readable_proc_the_kernel_is_asked) {
  const TemporaryTree empty;
  const CpuBudget budget = bagua_net::measure_cpu_budget(reader({}), empty.root(), empty.root());
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CHECK_EQ(::sched_getaffinity(::getpid(), sizeof mask, &mask), 0);
  CHECK_EQ(budget.usable_cpus, CPU_COUNT(&mask));
  CHECK_EQ(budget.local_ranks, 1);
}
