// bagua.net._core: what Python reads of the compiled library: version, knob table, interfaces, CPU budget. Typed in
// bagua/net/_core.pyi. Functions of their arguments and of the machine; the module keeps no state. They take the
// environment as a dict, so that the doctor can ask about an environment other than its own.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/version.h"
#include "config/plugin_config.h"
#include "crypto/job_secret.h"
#include "os/cpu_budget.h"
#include "os/launcher.h"
#include "os/network_interface.h"
#include "os/sysfs.h"
#include "stats/page_layout.h"
#include "transport/device.h"

namespace py = pybind11;
using namespace py::literals;  // _a

namespace bagua_net {
namespace {

using Environment = std::map<std::string, std::string>;

// Variables may hold any bytes; Python shows those that are not UTF-8 as surrogates (os.fsencode and os.fsdecode).
std::string bytes_of(py::handle text) {
  if (!PyUnicode_Check(text.ptr())) throw py::type_error("names and values of an environment are strings");
  const auto encoded = py::reinterpret_steal<py::bytes>(PyUnicode_EncodeFSDefault(text.ptr()));
  if (!encoded) throw py::error_already_set();
  return std::string(encoded);
}

py::str text_of(const std::string& bytes) {
  auto decoded = py::reinterpret_steal<py::str>(
      PyUnicode_DecodeFSDefaultAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size())));
  if (!decoded) throw py::error_already_set();
  return decoded;
}

// Any mapping: os.environ is no dict.
Environment environment_of(const py::object& mapping) {
  Environment environment;
  for (const auto& [name, value] : py::dict(mapping)) environment[bytes_of(name)] = bytes_of(value);
  return environment;
}

// Holds a copy: the reader is used without the GIL.
EnvironmentReader reader_of(Environment environment) {
  return [environment = std::move(environment)](const std::string& name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    if (found == environment.end()) return std::nullopt;
    return found->second;
  };
}

// A wrong setting is the user's ValueError, a failed system call a RuntimeError.
void raise_if_error(const Status& status) {
  PyObject* type = PyExc_RuntimeError;
  switch (status.code()) {
    case StatusCode::kOk: return;
    case StatusCode::kInvalidArgument:
    case StatusCode::kInvalidUsage: type = PyExc_ValueError; break;
    case StatusCode::kSystemError:
    case StatusCode::kInternalError:
    case StatusCode::kRemoteError:
    case StatusCode::kDamagedData: break;
  }
  PyErr_SetObject(type, text_of(status.message()).ptr());
  throw py::error_already_set();
}

py::list knobs() {
  py::list rows;
  for (const KnobDescription& knob : knob_descriptions()) {
    rows.append(py::dict("name"_a = knob.name, "type"_a = knob.type, "default_value"_a = knob.default_value,
                         "range"_a = knob.range, "unit"_a = knob.unit, "meaning"_a = knob.meaning));
  }
  return rows;
}

py::list retired() {
  py::list rows;
  for (const RetiredKnob& knob : retired_knobs()) {
    rows.append(py::dict("name"_a = knob.name, "replacement"_a = knob.replacement));
  }
  return rows;
}

py::list invalid_knobs(const py::object& environment) {
  PluginConfig ignored;
  py::list rows;
  for (const InvalidSetting& setting : read_plugin_config(reader_of(environment_of(environment)), &ignored)) {
    rows.append(py::make_tuple(text_of(setting.problem), text_of(setting.remedy)));
  }
  return rows;
}

void check_environment(const py::object& environment) {
  PluginConfig ignored;
  raise_if_error(parse_plugin_config(reader_of(environment_of(environment)), &ignored));
}

py::list unknown_knobs(const py::object& environment) {
  std::vector<std::string> names;  // sorted, as the map is
  for (const auto& variable : environment_of(environment)) names.push_back(variable.first);
  py::list warnings;
  for (const std::string& warning : unknown_knob_warnings(names)) warnings.append(text_of(warning));
  return warnings;
}

py::list interfaces(const py::object& environment) {
  const EnvironmentReader reader = reader_of(environment_of(environment));
  std::vector<InterfaceChoice> choices;
  Status status;
  {
    // sysfs, and a name lookup if NCCL_COMM_ID names a host: other Python threads go on.
    const py::gil_scoped_release unlocked;
    status = choose_network_interfaces(reader, &choices);
  }
  raise_if_error(status);
  py::list rows;
  for (const auto& [interface, used, reason] : choices) {
    const bool has_address = interface.address.family() != AF_UNSPEC;
    rows.append(py::dict("name"_a = interface.name, "address"_a = has_address ? interface.address.host() : "",
                         "speed_mbps"_a = interface.speed_mbps, "numa_node"_a = interface.numa_node,
                         "pci_path"_a = interface.pci_path, "loopback"_a = interface.is_loopback, "used"_a = used,
                         "reason"_a = text_of(reason)));
  }
  return rows;
}

