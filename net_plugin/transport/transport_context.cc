#include "transport/transport_context.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/log_sink.h"
#include "os/cpu_budget.h"
#include "os/launcher.h"
#include "transport/stream/worker_pool.h"
#include "wire/sealed_handshake.h"

namespace bagua_net {
namespace {

HandshakeSettings handshake_settings(const PluginConfig& config, int workers) {
  HandshakeSettings settings;
  settings.tcp.buffer_bytes = config.socket_buffer_bytes;
  settings.tcp.keepalive_s = config.keepalive_s;
  settings.tcp.congestion_control = config.congestion_control;
  settings.tcp.zero_copy = config.msg_zerocopy;
  settings.streams = config.streams;
  settings.recovery = config.recovery;
  settings.checksums = config.checksum;
  settings.encrypts = config.encryption != Encryption::kOff;
  settings.uses_aes = cpu_has_aes() && config.encryption != Encryption::kChaCha20;
  settings.has_workers = workers > 0;
  settings.max_chunk_bytes = static_cast<std::uint32_t>(config.max_chunk_bytes);
  settings.connect_timeout_ms = config.connect_timeout_ms;
  settings.handshake_timeout_ms = config.handshake_timeout_ms;
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  settings.host_name = name;
  settings.process_id = static_cast<std::uint64_t>(::getpid());
  const int local_rank = job_position(process_environment()).local_rank;
  settings.paths =
      std::make_shared<PathStates>(local_rank >= 0 ? static_cast<std::size_t>(local_rank) : settings.process_id);
  return settings;
}

// Hundreds of comms with several sockets each pass the usual soft limit of 1024. Raising it needs no privilege.
void raise_open_file_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

int workers_between_hosts(const PluginConfig& config, const HandshakeSettings& settings,
                          const std::vector<Device>& devices, const CpuBudget& budget) {
  if (config.workers) return *config.workers;
  int fastest = 0;
  bool joins = false;
  for (const Device& device : devices) {
    fastest = std::max(fastest, device.nic_mbps());
    joins |= device.interfaces.size() > 1;
  }
  // The peers' CPUs are taken to be as this one.
  const Cipher cipher = settings.encrypts ? choose_cipher(settings.uses_aes, true) : Cipher::kNone;
  return network_workers(fastest, cipher, budget.share(), joins);
}

// Each once, though it may be several devices. A loopback interface never goes away.
std::vector<NetworkInterface> watched_interfaces(const std::vector<Device>& devices) {
  std::vector<NetworkInterface> watched;
  for (const Device& device : devices) {
    for (const NetworkInterface& interface : device.interfaces) {
      const auto is_same = [&](const NetworkInterface& one) { return one.name == interface.name; };
      if (interface.is_loopback || std::any_of(watched.begin(), watched.end(), is_same)) continue;
      watched.push_back(interface);
    }
  }
  return watched;
}

}  // namespace

Status TransportContext::create(const PluginConfig& config, const std::vector<Device>& devices,
                                std::unique_ptr<TransportContext>* context, std::shared_ptr<Trace> trace) {
  if (devices.empty()) return Status::invalid_argument("no network device to use");
  std::shared_ptr<const JobSecret> secret;
  if (!config.secret_file.empty()) BAGUA_NET_RETURN_IF_ERROR(JobSecret::read(config.secret_file, &secret));
  raise_open_file_limit();
  const CpuBudget budget = measure_cpu_budget(process_environment());
  context->reset(new TransportContext(config, devices, budget, std::move(secret), std::move(trace)));
  return Status::ok();
}

TransportContext::TransportContext(const PluginConfig& config, const std::vector<Device>& devices,
                                   const CpuBudget& budget, std::shared_ptr<const JobSecret> secret,
                                   std::shared_ptr<Trace> trace)
    : config_(config),
      devices_(devices),
      settings_(handshake_settings(config, config.workers.value_or(default_worker_count(budget)))),
      faults_(FaultInjector::create(config.faults)),
      stalls_(config.stall_s * 1000, job_position(process_environment()).rank),
      pool_(config.workers.value_or(default_worker_count(budget)), config.spin_us, budget.cpus,
            workers_between_hosts(config, settings_, devices, budget),
            {watched_interfaces(devices),
             [this](const NetworkInterface& interface, LinkState state) { on_link_state(interface, state); },
             [paths = settings_.paths] { paths->look_at_routes(); }}),
      stats_(std::make_shared<StatsPage>(config.stats, job_position(process_environment()), settings_.host_name,
                                         pool_.size(), watched_interfaces(devices))),
      trace_(std::move(trace)),
      link_track_(trace_ == nullptr ? 0 : trace_->add_tracks(Trace::TrackKind::kNetwork, "network interfaces")) {
  settings_.secret = std::move(secret);
  settings_.optional = &optional_;
  settings_.stalls = stalls();
  if (!stats_->failure().empty()) {
    BAGUA_NET_INFO("`bagua-net stats` cannot show this process: " + stats_->failure());
  }
}

TransportContext::~TransportContext() {
  // Before the pool: each takes its streams away from the workers.
  for (auto& [comm, owned] : comms_) pool_.close(std::move(owned));
  comms_.clear();
  pool_.wait_until_closed();
  service_.reset();
  pool_.stop();
}

void TransportContext::on_link_state(const NetworkInterface& interface, LinkState state) {
  settings_.paths->set_link(interface, state == LinkState::kUsable);
  if (stats_->set_link_state(interface.name, state) && trace_ != nullptr) {
    trace_->note(link_track_, describe(state, interface), "");
  }
}

Status TransportContext::service(ConnectionService** service) {
  if (service_ != nullptr && !service_->resume()) service_.reset();
  if (service_ == nullptr) {
    auto started = std::make_unique<ConnectionService>(settings_);
    BAGUA_NET_RETURN_IF_ERROR(started->start());
    service_ = std::move(started);
  }
  *service = service_.get();
  return Status::ok();
}

Status TransportContext::find_device(int number, std::shared_ptr<const Device>* device) const {
  *device = devices_.at(number);
  if (*device != nullptr) return Status::ok();
  return Status::invalid_argument("device " + std::to_string(number) + " does not exist: there are devices 0 to " +
                                  std::to_string(devices_.count() - 1));
}

CommStats TransportContext::comm_stats(CommDirection direction, const Device& device,
                                       const EstablishedConnection& connection) const {
  return CommStats(stats_, {direction, connection.same_host, device.name, connection.peer}, trace_);
}

Status TransportContext::listen(int device, std::uint8_t* handle, ListenComm** listen_comm) {
  *listen_comm = nullptr;
  std::shared_ptr<const Device> found;
  BAGUA_NET_RETURN_IF_ERROR(find_device(device, &found));
  const MutexLock lock(mutex_);
  ConnectionService* connections = nullptr;
  BAGUA_NET_RETURN_IF_ERROR(service(&connections));
  auto created = std::make_unique<ListenComm>();
  created->device = device;
  BAGUA_NET_RETURN_IF_ERROR(connections->listen(found->interfaces, handle, &created->id));
  *listen_comm = created.get();
  listen_comms_.emplace(*listen_comm, std::move(created));
  return Status::ok();
}

Status TransportContext::connect(int device, std::uint8_t* handle, SendComm** comm) {
  *comm = nullptr;
  std::shared_ptr<const Device> found;
  BAGUA_NET_RETURN_IF_ERROR(find_device(device, &found));
  const MutexLock lock(mutex_);
  ConnectionService* connections = nullptr;
  BAGUA_NET_RETURN_IF_ERROR(service(&connections));
  bool ready = false;
  EstablishedConnection connection;
  BAGUA_NET_RETURN_IF_ERROR(connections->connect(found->interfaces, handle, &ready, &connection));
  if (!ready) return Status::ok();
  SendPolicy policy = send_policy(*found, connection);
  std::unique_ptr<SendComm> created;
  CommStats stats = comm_stats(CommDirection::kSend, *found, connection);
  connection.peer += " over " + found->nic_name();
  BAGUA_NET_RETURN_IF_ERROR(
      SendComm::create(std::move(connection), std::move(policy), &pool_, &created, std::move(stats)));
  *comm = created.get();
  comms_.emplace(*comm, std::move(created));
  return Status::ok();
}

SendPolicy TransportContext::send_policy(const Device& device, const EstablishedConnection& connection) {
  constexpr double kBytesPerNs = 1.25e-4;  // of 1 Mb/s
  SendPolicy policy;
  policy.inline_bytes = static_cast<std::size_t>(config_.inline_bytes);
  policy.measures_rates = !connection.same_host;
  policy.min_chunk_bytes = static_cast<std::size_t>(config_.min_chunk_bytes) * (connection.same_host ? 2 : 1);
  policy.max_silence_s = config_.keepalive_s;
  policy.faults = faults_.get();
  policy.stalls = stalls();
  policy.path_states = settings_.paths;
  const std::vector<NicPath>& paths = connection.ticket.paths;
  for (std::size_t path = 0; paths.size() > 1 && path < paths.size(); ++path) {
    policy.path_loads.push_back(settings_.paths->load(paths[path], kBytesPerNs * paths[path].interface.speed_mbps));
  }
  const bool is_wanted = connection.same_host ? config_.zero_copy : config_.msg_zerocopy;
  policy.zero_copy = is_wanted && connection.acknowledges && !settings_.encrypts;
  if (connection.recovers) {
    const auto ticket_for = [ticket = connection.ticket, timeout_ms = config_.keepalive_s == 0
                                                                          ? std::numeric_limits<int>::max()
                                                                          : config_.keepalive_s * 1000](
                                Joining joining, std::size_t first_path) {
      JoinTicket replacing = ticket;
      replacing.timeout_ms = timeout_ms;
      replacing.first_path = first_path;
      replacing.hello.stream_index = joining == Joining::kReplacesFirst ? kReplacingFirstStream : kReplacingStream;
      return replacing;
    };
    policy.replace_stream = [service = service_.get(), arrivals = connection.arrivals, ticket_for](
                                Joining joining, std::size_t first_path) {
      service->join(ticket_for(joining, first_path), 1, arrivals);
    };
    policy.prepare_stream = [service = service_.get(), arrivals = connection.arrivals, ticket_for](std::size_t place,
                                                                                                   std::size_t path) {
      return service->prepare(ticket_for(joining_at(place), path), place, arrivals);
    };
  }
  if (!connection.may_grow) return policy;
  const int first = first_auto_streams(settings_.has_workers, paths.size(), connection.is_long);
  policy.growth =
      &growth_.try_emplace(std::pair(device.nic_name(), first), first, kMaxAutoStreams, kBytesPerNs * device.nic_mbps())
           .first->second;
  policy.most_streams = connection.most_streams;
  policy.optional = connection.optional;
  // The service runs as long as any comm is open.
  policy.open_streams = [service = service_.get(), ticket = connection.ticket,
                         arrivals = connection.arrivals](int count) { service->join(ticket, count, arrivals); };
  return policy;
}

Status TransportContext::accept(ListenComm* listen_comm, RecvComm** comm) {
  *comm = nullptr;
  const MutexLock lock(mutex_);
  ConnectionService* connections = nullptr;
  BAGUA_NET_RETURN_IF_ERROR(service(&connections));
  bool ready = false;
  EstablishedConnection connection;
  BAGUA_NET_RETURN_IF_ERROR(connections->accept(listen_comm->id, &ready, &connection));
  if (!ready) return Status::ok();
  std::unique_ptr<RecvComm> created;
  const std::shared_ptr<const Device> device = devices_.at(listen_comm->device);
  CommStats stats = comm_stats(CommDirection::kReceive, *device, connection);
  connection.peer += " over " + device->nic_name();
  RecvPolicy policy;
  policy.inline_bytes = static_cast<std::size_t>(config_.inline_bytes);
  policy.max_silence_s = config_.keepalive_s;
  policy.path_states = settings_.paths;
  policy.faults = faults_.get();
  policy.stalls = stalls();
  BAGUA_NET_RETURN_IF_ERROR(
      RecvComm::create(std::move(connection), std::move(policy), &pool_, &created, std::move(stats)));
  *comm = created.get();
  comms_.emplace(*comm, std::move(created));
  return Status::ok();
}

void TransportContext::close(ListenComm* listen_comm) {
  {
    const MutexLock lock(mutex_);
    if (service_ != nullptr) service_->stop_listening(listen_comm->id);
    listen_comms_.erase(listen_comm);
  }
  rest_if_idle();
}

// The comm is closed without the mutex, because that may wait for a peer.
void TransportContext::close(Comm* comm) {
  std::unique_ptr<Comm> closing;
  {
    const MutexLock lock(mutex_);
    const auto found = comms_.find(comm);
    if (found == comms_.end()) return;
    closing = std::move(found->second);
    comms_.erase(found);
    ++closing_;
  }
  pool_.close(std::move(closing));
  {
    const MutexLock lock(mutex_);
    --closing_;
  }
  rest_if_idle();
}

void TransportContext::rest_if_idle() {
  MutexLock lock(mutex_);
  while (is_idle() && pool_.is_closing()) {
    ++closing_;  // so that the threads are kept
    lock.unlock();
    pool_.wait_until_closed();
    lock.lock();
    --closing_;
  }
  if (!is_idle()) return;  // another thread has opened or is closing something, and calls this function, too
  pool_.stop();
  if (service_ == nullptr) return;
  if (service_->is_idle()) {
    service_.reset();
  } else {
    service_->rest();
  }
}

}  // namespace bagua_net
