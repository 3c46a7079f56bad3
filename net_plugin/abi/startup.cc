#include "abi/startup.h"

#include <strings.h>
#include <unistd.h>

#include <optional>
#include <vector>

#include "abi/plugin_name.h"
#include "base/log_sink.h"
#include "os/launcher.h"
#include "os/network_interface.h"
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

}  // namespace bagua_net::abi