std::vector<NicGroup> read_groups(const py::object& environment, PluginConfig* config, std::vector<std::string>* lost) {
  const EnvironmentReader reader = reader_of(environment_of(environment));
  read_plugin_config(reader, config);  // what is wrong in it is reported by invalid_knobs
  std::vector<InterfaceChoice> choices;
  std::vector<NicGroup> groups;
  Status status;
  {
    const py::gil_scoped_release unlocked;
    status = choose_network_interfaces(reader, &choices);
    if (status.is_ok()) status = group_interfaces(config->join_nics, choices, reader, &groups, lost);
  }
  raise_if_error(status);
  return groups;
}

py::dict nic_groups(const py::object& environment) {
  PluginConfig config;
  std::vector<std::string> lost;
  const std::vector<NicGroup> groups = read_groups(environment, &config, &lost);
  py::list rows;
  for (const NicGroup& group : groups) {
    py::list names;
    for (const NetworkInterface& interface : group) names.append(interface.name);
    rows.append(names);
  }
  py::list sentences;
  for (const std::string& sentence : lost) sentences.append(text_of(sentence));
  return py::dict("groups"_a = rows, "lost"_a = sentences);
}

py::dict nccl_joins(const py::object& environment, const std::vector<std::vector<std::string>>& wanted) {
  PluginConfig config;
  std::vector<std::string> ignored;
  const std::vector<Device> devices = make_devices(read_groups(environment, &config, &ignored), config.rails);
  DeviceList list(devices);
  py::list refusals;
  for (const std::vector<std::string>& names : wanted) {
    std::vector<int> numbers;
    for (const std::string& name : names) {
      const auto found =
          std::find_if(devices.begin(), devices.end(), [&](const Device& device) { return device.name == name; });
      numbers.push_back(static_cast<int>(found - devices.begin()));
    }
    int number = 0;
    refusals.append(text_of(list.join(numbers, &number).message()));
  }
  py::list names;
  for (const Device& device : devices) names.append(device.name);
  return py::dict("devices"_a = names, "refusals"_a = refusals);
}

py::dict page_layout() {
  const py::dict places(
      "version"_a = kPageVersion, "header_bytes"_a = sizeof(PageHeader), "comm_slots"_a = kCommSlots,
      "comm_bytes"_a = sizeof(CommSlot), "stream_slots"_a = kStreamSlots, "stream_bytes"_a = sizeof(StreamSlot),
      "closed_comms"_a = offsetof(PageHeader, closed_comms), "closed_streams"_a = offsetof(PageHeader, closed_streams),
      "nics"_a = offsetof(PageHeader, nics), "comm_counters"_a = offsetof(CommSlot, counters),
      "posted_ms"_a = offsetof(CommSlot, posted_ms), "stream_counters"_a = offsetof(StreamSlot, counters),
      "sample"_a = offsetof(StreamSlot, sampled_ms));
  using Row = std::tuple<const char*, std::size_t, const char*, const char*>;
#define BAGUA_NET_COUNTER_ROW(type, name, metric, help) Row{#name, sizeof(type) / sizeof(std::uint64_t), metric, help},
  return py::dict("places"_a = places,
                  "comm_counters"_a = std::vector<Row>{BAGUA_NET_COMM_COUNTERS(BAGUA_NET_COUNTER_ROW)},
                  "stream_counters"_a = std::vector<Row>{BAGUA_NET_STREAM_COUNTERS(BAGUA_NET_COUNTER_ROW)});
}

py::tuple job_position_of(const py::object& environment) {
  const JobPosition position = job_position(reader_of(environment_of(environment)));
  return py::make_tuple(position.rank, position.world_size, position.local_rank, position.local_world_size);
}

std::string secret_key_id(const py::str& file) {
  std::shared_ptr<const JobSecret> secret;
  const Status status = JobSecret::read(bytes_of(file), &secret);
  if (!status.is_ok()) throw py::value_error(status.message());
  return key_id_text(secret->id());
}

