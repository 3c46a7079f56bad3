#include "abi/process_instance.h"

#include <pthread.h>
#include <strings.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include "abi/nccl_log.h"
#include "base/log_sink.h"
#include "base/owned_fd.h"
#include "base/version.h"
#include "os/launcher.h"
#include "os/network_interface.h"
#include "os/sysfs.h"
#include "transport/device.h"

namespace bagua_net::abi {
namespace {

// Reads one switch on its own, so that it counts even where another knob is wrong.
bool read_switch(const EnvironmentReader& environment, const char* wanted, bool PluginConfig::* member,
                 bool if_unreadable) {
  const auto only = [&](const std::string& name) {
    return name == wanted ? environment(name) : std::optional<std::string>();
  };
  PluginConfig config;
  return parse_plugin_config(only, &config).is_ok() ? config.*member : if_unreadable;
}

// The setting because of which the job must not go on without us; nullptr: none. An unreadable value counts: the user
// then gets the error instead of a silent fallback.
const char* demanded_by(const EnvironmentReader& environment) {
  if (read_switch(environment, "BAGUA_NET_REQUIRED", &PluginConfig::required, true)) return "BAGUA_NET_REQUIRED";
  return protection_asked_for(environment);
}

bool nccl_accepts_only_us(const EnvironmentReader& environment) {
  const std::optional<std::string> chosen = environment("NCCL_NET");
  return chosen && strcasecmp(chosen->c_str(), kPluginName) == 0;
}

std::string speed_text(int mbps) {
  if (mbps <= 0) return "speed unknown";
  if (mbps % 1000 == 0) return std::to_string(mbps / 1000) + " Gb/s";
  return std::to_string(mbps) + " Mb/s";
}

Status start(const EnvironmentReader& environment, const std::shared_ptr<Trace>& trace, Startup* startup) {
  PluginConfig config;
  BAGUA_NET_RETURN_IF_ERROR(parse_plugin_config(environment, &config));
  std::vector<InterfaceChoice> choices;
  BAGUA_NET_RETURN_IF_ERROR(choose_network_interfaces(environment, &choices));
  std::string names;
  for (const InterfaceChoice& choice : choices) {
    if (!choice.used) continue;
    const NetworkInterface& used = choice.interface;
    names +=
        (names.empty() ? "" : ", ") + used.name + " (" + used.address.host() + ", " + speed_text(used.speed_mbps) + ")";
  }
  std::vector<NicGroup> groups;
  std::vector<std::string> lost;
  BAGUA_NET_RETURN_IF_ERROR(group_interfaces(config.join_nics, choices, environment, &groups, &lost));
  for (const std::string& line : lost) BAGUA_NET_WARN("Bagua-Net: " + line);
  const std::vector<Device> devices = make_devices(groups, config.rails);
  if (devices.empty()) return Status::internal_error("no network device was made of the interfaces " + names);
  const std::size_t device_count = devices.size();
  std::string joined;
  for (const Device& device : devices) {
    if (device.interfaces.size() > 1 && device.name == device.nic_name()) joined += ", joined " + device.name;
  }
  BAGUA_NET_RETURN_IF_ERROR(TransportContext::create(config, devices, &startup->transport, trace));
  startup->summary = "interfaces " + names + joined + ", streams " +
                     (config.streams ? std::to_string(*config.streams) : "auto") + ", workers " +
                     std::to_string(startup->transport->worker_count()) + ", devices " + std::to_string(device_count);
  return Status::ok();
}

}  // namespace

std::shared_ptr<Trace> start_trace(const EnvironmentReader& environment) {
  PluginConfig config;
  // Whether the settings are right is for start_transport() to say.
  if (!parse_plugin_config(environment, &config).is_ok() || !config.enabled || config.trace.empty()) return nullptr;
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  std::unique_ptr<Trace> trace;
  const Status status = Trace::open(config.trace, {job_position(environment).rank, host, ::getpid()}, {}, &trace);
  if (status.is_ok()) {
    BAGUA_NET_INFO("Bagua-Net writes a trace to " + trace->path());
    return trace;
  }
  BAGUA_NET_WARN(
      "BAGUA_NET_TRACE=" + config.trace + ": " + status.message() +
      "\nThis process runs without a trace.\nName a file in a folder that exists and can be written to, such as "
      "/tmp/trace.json.");
  return nullptr;
}

Startup start_transport(const EnvironmentReader& environment, const std::shared_ptr<Trace>& trace) {
  Startup startup;
  if (!read_switch(environment, "ENABLE_BAGUA_NET", &PluginConfig::enabled, true)) {
    startup.outcome = Startup::Outcome::kDeclined;
    return startup;
  }
  const char* const demanding = demanded_by(environment);
  startup.demanded = demanding != nullptr;
  startup.failure = start(environment, trace, &startup);
  if (startup.failure.is_ok()) {
    startup.outcome = Startup::Outcome::kStarted;
  } else if (demanding != nullptr && !nccl_accepts_only_us(environment)) {
    startup.outcome = Startup::Outcome::kRefusing;
    startup.failure = startup.failure.with_context(std::string(demanding) + " is set and Bagua-Net cannot start");
  } else {
    startup.failure = startup.failure.with_context("Bagua-Net cannot start");
  }
  return startup;
}

std::atomic<std::uint64_t> current_epoch{0};

namespace {

std::atomic<ProcessInstance*> instance{nullptr};
std::atomic<std::uint64_t> last_epoch{0};  // never reused, so that a child's comms differ from its parent's

// In the child, before fork returns there. Only stores and system calls: other threads' locks may be held indefinitely
// in this copy.
void abandon_parents_instance() {
  close_uninherited();
  current_epoch.store(0, std::memory_order_release);
  instance.store(nullptr, std::memory_order_release);
}

void log_active(int table_version, const Startup& startup) {
  BAGUA_NET_INFO(std::string(active_banner()) + ": table v" + std::to_string(table_version) + ", " + startup.summary);
  // Every rank of a host has the same settings and devices.
  if (!job_position(process_environment()).is_first_of_its_host()) return;
  for (const std::string& warning : unknown_knob_warnings()) BAGUA_NET_WARN(warning);
  // Whoever demands us has decided.
  const std::string question = startup.demanded ? "" : rdma_question(process_environment(), "/sys");
  // Not to NCCL's log, which shows nothing unless NCCL_DEBUG is set, and whose last warning is given as the reason of
  // an error that comes later.
  if (!question.empty()) std::fprintf(stderr, "Bagua-Net: %s\n", question.c_str());
}

void log_trace(const Trace& trace) {
  const std::string what = "trace " + trace.path() + ": " + std::to_string(trace.written_events()) + " events";
  if (trace.dropped_events() == 0) {
    BAGUA_NET_INFO(what);
  } else {
    BAGUA_NET_WARN(what + ", and " + std::to_string(trace.dropped_events()) +
                   " were dropped: the disk is slower than the events come. Write to a faster one");
  }
}

// What a plugin that refuses to work shows, so that NCCL takes it (see [Note: BAGUA_NET_REQUIRED]).
Device placeholder_device() {
  Device device;
  device.name = "bagua-net-cannot-start";
  return device;
}

}  // namespace

ProcessInstance::ProcessInstance() : placeholder_devices_({placeholder_device()}) {}

ProcessInstance& ProcessInstance::get() {
  static std::once_flag registered;
  std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, &abandon_parents_instance); });
  ProcessInstance* present = instance.load(std::memory_order_acquire);
  if (present != nullptr) return *present;
  auto created = std::unique_ptr<ProcessInstance>(new ProcessInstance);
  if (!instance.compare_exchange_strong(present, created.get(), std::memory_order_acq_rel)) return *present;
  return *created.release();
}

