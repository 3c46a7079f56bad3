// TransportChoice: which transport a mode of the driver uses, from the command line to the open transport.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "bench/command_line.h"
#include "bench/plugin_transport.h"
#include "bench/ring_transport.h"
#include "os/socket_address.h"

namespace bagua_net::bench {

struct TransportChoice {
  std::string name;  // "plugin" or "bare"
  PluginOptions plugin;
  SocketAddress address;  // of bare; with a port, each channel takes one from there on
};

// The options that parse_transport_choice reads.
const std::vector<std::string>& transport_option_names();
Status parse_transport_choice(const CommandLine& line, TransportChoice* choice);

// `channels`: how many connections there will be each way.
Status open_transport(const TransportChoice& choice, int channels, std::unique_ptr<RingTransport>* transport);

}  // namespace bagua_net::bench
