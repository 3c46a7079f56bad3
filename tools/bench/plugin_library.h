// PluginLibrary: an opened libnccl-net.so and the network table taken from it, found the way NCCL finds it: the newest
// version that both know.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "bench/net_table.h"

namespace bagua_net::bench {

class PluginLibrary {
 public:
  // table_version 0: the newest.
  static Status open(const std::string& path, int table_version, std::unique_ptr<PluginLibrary>* library);
  ~PluginLibrary();
  PluginLibrary(const PluginLibrary&) = delete;
  PluginLibrary& operator=(const PluginLibrary&) = delete;

  NetTable& table() const { return *table_; }
  // Turns a table's answer into a status: which call, NCCL's name of the code, and the plugin's last warning.
  Status check(nccl::Result result, const char* call) const;

 private:
  explicit PluginLibrary(void* library) : library_(library) {}

  void* library_;
  std::unique_ptr<NetTable> table_;
};

constexpr int kOldestTable = 5;
constexpr int kNewestTable = 12;

}  // namespace bagua_net::bench
