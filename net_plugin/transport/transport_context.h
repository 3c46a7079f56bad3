// TransportContext: owns everything that lives while a process uses the plugin: listening sockets, handshakes, worker
// pool, comms. These and the comms' own functions are all that `abi` calls; they know no NCCL type. Every one may be
// called from any thread; calls on one comm come from one thread at a time. None blocks on the peer, but closing the
// last comm: it waits until all that were closed before have delivered what they sent, 0.7 s at most.
//
// Threads run only while something is open: they start with the first listen or connect and are joined when the last
// comm is closed, so that no thread is left if NCCL's table has no finalize. NCCL does not say when it drops a connect:
// then they end when that has timed out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "config/plugin_config.h"
#include "os/cpu_budget.h"
#include "stats/stall_report.h"
#include "stats/stats_page.h"
#include "trace/trace.h"
#include "transport/chunks/request.h"
#include "transport/comm/comm.h"
#include "transport/comm/recv_comm.h"
#include "transport/comm/send_comm.h"
#include "transport/connect/connection_service.h"
#include "transport/device.h"
#include "transport/stream/worker_pool.h"
#include "transport/tuning/stream_growth.h"
#include "wire/connect_handle.h"

namespace bagua_net {

// ListenComm: one listen(), which yields one connection. Its state lives in the connection service, under the id.
struct ListenComm {
  RandomId id{};
  int device = 0;
};

constexpr std::size_t kHandleBytes = kConnectHandleBytes;  // NCCL_NET_HANDLE_MAXSIZE from 2.12 on
constexpr std::size_t kMaxMessageBytes = 1u << 30;         // what every NCCL version can ask for; abi checks it

class TransportContext {
 public:
  // trace: where it records what it does; nullptr: nowhere.
  static Status create(const PluginConfig& config, const std::vector<Device>& devices,
                       std::unique_ptr<TransportContext>* context, std::shared_ptr<Trace> trace = nullptr);
  ~TransportContext();  // closes all that is open, and joins all threads

  DeviceList& devices() { return devices_; }
  int worker_count() const { return pool_.size(); }
  const StatsPage& stats() const { return *stats_; }
  const FaultInjector* faults() const { return faults_.get(); }  // nullptr: none are asked for

  // Fills handle[kHandleBytes]. The listen comm yields one connection.
  Status listen(int device, std::uint8_t* handle, ListenComm** listen_comm);
  // *comm == nullptr: not yet, call again with the same handle buffer (state is kept in it).
  Status connect(int device, std::uint8_t* handle, SendComm** comm);
  Status accept(ListenComm* listen_comm, RecvComm** comm);

  void close(ListenComm* listen_comm);
  void close(Comm* comm);

 private:
  TransportContext(const PluginConfig& config, const std::vector<Device>& devices, const CpuBudget& budget,
                   std::shared_ptr<const JobSecret> secret, std::shared_ptr<Trace> trace);

  void on_link_state(const NetworkInterface& interface, LinkState state);
  // The running connection service, started if need be.
  Status service(ConnectionService** service) REQUIRES(mutex_);
  Status find_device(int number, std::shared_ptr<const Device>* device) const;
  CommStats comm_stats(CommDirection direction, const Device& device, const EstablishedConnection& connection) const;
  // How a send comm over this connection sends.
  SendPolicy send_policy(const Device& device, const EstablishedConnection& connection) REQUIRES(mutex_);
  StallReport* stalls() { return stalls_.after_ms() > 0 ? &stalls_ : nullptr; }
  bool is_idle() const REQUIRES(mutex_) { return comms_.empty() && listen_comms_.empty() && closing_ == 0; }
  // Ends the threads if nothing is open any more.
  void rest_if_idle() EXCLUDES(mutex_);

  const PluginConfig config_;
  DeviceList devices_;
  OptionalConnections optional_;  // outlives the comms and the service
  HandshakeSettings settings_;
  const std::unique_ptr<FaultInjector> faults_;  // outlives the comms; nullptr: none are asked for
  StallReport stalls_;                           // outlives the comms
  WorkerPool pool_;
  const std::shared_ptr<StatsPage> stats_;
  const std::shared_ptr<Trace> trace_;
  const std::uint32_t link_track_;  // of the trace
  Mutex mutex_;
  std::unique_ptr<ConnectionService> service_ GUARDED_BY(mutex_);
  // By interfaces and the number of streams that a comm begins with; outlives the comms.
  std::map<std::pair<std::string, int>, StreamGrowth> growth_ GUARDED_BY(mutex_);
  std::map<ListenComm*, std::unique_ptr<ListenComm>> listen_comms_ GUARDED_BY(mutex_);
  std::map<Comm*, std::unique_ptr<Comm>> comms_ GUARDED_BY(mutex_);
  int closing_ GUARDED_BY(mutex_) = 0;  // calls that close a comm, in mid-course
};

}  // namespace bagua_net
