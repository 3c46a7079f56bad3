// One interface over NCCL's network tables v5 to v12, as NCCL itself has one: tests are written once and drive them
// all. Each call goes through the real table of the built library; nothing here checks or repairs.
#pragma once

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "abi/net_types_v12.h"

namespace abi_test {

using bagua_net::nccl::Logger;
using bagua_net::nccl::NetDeviceHandle;
using bagua_net::nccl::Result;

constexpr int kOldestVersion = 5;
constexpr int kNewestVersion = 12;

using Handle = std::array<std::uint8_t, bagua_net::nccl::kNetHandleMaxBytes>;

// The newest properties; what a version lacks keeps the value that was there.
using Properties = bagua_net::nccl::NetPropertiesV12;

class Net {
 public:
  Net(int version, Logger* log) : version_(version), logger_(log) {}
  virtual ~Net() = default;
  int version() const { return version_; }
  bool has_finalize() const { return version_ >= 11; }

  virtual const char* name() const = 0;
  virtual Result init(void** ctx) const = 0;     // before v11, *ctx becomes nullptr
  virtual Result finalize(void* ctx) const = 0;  // before v11: nothing
  virtual Result devices(int* ndev) const = 0;
  virtual Result properties(int dev, Properties* props) const = 0;
  virtual Result listen(void* ctx, int dev, void* handle, void** listen_comm) const = 0;
  virtual Result connect(void* ctx, int dev, void* handle, void** send_comm) const = 0;
  virtual Result accept(void* listen_comm, void** recv_comm) const = 0;
  virtual Result reg_mr(void* comm, void* data, std::int64_t bytes, int type, void** mhandle) const = 0;
  virtual Result dereg_mr(void* comm, void* mhandle) const = 0;
  virtual Result isend(void* comm, void* data, std::int64_t bytes, int tag, void* mhandle, void** request) const = 0;
  virtual Result irecv(void* comm, int n, void** data, std::int64_t bytes, int tag, void** mhandles,
                       void** request) const = 0;
  virtual Result iflush(void* comm, void* data, int bytes, void* mhandle, void** request) const = 0;
  virtual Result test(void* request, int* done, int* sizes) const = 0;
  virtual Result close_send(void* comm) const = 0;
  virtual Result close_recv(void* comm) const = 0;
  virtual Result close_listen(void* comm) const = 0;

 protected:
  Logger* logger() const { return logger_; }

 private:
  const int version_;
  Logger* const logger_;
};

template <int kVersion, typename Table, typename TableProperties>
class NetOf final : public Net {
 public:
  NetOf(const Table* table, Logger* log) : Net(kVersion, log), table_(table) {
    // NCCL allows these, and only these, to be missing; each of them has to be, in a plugin without that ability.
    if constexpr (kVersion >= 6) require_null(table->regMrDmaBuf == nullptr, "regMrDmaBuf");
    if constexpr (kVersion >= 7) {
      require_null(table->getDeviceMr == nullptr, "getDeviceMr");
      require_null(table->irecvConsumed == nullptr, "irecvConsumed");
    }
    if constexpr (kVersion >= 9) require_null(table->makeVDevice == nullptr, "makeVDevice");
    if constexpr (kVersion >= 11) require_null(table->setNetAttr == nullptr, "setNetAttr");
  }

  const char* name() const override { return table_->name; }

  Result init(void** ctx) const override {
    if constexpr (kVersion >= 11) {
      bagua_net::nccl::NetCommConfig config{bagua_net::nccl::kUndefined};
      return table_->init(ctx, 0x1234, &config, logger(), nullptr);
    } else {
      *ctx = nullptr;
      if constexpr (kVersion >= 10)
        return table_->init(logger(), nullptr);
      else
        return table_->init(logger());
    }
  }
  Result finalize(void* ctx) const override {
    if constexpr (kVersion >= 11)
      return table_->finalize(ctx);
    else
      return Result::kSuccess;
  }
  Result devices(int* ndev) const override { return table_->devices(ndev); }

  Result properties(int dev, Properties* props) const override {
    TableProperties own;
    std::memset(&own, 0xA5, sizeof own);  // as uninitialised as NCCL's
    const Result result = table_->getProperties(dev, &own);
    props->name = own.name;
    props->pciPath = own.pciPath;
    props->guid = own.guid;
    props->ptrSupport = own.ptrSupport;
    props->speed = own.speed;
    props->port = own.port;
    props->latency = own.latency;
    props->maxComms = own.maxComms;
    props->maxRecvs = own.maxRecvs;
    if constexpr (kVersion >= 7) {
      props->netDeviceType = own.netDeviceType;
      props->netDeviceVersion = own.netDeviceVersion;
    }
    if constexpr (kVersion >= 8) props->regIsGlobal = own.regIsGlobal;
    if constexpr (kVersion >= 9) {
      props->forceFlush = own.forceFlush;
      props->vProps.ndevs = own.vProps.ndevs;
      props->vProps.devs[0] = own.vProps.devs[0];
      props->maxP2pBytes = own.maxP2pBytes;
      props->maxCollBytes = own.maxCollBytes;
    }
    if constexpr (kVersion >= 11) props->maxMultiRequestSize = own.maxMultiRequestSize;
    if constexpr (kVersion >= 12) {
      props->railId = own.railId;
      props->planeId = own.planeId;
    }
    return result;
  }

