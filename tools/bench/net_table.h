// NetTable: NCCL's network table without its version. NetTableAdapter<Table> makes one out of any ncclNetPlugin_vN:
// each slot is called through an overload chosen by the slot's own signature, as NCCL's shims do by hand. A new version
// whose slots look like older ones needs one row in plugin_library.cc; a new signature needs one overload here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "abi/nccl_types.h"
#include "abi/net_types_v12.h"
#include "bench/plugin_log.h"

namespace bagua_net::bench {

class NetTable {
 public:
  virtual ~NetTable() = default;
  virtual int version() const = 0;
  virtual std::string name() const = 0;
  virtual nccl::Result init() = 0;
  virtual nccl::Result finalize() = 0;  // success without a call where the version has none
  virtual nccl::Result devices(int* count) = 0;
  virtual nccl::Result device_name(int device, std::string* name) = 0;
  virtual nccl::Result listen(int device, void* handle, void** listen_comm) = 0;
  virtual nccl::Result connect(int device, void* handle, void** send_comm) = 0;
  virtual nccl::Result accept(void* listen_comm, void** receive_comm) = 0;
  virtual nccl::Result register_memory(void* comm, void* data, std::size_t bytes, void** registration) = 0;
  virtual nccl::Result deregister_memory(void* comm, void* registration) = 0;
  virtual nccl::Result isend(void* comm, void* data, std::size_t bytes, void* registration, void** request) = 0;
  virtual nccl::Result irecv(void* comm, void* data, std::size_t bytes, void* registration, void** request) = 0;
  virtual nccl::Result test(void* request, int* done, int* bytes) = 0;
  virtual nccl::Result close_send(void* comm) = 0;
  virtual nccl::Result close_receive(void* comm) = 0;
  virtual nccl::Result close_listen(void* comm) = 0;
};

namespace slot {

// No profiler listens; NCCL passes a callback all the same.
inline nccl::Result ignore_profiler_event(void**, int, void*, std::int64_t, void*) { return nccl::Result::kSuccess; }

constexpr std::uint64_t kCommId = 1;
constexpr int kTag = 0;  // tags tell the buffers of one grouped receive apart; groups here have one

inline nccl::Result init(nccl::InitV5* call, void**) { return call(plugin_logger()); }
inline nccl::Result init(nccl::InitV10* call, void**) { return call(plugin_logger(), &ignore_profiler_event); }
inline nccl::Result init(nccl::InitV11* call, void** context) {
  nccl::NetCommConfig config{nccl::kUndefined};
  return call(context, kCommId, &config, plugin_logger(), &ignore_profiler_event);
}

inline nccl::Result listen(nccl::ListenV5* call, void*, int device, void* handle, void** comm) {
  return call(device, handle, comm);
}
inline nccl::Result listen(nccl::ListenV11* call, void* context, int device, void* handle, void** comm) {
  return call(context, device, handle, comm);
}

inline nccl::Result connect(nccl::ConnectV5* call, void*, int device, void* handle, void** comm) {
  return call(device, handle, comm);
}
inline nccl::Result connect(nccl::ConnectV7* call, void*, int device, void* handle, void** comm) {
  nccl::NetDeviceHandle* device_handle = nullptr;
  return call(device, handle, comm, &device_handle);
}
inline nccl::Result connect(nccl::ConnectV10* call, void*, int device, void* handle, void** comm) {
  nccl::NetCommConfig config{nccl::kUndefined};
  nccl::NetDeviceHandle* device_handle = nullptr;
  return call(device, &config, handle, comm, &device_handle);
}
inline nccl::Result connect(nccl::ConnectV11* call, void* context, int device, void* handle, void** comm) {
  nccl::NetDeviceHandle* device_handle = nullptr;
  return call(context, device, handle, comm, &device_handle);
}

inline nccl::Result accept(nccl::AcceptV5* call, void* listen_comm, void** comm) { return call(listen_comm, comm); }
inline nccl::Result accept(nccl::AcceptV7* call, void* listen_comm, void** comm) {
  nccl::NetDeviceHandle* device_handle = nullptr;
  return call(listen_comm, comm, &device_handle);
}

inline nccl::Result register_memory(nccl::RegMrV5* call, void* comm, void* data, std::size_t bytes, void** handle) {
  return call(comm, data, static_cast<int>(bytes), nccl::kPointerHost, handle);
}
inline nccl::Result register_memory(nccl::RegMrV8* call, void* comm, void* data, std::size_t bytes, void** handle) {
  return call(comm, data, bytes, nccl::kPointerHost, handle);
}

inline nccl::Result isend(nccl::IsendV5* call, void* comm, void* data, std::size_t bytes, void* handle,
                          void** request) {
  return call(comm, data, static_cast<int>(bytes), kTag, handle, request);
}
inline nccl::Result isend(nccl::IsendV9* call, void* comm, void* data, std::size_t bytes, void* handle,
                          void** request) {
  return call(comm, data, bytes, kTag, handle, request);
}
inline nccl::Result isend(nccl::IsendV10* call, void* comm, void* data, std::size_t bytes, void* handle,
                          void** request) {
  return call(comm, data, bytes, kTag, handle, nullptr, request);
}

inline nccl::Result irecv(nccl::IrecvV5* call, void* comm, void* data, std::size_t bytes, void* handle,
                          void** request) {
  int size = static_cast<int>(bytes);
  int tag = kTag;
  return call(comm, 1, &data, &size, &tag, &handle, request);
}
inline nccl::Result irecv(nccl::IrecvV9* call, void* comm, void* data, std::size_t bytes, void* handle,
                          void** request) {
  int tag = kTag;
  return call(comm, 1, &data, &bytes, &tag, &handle, request);
}
inline nccl::Result irecv(nccl::IrecvV10* call, void* comm, void* data, std::size_t bytes, void* handle,
                          void** request) {
  int tag = kTag;
  void* profiler_handle = nullptr;
  return call(comm, 1, &data, &bytes, &tag, &handle, &profiler_handle, request);
}

}  // namespace slot

template <typename Table, typename Properties, int kVersion>
class NetTableAdapter final : public NetTable {
 public:
  explicit NetTableAdapter(const void* table) : table_(*static_cast<const Table*>(table)) {}