Status ProcessInstance::init(int table_version, std::uint64_t communicator_id, nccl::ProfilerCallback* callback,
                             Communicator** communicator, bool* declined) {
  *declined = false;
  if (communicator != nullptr) *communicator = nullptr;
  const MutexLock lock(mutex_);
  if (transport_ == nullptr && refusal_.is_ok()) {
    open_trace();
    Startup startup = start_transport(process_environment(), trace_);
    switch (startup.outcome) {
      case Startup::Outcome::kStarted:
        transport_ = std::move(startup.transport);
        transport_->devices().restore(joins_);
        current_epoch.store(last_epoch.fetch_add(1) + 1, std::memory_order_release);
        if (!std::exchange(announced_, true)) log_active(table_version, startup);
        break;
      case Startup::Outcome::kRefusing:
        refusal_ = startup.failure;
        BAGUA_NET_WARN(refusal_.message());
        break;
      case Startup::Outcome::kDeclined: *declined = true; return Status::ok();
      case Startup::Outcome::kFailed: return startup.failure;
    }
  }
  if (communicator == nullptr) {
    profiler_callback_.store(callback, std::memory_order_release);
    has_user_without_finalize_ = true;
    return Status::ok();
  }
  auto created = std::make_unique<Communicator>(Communicator{communicator_id, callback});
  *communicator = created.get();
  communicators_.emplace(*communicator, std::move(created));
  return Status::ok();
}

