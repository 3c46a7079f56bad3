#include "bench/process_footprint.h"

#include <dirent.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>

namespace bagua_net::bench {
namespace {

struct DirectoryCloser {
  void operator()(DIR* directory) const { closedir(directory); }
};

// The numbers that a directory of /proc has as names.
Status numbers_in(const char* path, int* own_descriptor, std::vector<int>* numbers) {
  const std::unique_ptr<DIR, DirectoryCloser> directory(opendir(path));
  if (directory == nullptr) return Status::system_error(std::string("opendir of ") + path, errno);
  *own_descriptor = dirfd(directory.get());
  // The driver's main thread is the only one that reads directories.
  while (const dirent* entry = readdir(directory.get())) {  // NOLINT(concurrency-mt-unsafe)
    char* end = nullptr;
    const auto number = static_cast<int>(std::strtol(entry->d_name, &end, 10));
    if (end != entry->d_name && *end == '\0') numbers->push_back(number);
  }
  return Status::ok();
}

// The value of a "Name:   123 kB" line; -1 if there is none.
std::int64_t value_of(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, name.size() + 1, name + ":") == 0) {
      return std::strtoll(line.c_str() + name.size() + 1, nullptr, 10);
    }
  }
  return -1;
}

Status read_resident_bytes(std::int64_t* bytes) {
  // The exact sum over the mappings; the counters of statm may lag by some pages per CPU.
  if (const std::int64_t kibibytes = value_of("/proc/self/smaps_rollup", "Rss"); kibibytes >= 0) {
    *bytes = kibibytes * 1024;
    return Status::ok();
  }
  std::ifstream statm("/proc/self/statm");
  std::int64_t size_pages = 0;
  std::int64_t resident_pages = 0;
  if (!(statm >> size_pages >> resident_pages)) {
    return Status::invalid_usage(
        "neither /proc/self/smaps_rollup nor /proc/self/statm can be read: mount /proc, which the memory figures need");
  }
  *bytes = resident_pages * sysconf(_SC_PAGESIZE);
  return Status::ok();
}

// What `ss -m` shows, for a socket of our own.
bool is_tcp_socket(int fd, std::int64_t* memory_bytes) {
  int protocol = 0;
  socklen_t length = sizeof protocol;
  if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &length) != 0 || protocol != IPPROTO_TCP) return false;
  std::array<std::uint32_t, SK_MEMINFO_VARS> memory{};
  length = sizeof memory;
  if (getsockopt(fd, SOL_SOCKET, SO_MEMINFO, memory.data(), &length) != 0) return true;
  // WMEM_ALLOC is the part of WMEM_QUEUED that is on its way; the limits RCVBUF and SNDBUF are no memory.
  for (const int index :
       {SK_MEMINFO_RMEM_ALLOC, SK_MEMINFO_WMEM_QUEUED, SK_MEMINFO_FWD_ALLOC, SK_MEMINFO_OPTMEM, SK_MEMINFO_BACKLOG}) {
    *memory_bytes += memory[static_cast<std::size_t>(index)];
  }
  return true;
}

double thread_cpu_s(int id) {
  // The kernel's clock id of another thread of this process, as pthread_getcpuclockid makes it; /proc counts in ticks
  // of 10 ms, and an idle thread must show less.
  constexpr unsigned kPerThreadSchedulerClock = 6;
  const auto clock = static_cast<clockid_t>((~static_cast<unsigned>(id) << 3U) | kPerThreadSchedulerClock);
  timespec used{};
  clock_gettime(clock, &used);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

}  // namespace

Status ProcessFootprint::measure(ProcessFootprint* footprint) {
  *footprint = ProcessFootprint();
  int own_descriptor = -1;
  std::vector<int> ids;
  BAGUA_NET_RETURN_IF_ERROR(numbers_in("/proc/self/task", &own_descriptor, &ids));
  for (const int id : ids) {
    if (id == getpid()) continue;
    const std::string folder = "/proc/self/task/" + std::to_string(id);
    ThreadUsage usage;
    usage.id = id;
    std::ifstream(folder + "/comm") >> usage.name;
    usage.voluntary_switches = value_of(folder + "/status", "voluntary_ctxt_switches");
    usage.involuntary_switches = value_of(folder + "/status", "nonvoluntary_ctxt_switches");
    // It may have ended meanwhile.
    if (usage.voluntary_switches < 0) continue;
    usage.cpu_s = thread_cpu_s(id);
    footprint->other_threads.push_back(usage);
  }

  std::vector<int> descriptors;
  BAGUA_NET_RETURN_IF_ERROR(numbers_in("/proc/self/fd", &own_descriptor, &descriptors));
  for (const int fd : descriptors) {
    if (fd == own_descriptor) continue;
    ++footprint->descriptors;
    if (is_tcp_socket(fd, &footprint->socket_memory_bytes)) ++footprint->tcp_sockets;
  }
  return read_resident_bytes(&footprint->resident_bytes);
}

void ProcessFootprint::add_totals_to(const std::string& prefix, JsonLine* line) const {
  line->add(prefix + "resident_bytes", resident_bytes)
      .add(prefix + "descriptors", descriptors)
      .add(prefix + "tcp_sockets", tcp_sockets)
      .add(prefix + "socket_memory_bytes", socket_memory_bytes)
      .add(prefix + "threads", static_cast<std::int64_t>(other_threads.size()) + 1);
}

void ProcessFootprint::add_threads_to(JsonLine* line) const {
  std::vector<double> ids;
  std::vector<double> cpu_s;
  std::vector<double> voluntary;
  std::vector<double> involuntary;
  std::vector<std::string> names;
  for (const ThreadUsage& usage : other_threads) {
    ids.push_back(usage.id);
    names.push_back(usage.name);
    cpu_s.push_back(usage.cpu_s);
    voluntary.push_back(static_cast<double>(usage.voluntary_switches));
    involuntary.push_back(static_cast<double>(usage.involuntary_switches));
  }
  line->add("thread_ids", ids)
      .add("thread_names", names)
      .add("thread_cpu_s", cpu_s)
      .add("thread_voluntary_switches", voluntary)
      .add("thread_involuntary_switches", involuntary);
}

}  // namespace bagua_net::bench
