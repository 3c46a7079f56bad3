// NCCL's network tables of the built library, v5 to v12, as one type for all of them: tests are written once and drive
// them all. Each call goes through the real table; nothing here checks or repairs.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "abi/net_types.h"

namespace abi_test {

namespace nccl = bagua_net::nccl;
using nccl::Logger, nccl::NetDeviceHandle, nccl::Result;

constexpr int kOldestVersion = 5;
constexpr int kNewestVersion = 12;

// The built library; RTLD_LOCAL and RTLD_NOW as NCCL opens it.
class PluginLibrary {
 public:
  PluginLibrary() : library_(dlopen(path(), RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) throw std::runtime_error(std::string("cannot open the plugin: ") + dlerror());
  }
  PluginLibrary(const PluginLibrary&) = delete;
  PluginLibrary& operator=(const PluginLibrary&) = delete;
  ~PluginLibrary() { dlclose(library_); }

  static const char* path() {
    const char* chosen = std::getenv("BAGUA_NET_PLUGIN_LIBRARY");
    return chosen != nullptr ? chosen : BAGUA_NET_PLUGIN_PATH;
  }
  // E.g. ncclNetPlugin_v12.
  const void* table(const std::string& kind, int version) const {
    const std::string symbol = kind + "_v" + std::to_string(version);
    const void* const found = dlsym(library_, symbol.c_str());
    if (found == nullptr) throw std::runtime_error(symbol + " is not exported");
    return found;
  }

 private:
  void* const library_;
};

// A version with what goes with it.
template <int kNumber, typename Table, typename Record>
struct TableOf {
  static constexpr int version = kNumber;
  using record = Record;
  const Table* table;
  const Table* operator->() const { return table; }
};

// The one of a variant that has this number.
template <typename Variant, std::size_t kIndex = 0>
Variant table_of_version(int version, const void* table) {
  if constexpr (kIndex == std::variant_size_v<Variant>) {
    throw std::runtime_error("no type for table v" + std::to_string(version));
  } else {
    std::variant_alternative_t<kIndex, Variant> one{};
    if (one.version != version) return table_of_version<Variant, kIndex + 1>(version, table);
    one.table = static_cast<decltype(one.table)>(table);
    return one;
  }
}

// --- the network

using Handle = std::array<std::uint8_t, nccl::kNetHandleMaxBytes>;

// The newest properties; what a version lacks keeps the value that was there.
using Properties = nccl::NetPropertiesV12;

class Net {
  using Table = std::variant<
      TableOf<5, nccl::NetTableV5, nccl::NetPropertiesV5>, TableOf<6, nccl::NetTableV6, nccl::NetPropertiesV6>,
      TableOf<7, nccl::NetTableV7, nccl::NetPropertiesV7>, TableOf<8, nccl::NetTableV8, nccl::NetPropertiesV8>,
      TableOf<9, nccl::NetTableV9, nccl::NetPropertiesV9>, TableOf<10, nccl::NetTableV10, nccl::NetPropertiesV10>,
      TableOf<11, nccl::NetTableV11, nccl::NetPropertiesV11>, TableOf<12, nccl::NetTableV12, nccl::NetPropertiesV12>>;

  template <typename Call>
  auto visit(Call call) const {
    return std::visit(call, table_);
  }

 public:
  Net(const PluginLibrary& library, int version, Logger* log)
      : version_(version),
        logger_(log),
        table_(table_of_version<Table>(version, library.table("ncclNetPlugin", version))) {
    // NCCL allows these, and only these, to be missing; each of them has to be, in a plugin without that ability.
    // makeVDevice is there if NCCL has been told to join.
    const bool joins = std::getenv("NCCL_NET_FORCE_MERGE") != nullptr;
    visit([&](auto table) {
      if constexpr (table.version >= 6) require_null(table->regMrDmaBuf == nullptr, "regMrDmaBuf");
      if constexpr (table.version >= 7) {
        require_null(table->getDeviceMr == nullptr, "getDeviceMr");
        require_null(table->irecvConsumed == nullptr, "irecvConsumed");
      }
      if constexpr (table.version >= 9) require_null((table->makeVDevice == nullptr) != joins, "makeVDevice");
      if constexpr (table.version >= 11) require_null(table->setNetAttr == nullptr, "setNetAttr");
    });
  }
  int version() const { return version_; }
  bool has_finalize() const { return version_ >= 11; }

  const char* name() const {
    return visit([](auto table) { return table->name; });
  }
  // Before v11, *ctx becomes nullptr.
  Result init(void** ctx) const {
    return visit([&](auto table) {
      if constexpr (table.version >= 11) {
        nccl::NetCommConfig config{nccl::kUndefined};
        return table->init(ctx, 0x1234, &config, logger_, nullptr);
      } else {
        *ctx = nullptr;
        if constexpr (table.version >= 10)
          return table->init(logger_, nullptr);
        else
          return table->init(logger_);
      }
    });
  }
  // Before v11: nothing.
  Result finalize(void* ctx) const {
    return visit([&](auto table) {
      if constexpr (table.version >= 11)
        return table->finalize(ctx);
      else
        return Result::kSuccess;
    });
  }
  Result devices(int* ndev) const {
    return visit([&](auto table) { return table->devices(ndev); });
  }

