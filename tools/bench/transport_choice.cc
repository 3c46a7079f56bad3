#include "bench/transport_choice.h"

#include <utility>

#include "bench/bare_transport.h"
#include "bench/endpoint.h"

namespace bagua_net::bench {

const std::vector<std::string>& transport_option_names() {
  static const std::vector<std::string> names = {"--transport", "--library", "--table", "--device", "--address"};
  return names;
}

Status parse_transport_choice(const CommandLine& line, TransportChoice* choice) {
  BAGUA_NET_RETURN_IF_ERROR(line.choice("--transport", {"plugin", "bare"}, &choice->name));
  if (choice->name == "bare") {
    for (const char* name : {"--library", "--table", "--device"}) {
      if (line.has(name))
        return Status::invalid_argument(std::string(name) + " is an option of --transport plugin only");
    }
    return parse_endpoint("--address", line.text_or("--address", "127.0.0.1"), &choice->address);
  }

  if (line.has("--address")) {
    return Status::invalid_argument(
        "--address is an option of --transport bare only; the plugin's interfaces are chosen by NCCL_SOCKET_IFNAME");
  }
  BAGUA_NET_RETURN_IF_ERROR(line.text("--library", &choice->plugin.library_path));
  std::int64_t number = 0;
  if (const std::string table = line.text_or("--table", "auto"); table != "auto") {
    BAGUA_NET_RETURN_IF_ERROR(parse_integer("--table (if not auto)", table, kOldestTable, kNewestTable, &number));
    choice->plugin.table_version = static_cast<int>(number);
  }
  if (const std::string device = line.text_or("--device", "0"); device == "all") {
    choice->plugin.all_devices = true;
  } else {
    BAGUA_NET_RETURN_IF_ERROR(parse_integer("--device (if not all)", device, 0, 65535, &number));
    choice->plugin.device = static_cast<int>(number);
  }
  return Status::ok();
}

Status open_transport(const TransportChoice& choice, int channels, std::unique_ptr<RingTransport>* transport) {
  if (choice.name == "bare") {
    if (choice.address.port() + channels - 1 > 65535) {
      return Status::invalid_argument("--address has port " + std::to_string(choice.address.port()) + " and " +
                                      std::to_string(channels) +
                                      " channels need as many ports from there on: the last one is above 65535");
    }
    *transport = std::make_unique<BareTransport>(choice.address, channels);
    return Status::ok();
  }
  std::unique_ptr<PluginTransport> plugin;
  BAGUA_NET_RETURN_IF_ERROR(PluginTransport::create(choice.plugin, channels, &plugin));
  *transport = std::move(plugin);
  return Status::ok();
}

}  // namespace bagua_net::bench
