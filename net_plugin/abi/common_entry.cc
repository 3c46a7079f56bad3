#include "abi/common_entry.h"

#include <exception>
#include <new>
#include <string>

#include "abi/nccl_log.h"
#include "abi/process_instance.h"
#include "abi/profiler_entry.h"
#include "base/log_sink.h"
#include "transport/comm/recv_comm.h"
#include "transport/comm/send_comm.h"

namespace bagua_net::abi {

static_assert(kHandleBytes == nccl::kNetHandleMaxBytes);
static_assert(kMaxRequestsPerComm >= nccl::kNetMaxRequests);

namespace {

constexpr int kMaxGroupedReceives = 1;  // maxRecvs in the properties

// The one place where an outcome of the core becomes one of NCCL's result codes.
nccl::Result status_to_nccl(StatusCode code) {
  // No default: a new code must choose here, or the build warns.
  switch (code) {
    case StatusCode::kOk: return nccl::Result::kSuccess;
    case StatusCode::kSystemError: return nccl::Result::kSystemError;
    case StatusCode::kInternalError: return nccl::Result::kInternalError;
    case StatusCode::kInvalidArgument: return nccl::Result::kInvalidArgument;
    case StatusCode::kInvalidUsage: return nccl::Result::kInvalidUsage;
    case StatusCode::kRemoteError:
    case StatusCode::kDamagedData: return nccl::Result::kRemoteError;
  }
  return nccl::Result::kInternalError;
}

nccl::Result report(const char* operation, const Status& failure) noexcept {
  try {
    BAGUA_NET_WARN(std::string(operation) + ": " + failure.message());
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory for the text; the code below says that it failed
  }
  return status_to_nccl(failure.code());
}

// Runs the body of an entry, which returns a Status.
template <typename Body>
nccl::Result guarded(const char* operation, Body&& body) noexcept {
  Status status;
  try {
    status = body();
    if (status.is_ok()) return nccl::Result::kSuccess;
  } catch (const std::bad_alloc&) {
    return nccl::Result::kSystemError;
  } catch (const std::exception& error) {
    try {
      status = Status::internal_error(std::string("unexpected exception: ") + error.what());
    } catch (...) {
      return nccl::Result::kInternalError;
    }
  } catch (...) {
    return nccl::Result::kInternalError;
  }
  return report(operation, status);
}

Status missing(const char* argument) {
  return Status::invalid_argument(std::string(argument) + " is NULL, and must not be");
}

Status check_bytes(std::int64_t bytes) {
  if (bytes >= 0 && bytes <= static_cast<std::int64_t>(kMaxMessageBytes)) return Status::ok();
  return Status::invalid_argument("a message of " + std::to_string(bytes) + " bytes: it must be 0 to " +
                                  std::to_string(kMaxMessageBytes));
}

// The comm for a data-path call. No lookup, no lock: a comm that was closed is the caller's error, as with any pointer,
// but not one that went with its transport.
template <typename Kind>
Status comm_of_kind(void* comm, const char* argument, OpenComm** open, Kind** kind) {
  if (comm == nullptr) return missing(argument);
  if (!is_of_epoch(comm, current_epoch.load(std::memory_order_acquire))) {
    return Status::internal_error(std::string(argument) +
                                  " belongs to the parent process or to a communicator that was finalized");
  }
  auto* const found = address_in<OpenComm>(comm);
  Kind* const* const expected = std::get_if<Kind*>(&found->comm);
  if (expected == nullptr) return Status::invalid_argument(std::string(argument) + " is a comm of another kind");
  *open = found;
  *kind = *expected;
  return Status::ok();
}

// Send and receive comms register memory, a listen comm does not.
Status memory_of(void* comm, Comm** memory) {
  if (comm == nullptr) return missing("comm");
  OpenComm* open = nullptr;
  BAGUA_NET_RETURN_IF_ERROR(ProcessInstance::get().find_comm(comm, &open));
  if (open->epoch != current_epoch.load(std::memory_order_acquire)) {
    return Status::internal_error("the comm's communicator was finalized");
  }
  if (auto* const* send = std::get_if<SendComm*>(&open->comm)) {
    *memory = *send;
  } else if (auto* const* recv = std::get_if<RecvComm*>(&open->comm)) {
    *memory = *recv;
  } else {
    return Status::invalid_argument("a listen comm has no memory to register");
  }
  return Status::ok();
}

void trace_origin(Comm* comm, const Communicator* owner, const Request& request, void* phandle) {
  MessageOrigin origin;
  nccl::ProfilerCallback* const callback = ProcessInstance::get().profiler_callback(owner);
  if (profiler::origin_of_message(callback, phandle, &origin)) comm->trace_origin(request, origin);
}

nccl::Result decline() {
  BAGUA_NET_INFO("ENABLE_BAGUA_NET=0: Bagua-Net declines, NCCL uses its own transport");
  return nccl::Result::kInvalidUsage;
}

}  // namespace

nccl::Result init(int table_version, nccl::Logger* logger, nccl::ProfilerCallback* profiler) {
  bool declined = false;
  const nccl::Result result = guarded("init", [&] {
    install_nccl_logger(logger);
    return ProcessInstance::get().init(table_version, 0, profiler, nullptr, &declined);
  });
  return declined ? decline() : result;
}

nccl::Result init_communicator(int table_version, nccl::Logger* logger, std::uint64_t communicator_id, void** ctx,
                               nccl::ProfilerCallback* profiler) {
  bool declined = false;
  const nccl::Result result = guarded("init", [&] {
    install_nccl_logger(logger);
    if (ctx == nullptr) return missing("ctx");
    *ctx = nullptr;
    Communicator* communicator = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(
        ProcessInstance::get().init(table_version, communicator_id, profiler, &communicator, &declined));
    *ctx = communicator;
    return Status::ok();
  });
  return declined ? decline() : result;
}

nccl::Result finalize(void* ctx) {
  return guarded("finalize", [&] {
    ProcessInstance::get().finalize(static_cast<Communicator*>(ctx));
    return Status::ok();
  });
}

nccl::Result devices(int* ndev) {
  return guarded("devices", [&] {
    if (ndev == nullptr) return missing("ndev");
    *ndev = 0;
    DeviceList* all = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(ProcessInstance::get().devices(&all));
    *ndev = all->count();
    return Status::ok();
  });
}

nccl::Result device_facts(int dev, const void* props, DeviceFacts* facts) {
  return guarded("getProperties", [&] {
    if (props == nullptr) return missing("props");
    ProcessInstance& process = ProcessInstance::get();
    DeviceList* all = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(process.devices(&all));
    const std::shared_ptr<const Device> device = all->at(dev);
    if (device == nullptr) {
      return Status::invalid_argument("device " + std::to_string(dev) + " does not exist: there are " +
                                      std::to_string(all->count()));
    }
    facts->parts = device->parts.empty() ? std::vector<int>{dev} : device->parts;
    facts->name = process.interned(device->name);
    facts->pci_path = device->pci_path.empty() ? nullptr : process.interned(device->pci_path);
    facts->guid = device->guid;
    facts->speed_mbps = device->told_mbps();
    facts->port = device->port;
    return Status::ok();
  });
}

nccl::Result make_virtual_device(const std::vector<int>& devs, int* dev) {
  return guarded("makeVDevice", [&] {
    DeviceList* all = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(ProcessInstance::get().devices(&all));
    int number = 0;
    BAGUA_NET_RETURN_IF_ERROR(all->join(devs, &number));
    if (dev != nullptr) *dev = number;
    if (devs.size() == 1) return Status::ok();
    for (; number < all->count(); ++number) {
      const std::shared_ptr<const Device> made = all->at(number);
      BAGUA_NET_INFO("Bagua-Net: NCCL joined " + made->name + ", " + std::to_string(made->speed_mbps) + " Mb/s");
    }
    return Status::ok();
  });
}

nccl::Result listen(void* ctx, int dev, void* handle, void** listen_comm) {
  return guarded("listen", [&] {
    if (listen_comm == nullptr) return missing("listenComm");
    *listen_comm = nullptr;
    if (handle == nullptr) return missing("handle");
    ProcessInstance& process = ProcessInstance::get();
    TransportContext* transport = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(process.transport(&transport));
    ListenComm* created = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(transport->listen(dev, static_cast<std::uint8_t*>(handle), &created));
    *listen_comm = process.add_comm(transport, created, static_cast<Communicator*>(ctx));
    return Status::ok();
  });
}

nccl::Result connect(void* ctx, int dev, void* handle, void** send_comm, nccl::NetDeviceHandle** device_handle) {
  return guarded("connect", [&] {
    if (send_comm == nullptr) return missing("sendComm");
    *send_comm = nullptr;
    if (device_handle != nullptr) *device_handle = nullptr;
    if (handle == nullptr) return missing("handle");
    ProcessInstance& process = ProcessInstance::get();
    TransportContext* transport = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(process.transport(&transport));
    SendComm* connected = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(transport->connect(dev, static_cast<std::uint8_t*>(handle), &connected));
    if (connected == nullptr) return Status::ok();
    *send_comm = process.add_comm(transport, connected, static_cast<Communicator*>(ctx));
    return Status::ok();
  });
}

nccl::Result accept(void* listen_comm, void** recv_comm, nccl::NetDeviceHandle** device_handle) {
  return guarded("accept", [&] {
    if (recv_comm == nullptr) return missing("recvComm");
    *recv_comm = nullptr;
    if (device_handle != nullptr) *device_handle = nullptr;
    OpenComm* open = nullptr;
    ListenComm* listening = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(comm_of_kind(listen_comm, "listenComm", &open, &listening));
    RecvComm* accepted = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(open->transport->accept(listening, &accepted));
    if (accepted == nullptr) return Status::ok();
    *recv_comm = ProcessInstance::get().add_comm(open->transport, accepted, open->owner);
    return Status::ok();
  });
}

nccl::Result close(void* comm) {
  return guarded("close", [&] {
    if (comm != nullptr) ProcessInstance::get().close(comm);
    return Status::ok();
  });
}

nccl::Result register_memory(void* comm, void* data, std::int64_t bytes, int type, void** mhandle) {
  return guarded("regMr", [&] {
    if (mhandle == nullptr) return missing("mhandle");
    *mhandle = nullptr;
    if (type != nccl::kPointerHost) {
      return Status::invalid_argument("pointer type " + std::to_string(type) +
                                      " is not supported: TCP reads and writes host memory (type 1) only");
    }
    if (bytes < 0) {
      return Status::invalid_argument("a region of " + std::to_string(bytes) + " bytes: it must not be negative");
    }
    Comm* memory = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(memory_of(comm, &memory));
    MemoryRegistration* registration = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(memory->register_memory(data, static_cast<std::size_t>(bytes), &registration));
    *mhandle = registration;
    return Status::ok();
  });
}

nccl::Result deregister_memory(void* comm, void* mhandle) {
  return guarded("deregMr", [&] {
    if (mhandle == nullptr) return Status::ok();
    Comm* memory = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(memory_of(comm, &memory));
    return memory->deregister_memory(static_cast<MemoryRegistration*>(mhandle));
  });
}

nccl::Result isend(void* send_comm, void* data, std::int64_t bytes, void* mhandle, void* phandle, void** request) {
  return guarded("isend", [&] {
    if (request == nullptr) return missing("request");
    *request = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(check_bytes(bytes));
    if (data == nullptr && bytes > 0) return missing("data");
    OpenComm* open = nullptr;
    SendComm* comm = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(comm_of_kind(send_comm, "sendComm", &open, &comm));
    Request* posted = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(
        comm->isend(data, static_cast<std::size_t>(bytes), static_cast<MemoryRegistration*>(mhandle), &posted));
    if (posted == nullptr) return Status::ok();
    *request = handle_of(posted, open->epoch);
    if (comm->is_traced()) trace_origin(comm, open->owner, *posted, phandle);
    return Status::ok();
  });
}

nccl::Result irecv(void* recv_comm, int n, void** data, std::int64_t bytes, void** mhandles, void** phandles,
                   void** request) {
  return guarded("irecv", [&] {
    if (request == nullptr) return missing("request");
    // The hint 0x1 ("completion is optional") may be in there. It is not taken up: the request completes with the data,
    // which costs nothing here.
    *request = nullptr;
    if (n != kMaxGroupedReceives) {
      return Status::invalid_argument("n=" + std::to_string(n) + " grouped receives: the limit is " +
                                      std::to_string(kMaxGroupedReceives) + ", as maxRecvs says");
    }
    BAGUA_NET_RETURN_IF_ERROR(check_bytes(bytes));
    void* const buffer = data == nullptr ? nullptr : data[0];
    if (buffer == nullptr && bytes > 0) return missing("data");
    OpenComm* open = nullptr;
    RecvComm* comm = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(comm_of_kind(recv_comm, "recvComm", &open, &comm));
    auto* const registration = mhandles == nullptr ? nullptr : static_cast<MemoryRegistration*>(mhandles[0]);
    Request* posted = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(comm->irecv(buffer, static_cast<std::size_t>(bytes), registration, &posted));
    if (posted == nullptr) return Status::ok();
    *request = handle_of(posted, open->epoch);
    if (comm->is_traced() && phandles != nullptr) trace_origin(comm, open->owner, *posted, phandles[0]);
    return Status::ok();
  });
}

nccl::Result iflush(void** request) {
  return guarded("iflush", [&] {
    if (request != nullptr) *request = nullptr;
    // NCCL flushes what a NIC wrote into GPU memory, which the properties rule out.
    return Status::internal_error("there is nothing to flush: Bagua-Net receives into host memory only");
  });
}

nccl::Result test(void* request, int* done, int* sizes) {
  return guarded("test", [&] {
    if (done == nullptr) return missing("done");
    *done = 0;
    if (request == nullptr) return missing("request");
    if (!is_of_epoch(request, current_epoch.load(std::memory_order_acquire))) {
      return Status::internal_error(
          "the request belongs to the parent process or to a communicator that was finalized");
    }
    bool is_done = false;
    std::size_t bytes = 0;
    BAGUA_NET_RETURN_IF_ERROR(address_in<Request>(request)->test(&is_done, &bytes));
    if (!is_done) return Status::ok();
    *done = 1;
    if (sizes != nullptr) sizes[0] = static_cast<int>(bytes);  // at most 2^30, see kMaxMessageBytes
    return Status::ok();
  });
}

}  // namespace bagua_net::abi
