// What cases that drive the plugin through its tables share. Each runs in a process of its own, with its environment, a
// deadline and a captured log: the plugin is one instance per process and reads its settings once.
#pragma once

#include <dirent.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "abi/nccl_types.h"
#include "support/check.h"
#include "support/pause.h"

namespace abi_test {

using Environment = std::vector<std::pair<std::string, std::string>>;

// What an instrumented build may take longer.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kSlowdown = 4;
#else
constexpr int kSlowdown = 1;
#endif

// What the plugin logged, through the logger that init was given.
struct LogLine {
  bagua_net::nccl::LogLevel level;
  unsigned long flags;
  std::string text;
};

class CapturedLog {
 public:
  // Never destroyed: tables without finalize may leave the plugin's thread logging while the process exits.
  static CapturedLog& get() {
    static auto* const log = new CapturedLog;
    return *log;
  }
  static void log(bagua_net::nccl::LogLevel level, unsigned long flags, const char* file, int line, const char* format,
                  ...) {
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (std::getenv("BAGUA_NET_TEST_LOG") != nullptr) std::fprintf(stderr, "%s:%d %s\n", file, line, text);
    CapturedLog& captured = get();
    const std::lock_guard<std::mutex> lock(captured.mutex_);
    captured.lines_.push_back({level, flags, text});
  }
  std::vector<LogLine> lines() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return lines_;
  }
  int count(bagua_net::nccl::LogLevel level, const std::string& part) {
    int found = 0;
    for (const LogLine& line : lines()) {
      if (line.level == level && line.text.find(part) != std::string::npos) ++found;
    }
    return found;
  }
  bool warned(const std::string& part) { return count(bagua_net::nccl::LogLevel::kWarn, part) > 0; }
  bool informed(const std::string& part) { return count(bagua_net::nccl::LogLevel::kInfo, part) > 0; }
  std::string all() {
    std::string text;
    for (const LogLine& line : lines()) text += "\n    " + line.text;
    return text.empty() ? "(nothing)" : text;
  }
  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    lines_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<LogLine> lines_;
};

#define CHECK_WARNED(part)                                                                                           \
  do {                                                                                                               \
    if (!abi_test::CapturedLog::get().warned(part))                                                                  \
      check::fail(__FILE__, __LINE__,                                                                                \
                  std::string("no warning says \"") + (part) + "\"; logged: " + abi_test::CapturedLog::get().all()); \
  } while (false)

// Polls until `ready` says so; the limit is generous, since it only decides when a hang is called one.
inline void wait_until(const char* what, const std::function<bool()>& ready, int seconds = 15 * kSlowdown) {
  const auto began = std::chrono::steady_clock::now();
  Pause pause;
  while (!ready()) {
    if (std::chrono::steady_clock::now() - began > std::chrono::seconds(seconds)) {
      throw std::runtime_error(std::string(what) + ": still not after " + std::to_string(seconds) +
                               " s; logged: " + CapturedLog::get().all());
    }
    pause();
  }
}

inline int count_entries(const char* directory) {
  DIR* const entries = opendir(directory);
  if (entries == nullptr) throw std::runtime_error(std::string("cannot list ") + directory);
  int count = 0;
  while (const dirent* entry = readdir(entries)) count += entry->d_name[0] != '.' ? 1 : 0;
  closedir(entries);
  return count;
}
inline int open_fds() { return count_entries("/proc/self/fd") - 1; }  // less the listing's own
inline int threads() { return count_entries("/proc/self/task"); }
// The kernel still lists a thread for a moment after join() has returned.
inline void wait_for_threads(int most) {
  wait_until("threads that have ended leave /proc", [most] { return threads() <= most; });
}

// Runs the body in a child process; throws with its message if it fails, crashes or takes longer than the limit.
inline void in_own_process(const Environment& environment, const std::function<void()>& body,
                           int limit_s = 60 * kSlowdown) {
  int channel[2];
  if (pipe(channel) != 0) throw std::runtime_error("pipe failed");
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) {
    close(channel[0]);
    alarm(static_cast<unsigned>(limit_s));
    // Loopback is what every machine has. No healthy connect comes near these deadlines, however busy the machine is;
    // cases that wait for a deadline set a short one.
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    setenv("BAGUA_NET_CONNECT_TIMEOUT_MS", "600000", 1);
    setenv("BAGUA_NET_HANDSHAKE_TIMEOUT_MS", "60000", 1);
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    // An instrumented build has threads of its own from the first thread on: not to be counted as the plugin's.
    std::thread([] {}).join();
    int result = EXIT_SUCCESS;
    try {
      body();
    } catch (const std::exception& error) {
      const std::string message = error.what();
      if (write(channel[1], message.data(), message.size()) < 0) std::perror("write");
      result = EXIT_FAILURE;
    }
    // By exit, as a program ends: leak checks run, and so would anything of the plugin's that hangs or crashes then.
    std::exit(result);
  }
  close(channel[1]);
  std::string message;
  char piece[4096];
  for (ssize_t got = 0; (got = read(channel[0], piece, sizeof piece)) > 0;)
    message.append(piece, static_cast<std::size_t>(got));
  close(channel[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!message.empty()) throw std::runtime_error(message);
  if (WIFSIGNALED(status)) {
    const std::string name = strsignal(WTERMSIG(status));
    throw std::runtime_error(WTERMSIG(status) == SIGALRM ? "hung: not finished after " + std::to_string(limit_s) + " s"
                                                         : "the process was ended by signal: " + name);
  }
  if (WEXITSTATUS(status) != EXIT_SUCCESS) {
    throw std::runtime_error("the process exited with " + std::to_string(WEXITSTATUS(status)));
  }
}

// Registers a case whose name is made at start-up ("<topic>_v8_workers2_streams4").
inline bool register_case(const std::string& name, std::function<void()> body, const char* file = __builtin_FILE()) {
  check::add_case(file, name, std::move(body));
  return true;
}

}  // namespace abi_test