void ProcessInstance::finalize(Communicator* communicator) {
  {
    const MutexLock lock(mutex_);
    if (communicators_.count(communicator) == 0) return;
  }
  // NCCL leaves listen comms and comms of an aborted communicator behind.
  std::vector<std::unique_ptr<OpenComm>> left_open;
  {
    const MutexLock comms_lock(comms_mutex_);
    for (auto entry = comms_.begin(); entry != comms_.end();) {
      if (entry->first->owner != communicator) {
        ++entry;
        continue;
      }
      left_open.push_back(std::move(entry->second));
      entry = comms_.erase(entry);
    }
  }
  // Without the mutex, since that may wait for the peers. The transport stays as long as it has the communicator.
  for (const auto& open : left_open) close_in_transport(*open);

  const MutexLock lock(mutex_);
  if (communicators_.erase(communicator) == 0) return;
  if (!communicators_.empty() || has_user_without_finalize_) return;
  current_epoch.store(0, std::memory_order_release);
  if (transport_ != nullptr) joins_ = transport_->devices().joins();
  transport_.reset();
  refusal_ = Status::ok();
  if (trace_ != nullptr) {
    trace_->flush();
    log_trace(*trace_);
  }
}

Profiler* ProcessInstance::start_profiler() {
  const MutexLock lock(mutex_);
  open_trace();
  if (trace_ != nullptr && owned_profiler_ == nullptr) {
    owned_profiler_ = std::make_unique<Profiler>(trace_);
    profiler_.store(owned_profiler_.get(), std::memory_order_release);
  }
  return owned_profiler_.get();
}

void ProcessInstance::open_trace() {
  if (std::exchange(asked_for_trace_, true)) return;
  trace_ = start_trace(process_environment());
  if (trace_ == nullptr) return;
  // Whoever still records then finds it closed: NCCL's threads may run on. It is never replaced, and the mutex may be
  // theirs.
  std::atexit([]() NO_THREAD_SAFETY_ANALYSIS {
    ProcessInstance* const present = instance.load(std::memory_order_acquire);
    if (present != nullptr && present->trace_ != nullptr) present->trace_->close();
  });
}

Status ProcessInstance::startup_failure() const {
  if (!refusal_.is_ok()) return refusal_;
  return Status::internal_error(std::string(kPluginName) +
                                " is not initialised in this process: init failed, every communicator was finalized, "
                                "or this is a forked child using its parent's communicator");
}

Status ProcessInstance::transport(TransportContext** transport) {
  const MutexLock lock(mutex_);
  if (transport_ == nullptr) return startup_failure();
  *transport = transport_.get();
  return Status::ok();
}

Status ProcessInstance::devices(DeviceList** devices) {
  const MutexLock lock(mutex_);
  if (transport_ == nullptr && refusal_.is_ok()) return startup_failure();
  *devices = transport_ != nullptr ? &transport_->devices() : &placeholder_devices_;
  return Status::ok();
}

void* ProcessInstance::add_comm(TransportContext* transport, AnyComm comm, const Communicator* owner) {
  auto open =
      std::make_unique<OpenComm>(OpenComm{current_epoch.load(std::memory_order_acquire), transport, comm, owner});
  const MutexLock lock(comms_mutex_);
  OpenComm* const added = open.get();
  comms_.emplace(added, std::move(open));
  return handle_of(added, added->epoch);
}

ProcessInstance::OpenComms::iterator ProcessInstance::entry_of(void* comm) {
  const auto entry = comms_.find(address_in<OpenComm>(comm));
  // Another may live at that address meanwhile.
  return entry == comms_.end() || is_of_epoch(comm, entry->first->epoch) ? entry : comms_.end();
}

Status ProcessInstance::find_comm(void* comm, OpenComm** open) {
  const MutexLock lock(comms_mutex_);
  const auto entry = entry_of(comm);
  if (entry == comms_.end()) {
    return Status::invalid_argument(
        "this process has no such comm: it was closed, or opened before a fork or by a communicator that was "
        "finalized");
  }
  *open = entry->first;
  return Status::ok();
}

void ProcessInstance::close(void* comm) {
  std::unique_ptr<OpenComm> open;
  {
    const MutexLock lock(comms_mutex_);
    const auto entry = entry_of(comm);
    if (entry == comms_.end()) return;
    open = std::move(entry->second);
    comms_.erase(entry);
  }
  close_in_transport(*open);
}

void ProcessInstance::close_in_transport(const OpenComm& open) {
  if (open.epoch != current_epoch.load(std::memory_order_acquire)) return;  // went with its transport
  std::visit([&open](auto* comm) { open.transport->close(comm); }, open.comm);
}

char* ProcessInstance::interned(const std::string& text) {
  const MutexLock lock(mutex_);
  // NCCL's structure says char*, and nobody writes.
  return const_cast<char*>(interned_.insert(text).first->c_str());
}

}  // namespace bagua_net::abi