  int version() const override { return kVersion; }
  std::string name() const override { return table_.name; }

  nccl::Result init() override { return slot::init(table_.init, &context_); }
  nccl::Result finalize() override {
    if constexpr (kVersion >= 11) {
      return table_.finalize(context_);
    } else {
      return nccl::Result::kSuccess;
    }
  }
  nccl::Result devices(int* count) override { return table_.devices(count); }
  nccl::Result device_name(int device, std::string* name) override {
    Properties properties;
    std::memset(&properties, 0xff, sizeof properties);  // NCCL's is uninitialised
    const nccl::Result result = table_.getProperties(device, &properties);
    if (result == nccl::Result::kSuccess) *name = properties.name;
    return result;
  }
  nccl::Result listen(int device, void* handle, void** listen_comm) override {
    return slot::listen(table_.listen, context_, device, handle, listen_comm);
  }
  nccl::Result connect(int device, void* handle, void** send_comm) override {
    return slot::connect(table_.connect, context_, device, handle, send_comm);
  }
  nccl::Result accept(void* listen_comm, void** receive_comm) override {
    return slot::accept(table_.accept, listen_comm, receive_comm);
  }
  nccl::Result register_memory(void* comm, void* data, std::size_t bytes, void** registration) override {
    return slot::register_memory(table_.regMr, comm, data, bytes, registration);
  }
  nccl::Result deregister_memory(void* comm, void* registration) override { return table_.deregMr(comm, registration); }
  nccl::Result isend(void* comm, void* data, std::size_t bytes, void* registration, void** request) override {
    return slot::isend(table_.isend, comm, data, bytes, registration, request);
  }
  nccl::Result irecv(void* comm, void* data, std::size_t bytes, void* registration, void** request) override {
    return slot::irecv(table_.irecv, comm, data, bytes, registration, request);
  }
  nccl::Result test(void* request, int* done, int* bytes) override { return table_.test(request, done, bytes); }
  nccl::Result close_send(void* comm) override { return table_.closeSend(comm); }
  nccl::Result close_receive(void* comm) override { return table_.closeRecv(comm); }
  nccl::Result close_listen(void* comm) override { return table_.closeListen(comm); }

 private:
  const Table& table_;
  void* context_ = nullptr;
};

}  // namespace bagua_net::bench