  Result listen([[maybe_unused]] void* ctx, int dev, void* handle, void** listen_comm) const override {
    if constexpr (kVersion >= 11)
      return table_->listen(ctx, dev, handle, listen_comm);
    else
      return table_->listen(dev, handle, listen_comm);
  }
  Result connect([[maybe_unused]] void* ctx, int dev, void* handle, void** send_comm) const override {
    // The device handle pointer is absent, NULL or points to something: all of them occur.
    NetDeviceHandle* device_handle = nullptr;
    [[maybe_unused]] NetDeviceHandle** given = ++calls_ % 2 == 0 ? &device_handle : nullptr;
    if constexpr (kVersion >= 11) {
      return table_->connect(ctx, dev, handle, send_comm, given);
    } else if constexpr (kVersion >= 10) {
      bagua_net::nccl::NetCommConfig config{bagua_net::nccl::kUndefined};
      return table_->connect(dev, &config, handle, send_comm, given);
    } else if constexpr (kVersion >= 7) {
      return table_->connect(dev, handle, send_comm, given);
    } else {
      return table_->connect(dev, handle, send_comm);
    }
  }
  Result accept(void* listen_comm, void** recv_comm) const override {
    NetDeviceHandle* device_handle = nullptr;
    if constexpr (kVersion >= 7)
      return table_->accept(listen_comm, recv_comm, ++calls_ % 2 == 0 ? &device_handle : nullptr);
    else
      return table_->accept(listen_comm, recv_comm);
  }

  Result reg_mr(void* comm, void* data, std::int64_t bytes, int type, void** mhandle) const override {
    return table_->regMr(comm, data, static_cast<RegisteredSize>(bytes), type, mhandle);
  }
  Result dereg_mr(void* comm, void* mhandle) const override { return table_->deregMr(comm, mhandle); }

  Result isend(void* comm, void* data, std::int64_t bytes, int tag, void* mhandle, void** request) const override {
    const auto size = static_cast<Size>(bytes);
    if constexpr (kVersion >= 10)
      return table_->isend(comm, data, size, tag, mhandle, nullptr, request);
    else
      return table_->isend(comm, data, size, tag, mhandle, request);
  }
  Result irecv(void* comm, int n, void** data, std::int64_t bytes, int tag, void** mhandles,
               void** request) const override {
    std::array<Size, 8> sizes;
    std::array<int, 8> tags;
    sizes.fill(static_cast<Size>(bytes));
    tags.fill(tag);
    if constexpr (kVersion >= 10) {
      std::array<void*, 8> phandles{};
      // NULL when NCCL's bootstrap runs over the plugin.
      void** given = ++calls_ % 2 == 0 ? phandles.data() : nullptr;
      return table_->irecv(comm, n, data, sizes.data(), tags.data(), mhandles, given, request);
    } else {
      return table_->irecv(comm, n, data, sizes.data(), tags.data(), mhandles, request);
    }
  }
  Result iflush(void* comm, void* data, int bytes, void* mhandle, void** request) const override {
    return table_->iflush(comm, 1, &data, &bytes, &mhandle, request);
  }
  Result test(void* request, int* done, int* sizes) const override { return table_->test(request, done, sizes); }
  Result close_send(void* comm) const override { return table_->closeSend(comm); }
  Result close_recv(void* comm) const override { return table_->closeRecv(comm); }
  Result close_listen(void* comm) const override { return table_->closeListen(comm); }

 private:
  using Size = std::conditional_t<(kVersion >= 9), std::size_t, int>;
  using RegisteredSize = std::conditional_t<(kVersion >= 8), std::size_t, int>;

  static void require_null(bool is_null, const char* slot) {
    if (!is_null) throw std::runtime_error("v" + std::to_string(kVersion) + ": slot " + slot + " is not NULL");
  }

  const Table* const table_;
  inline static thread_local unsigned calls_ = 0;
};

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

  std::unique_ptr<Net> net(int version, Logger* log) const {
    using namespace bagua_net::nccl;
    switch (version) {
      case 5: return make<5, NetTableV5, NetPropertiesV5>(log);
      case 6: return make<6, NetTableV6, NetPropertiesV6>(log);
      case 7: return make<7, NetTableV7, NetPropertiesV7>(log);
      case 8: return make<8, NetTableV8, NetPropertiesV8>(log);
      case 9: return make<9, NetTableV9, NetPropertiesV9>(log);
      case 10: return make<10, NetTableV10, NetPropertiesV10>(log);
      case 11: return make<11, NetTableV11, NetPropertiesV11>(log);
      case 12: return make<12, NetTableV12, NetPropertiesV12>(log);
      default: throw std::runtime_error("no adapter for table v" + std::to_string(version));
    }
  }

 private:
  template <int kVersion, typename Table, typename TableProperties>
  std::unique_ptr<Net> make(Logger* log) const {
    const std::string symbol = "ncclNetPlugin_v" + std::to_string(kVersion);
    const void* table = dlsym(library_, symbol.c_str());
    if (table == nullptr) throw std::runtime_error(symbol + " is not exported");
    return std::make_unique<NetOf<kVersion, Table, TableProperties>>(static_cast<const Table*>(table), log);
  }

  void* const library_;
};

}  // namespace abi_test