py::tuple rdma_ports_of(const py::object& environment, const py::str& sysfs_root) {
  const EnvironmentReader reader = reader_of(environment_of(environment));
  const std::string root = bytes_of(sysfs_root);
  std::vector<RdmaPort> ports;
  {
    const py::gil_scoped_release unlocked;
    ports = rdma_ports(reader, root);
  }
  py::list rows;
  for (const RdmaPort& port : ports) {
    rows.append(py::dict("name"_a = text_of(port.name), "state"_a = text_of(port.state), "link"_a = port.link,
                         "rate"_a = text_of(port.rate), "would_be_used"_a = port.would_be_used));
  }
  return py::make_tuple(rows, text_of(unused_rdma(ports)));
}

// The two below read the process environment with getenv: with the GIL, which Python holds when it changes it.
py::dict cpu_budget() {
  const CpuBudget budget = measure_cpu_budget(process_environment());
  return py::dict("usable_cpus"_a = budget.usable_cpus, "local_ranks"_a = budget.local_ranks);
}

int default_workers() { return default_worker_count(measure_cpu_budget(process_environment())); }

}  // namespace
}  // namespace bagua_net

PYBIND11_MODULE(_core, module) {
  module.doc() = "What Python reads of Bagua-Net's compiled library: version, knobs, interfaces, CPU budget.";
  module.def(
      "version", [] { return std::string(bagua_net::version()); },
      "The version of the compiled library, such as '1.0.0'.");
  module.def("knobs", &bagua_net::knobs, "Every knob, in the order of the documentation.");
  module.def("retired_knobs", &bagua_net::retired,
             "Variables of the original bagua-net that have no effect now, with what replaces each.");
  module.def("check_environment", &bagua_net::check_environment, py::arg("environment"),
             "Raises ValueError if a knob has a bad value. The message names every bad one, its value and its range.");
  module.def("invalid_knobs", &bagua_net::invalid_knobs, py::arg("environment"),
             "Every setting with a bad value: what is wrong with it, and what to do.");
  module.def("unknown_knobs", &bagua_net::unknown_knobs, py::arg("environment"),
             "A warning for each BAGUA_NET_* variable that is not a knob, with the name that was probably meant.");
  module.def(
      "secret_key_id", &bagua_net::secret_key_id, py::arg("file"),
      "Of the secret in a file, as 16 hexadecimal digits. Raises ValueError if the plugin would refuse the file.");
  module.def(
      "tuning_choice",
      [](const py::object& environment) {
        return bagua_net::tuning_choice(bagua_net::reader_of(bagua_net::environment_of(environment)));
      },
      py::arg("environment"),
      "The variable, with its value, with which the user has chosen what the plugin's tuner chooses otherwise; \"\": "
      "none.");
  module.def("interfaces", &bagua_net::interfaces, py::arg("environment"),
             "Every network interface, the used ones first, with the reason for each verdict. Raises ValueError, with "
             "the interfaces that exist, if none can be used or an NCCL variable has a bad value.");
  module.def("nic_groups", &bagua_net::nic_groups, py::arg("environment"),
             "The used interfaces, those that BAGUA_NET_JOIN_NICS joins in one group, and a sentence for each that it "
             "should have joined and did not. Raises ValueError if the host has no interface of a group.");
  module.def("nccl_joins", &bagua_net::nccl_joins, py::arg("environment"), py::arg("groups"),
             "The names of NCCL's devices, and of each group of them, why NCCL cannot join it; empty if it can. Raises "
             "ValueError where nic_groups does.");
  module.def(
      "rdma_ports", &bagua_net::rdma_ports_of, py::arg("environment"), py::arg("sysfs_root"),
      "Every RDMA port of this host, and whether NCCL's own transport would use it; and what there is to say of those "
      "that it would use, \"\": nothing.");
  module.def("page_layout", &bagua_net::page_layout,
             "The statistics page: its version, sizes and offsets in bytes; and of each counter, in the order of the "
             "page, name, 64-bit words, metric of the exporter and help.");
  module.def("job_position", &bagua_net::job_position_of, py::arg("environment"),
             "Rank, world size, local rank and local world size, as the launcher says; -1: none does.");
  module.def("cpu_budget", &bagua_net::cpu_budget,
             "CPUs that this process may use, and ranks of this host that share them.");
  module.def("default_workers", &bagua_net::default_workers,
             "I/O threads that BAGUA_NET_NWORKERS=auto means for this process.");
}
