#include "bench/plugin_library.h"

#include <dlfcn.h>

#include <array>

#include "bench/plugin_log.h"

namespace bagua_net::bench {
namespace {

template <typename Table, typename Properties, int kVersion>
std::unique_ptr<NetTable> adapt(const void* table) {
  return std::make_unique<NetTableAdapter<Table, Properties, kVersion>>(table);
}

struct TableVersion {
  int version;
  std::unique_ptr<NetTable> (*adapt)(const void* table);
};

// Newest first: the order in which NCCL looks.
constexpr std::array<TableVersion, 8> kTableVersions{{
    {12, adapt<nccl::NetTableV12, nccl::NetPropertiesV12, 12>},
    {11, adapt<nccl::NetTableV11, nccl::NetPropertiesV11, 11>},
    {10, adapt<nccl::NetTableV10, nccl::NetPropertiesV10, 10>},
    {9, adapt<nccl::NetTableV9, nccl::NetPropertiesV9, 9>},
    {8, adapt<nccl::NetTableV8, nccl::NetPropertiesV8, 8>},
    {7, adapt<nccl::NetTableV7, nccl::NetPropertiesV7, 7>},
    {6, adapt<nccl::NetTableV6, nccl::NetPropertiesV6, 6>},
    {5, adapt<nccl::NetTableV5, nccl::NetPropertiesV5, 5>},
}};
static_assert(kTableVersions.front().version == kNewestTable && kTableVersions.back().version == kOldestTable);

struct ResultMeaning {
  const char* name;
  StatusCode code;
};

ResultMeaning meaning_of(nccl::Result result) {
  switch (result) {
    case nccl::Result::kSuccess: return {"success", StatusCode::kOk};
    case nccl::Result::kUnhandledCudaError: return {"unhandled CUDA error", StatusCode::kInternalError};
    case nccl::Result::kSystemError: return {"system error", StatusCode::kSystemError};
    case nccl::Result::kInternalError: return {"internal error", StatusCode::kInternalError};
    case nccl::Result::kInvalidArgument: return {"invalid argument", StatusCode::kInvalidArgument};
    case nccl::Result::kInvalidUsage: return {"invalid usage", StatusCode::kInvalidUsage};
    case nccl::Result::kRemoteError: return {"remote error", StatusCode::kRemoteError};
    case nccl::Result::kInProgress: return {"in progress, which a plugin must not return", StatusCode::kInternalError};
    case nccl::Result::kTimeout: return {"timeout", StatusCode::kRemoteError};
  }
  return {"an unknown code", StatusCode::kInternalError};
}

}  // namespace

Status PluginLibrary::open(const std::string& path, int table_version, std::unique_ptr<PluginLibrary>* library) {
  // As NCCL opens it.
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    return Status::invalid_argument("cannot open the plugin library \"" + path +
                                    "\": " + (reason == nullptr ? "unknown reason" : reason) +
                                    "; give --library the path of libnccl-net.so (`bagua-net doctor` shows it)");
  }
  std::unique_ptr<PluginLibrary> opened(new PluginLibrary(handle));
  std::string found;
  for (const TableVersion& candidate : kTableVersions) {
    const std::string symbol = "ncclNetPlugin_v" + std::to_string(candidate.version);
    const void* table = dlsym(handle, symbol.c_str());
    if (table == nullptr) continue;
    found += (found.empty() ? "" : ", ") + std::to_string(candidate.version);
    if (table_version != 0 && table_version != candidate.version) continue;
    opened->table_ = candidate.adapt(table);
    *library = std::move(opened);
    return Status::ok();
  }
  return Status::invalid_argument("the library \"" + path + "\" has no " +
                                  (table_version == 0
                                       ? "ncclNetPlugin table of version " + std::to_string(kOldestTable) + " to " +
                                             std::to_string(kNewestTable) +
                                             ": it is not an NCCL network plugin that this driver knows"
                                       : "ncclNetPlugin_v" + std::to_string(table_version) + "; it has versions " +
                                             (found.empty() ? "none" : found)));
}

PluginLibrary::~PluginLibrary() {
  table_.reset();
  dlclose(library_);
}

Status PluginLibrary::check(nccl::Result result, const char* call) const {
  if (result == nccl::Result::kSuccess) return Status::ok();
  const ResultMeaning meaning = meaning_of(result);
  const std::string warning = last_plugin_warning();
  return {meaning.code, std::string(call) + " of " + table_->name() + " (table v" + std::to_string(table_->version()) +
                            ") returned " + std::to_string(static_cast<int>(result)) + " (" + meaning.name + ")" +
                            (warning.empty() ? "; run with BAGUA_DRIVER_LOG=info for its log" : ": " + warning)};
}

}  // namespace bagua_net::bench