  Result properties(int dev, Properties* props) const {
    return visit([&](auto table) {
      typename decltype(table)::record own;
      std::memset(&own, 0xA5, sizeof own);  // as uninitialised as NCCL's
      const Result result = table->getProperties(dev, &own);
      props->name = own.name;
      props->pciPath = own.pciPath;
      props->guid = own.guid;
      props->ptrSupport = own.ptrSupport;
      props->speed = own.speed;
      props->port = own.port;
      props->latency = own.latency;
      props->maxComms = own.maxComms;
      props->maxRecvs = own.maxRecvs;
      if constexpr (table.version >= 7) {
        props->netDeviceType = own.netDeviceType;
        props->netDeviceVersion = own.netDeviceVersion;
      }
      if constexpr (table.version >= 8) props->regIsGlobal = own.regIsGlobal;
      if constexpr (table.version >= 9) {
        props->forceFlush = own.forceFlush;
        props->vProps.ndevs = own.vProps.ndevs;
        std::copy(std::begin(own.vProps.devs), std::end(own.vProps.devs), props->vProps.devs);
        props->maxP2pBytes = own.maxP2pBytes;
        props->maxCollBytes = own.maxCollBytes;
      }
      if constexpr (table.version >= 11) props->maxMultiRequestSize = own.maxMultiRequestSize;
      if constexpr (table.version >= 12) {
        props->railId = own.railId;
        props->planeId = own.planeId;
      }
      return result;
    });
  }

  // v9+.
  Result make_virtual_device(int* dev, const std::vector<int>& devs) const {
    return visit([&](auto table) {
      if constexpr (table.version >= 9) {
        decltype(std::declval<typename decltype(table)::record>().vProps) wanted{};
        wanted.ndevs = static_cast<int>(devs.size());
        std::copy(devs.begin(), devs.end(), wanted.devs);
        return table->makeVDevice(dev, &wanted);
      } else {
        return Result::kInternalError;
      }
    });
  }

  Result listen([[maybe_unused]] void* ctx, int dev, void* handle, void** listen_comm) const {
    return visit([&](auto table) {
      if constexpr (table.version >= 11)
        return table->listen(ctx, dev, handle, listen_comm);
      else
        return table->listen(dev, handle, listen_comm);
    });
  }
  Result connect([[maybe_unused]] void* ctx, int dev, void* handle, void** send_comm) const {
    // The device handle pointer is absent, NULL or points to something: all of them occur.
    NetDeviceHandle* device_handle = nullptr;
    [[maybe_unused]] NetDeviceHandle** given = ++calls_ % 2 == 0 ? &device_handle : nullptr;
    return visit([&](auto table) {
      if constexpr (table.version >= 11) {
        return table->connect(ctx, dev, handle, send_comm, given);
      } else if constexpr (table.version >= 10) {
        nccl::NetCommConfig config{nccl::kUndefined};
        return table->connect(dev, &config, handle, send_comm, given);
      } else if constexpr (table.version >= 7) {
        return table->connect(dev, handle, send_comm, given);
      } else {
        return table->connect(dev, handle, send_comm);
      }
    });
  }
  Result accept(void* listen_comm, void** recv_comm) const {
    [[maybe_unused]] NetDeviceHandle* device_handle = nullptr;
    return visit([&](auto table) {
      if constexpr (table.version >= 7)
        return table->accept(listen_comm, recv_comm, ++calls_ % 2 == 0 ? &device_handle : nullptr);
      else
        return table->accept(listen_comm, recv_comm);
    });
  }

  Result reg_mr(void* comm, void* data, std::int64_t bytes, int type, void** mhandle) const {
    return visit([&](auto table) {
      using Size = std::conditional_t<(table.version >= 8), std::size_t, int>;
      return table->regMr(comm, data, static_cast<Size>(bytes), type, mhandle);
    });
  }
  Result dereg_mr(void* comm, void* mhandle) const {
    return visit([&](auto table) { return table->deregMr(comm, mhandle); });
  }
  Result isend(void* comm, void* data, std::int64_t bytes, int tag, void* mhandle, void** request) const {
    return visit([&](auto table) {
      const auto size = static_cast<std::conditional_t<(table.version >= 9), std::size_t, int>>(bytes);
      if constexpr (table.version >= 10)
        return table->isend(comm, data, size, tag, mhandle, nullptr, request);
      else
        return table->isend(comm, data, size, tag, mhandle, request);
    });
  }
  Result irecv(void* comm, int n, void** data, std::int64_t bytes, int tag, void** mhandles, void** request) const {
    return visit([&](auto table) {
      using Size = std::conditional_t<(table.version >= 9), std::size_t, int>;
      std::array<Size, 8> sizes;
      std::array<int, 8> tags;
      sizes.fill(static_cast<Size>(bytes));
      tags.fill(tag);
      if constexpr (table.version >= 10) {
        std::array<void*, 8> phandles{};
        // NULL when NCCL's bootstrap runs over the plugin.
        void** given = ++calls_ % 2 == 0 ? phandles.data() : nullptr;
        return table->irecv(comm, n, data, sizes.data(), tags.data(), mhandles, given, request);
      } else {
        return table->irecv(comm, n, data, sizes.data(), tags.data(), mhandles, request);
      }
    });
  }
  Result iflush(void* comm, void* data, int bytes, void* mhandle, void** request) const {
    return visit([&](auto table) { return table->iflush(comm, 1, &data, &bytes, &mhandle, request); });
  }
  Result test(void* request, int* done, int* sizes) const {
    return visit([&](auto table) { return table->test(request, done, sizes); });
  }
  Result close_send(void* comm) const {
    return visit([&](auto table) { return table->closeSend(comm); });
  }
  Result close_recv(void* comm) const {
    return visit([&](auto table) { return table->closeRecv(comm); });
  }
  Result close_listen(void* comm) const {
    return visit([&](auto table) { return table->closeListen(comm); });
  }

 private:
  void require_null(bool is_null, const char* slot) const {
    if (!is_null) throw std::runtime_error("v" + std::to_string(version_) + ": slot " + slot + " is not NULL");
  }

  const int version_;
  Logger* const logger_;
  const Table table_;
  inline static thread_local unsigned calls_ = 0;
};

}  // namespace abi_test
