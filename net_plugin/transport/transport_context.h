// TransportContext: owns everything that lives while a process uses the plugin: listening sockets, handshakes, worker
// pool, comms. The functions below are all that `abi` calls; they know no NCCL type. Every one may be called from any
// thread; calls on one comm come from one thread at a time. None blocks on the peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "config/plugin_config.h"
#include "transport/comm.h"
#include "transport/device.h"
#include "transport/request.h"

namespace bagua_net {

constexpr std::size_t kHandleBytes = 128;           // NCCL_NET_HANDLE_MAXSIZE from 2.12 on
constexpr std::size_t kMaxRequestsPerComm = 64;     // NCCL wants 32; more are answered with "later"
constexpr std::size_t kMaxMessageBytes = 1u << 30;  // what every NCCL version can ask for

class ListenComm;
class SendComm;
class RecvComm;

class TransportContext {
 public:
  static Status create(const PluginConfig& config, std::vector<Device> devices,
                       std::unique_ptr<TransportContext>* context);
  ~TransportContext();  // closes what was never closed, reaps half-open connects, joins all threads

  const std::vector<Device>& devices() const;

  // Fills handle[kHandleBytes]. The listen comm yields one connection.
  Status listen(int device, std::uint8_t* handle, ListenComm** listen_comm);
  // *comm == nullptr: not yet, call again with the same handle buffer (state is kept in it).
  Status connect(int device, std::uint8_t* handle, SendComm** comm);
  Status accept(ListenComm* listen_comm, RecvComm** comm);

  // *request == nullptr: no room now, call again. Sizes above kMaxMessageBytes are kInvalidArgument.
  Status isend(SendComm* comm, const void* data, std::size_t bytes, MemoryRegistration* registration,
               Request** request);
  Status irecv(RecvComm* comm, void* data, std::size_t bytes, MemoryRegistration* registration, Request** request);

  void close(ListenComm* listen_comm);
  void close(SendComm* comm);
  void close(RecvComm* comm);
};

}  // namespace bagua_net
