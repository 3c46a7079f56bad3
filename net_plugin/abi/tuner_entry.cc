#include "abi/tuner_entry.h"

#include <strings.h>

#include <memory>
#include <optional>
#include <string>

#include "abi/channel_policy.h"
#include "abi/nccl_log.h"
#include "abi/plugin_name.h"
#include "abi/process_instance.h"
#include "base/log_sink.h"
#include "config/plugin_config.h"

namespace bagua_net::abi::tuner {
namespace {

// One communicator that the policy applies to.
struct TunedCommunicator {
  std::size_t nodes;
  std::size_t ranks;
};

// With any of these the user has chosen the number of channels. The names in RINGS are NCCL's older ones.
constexpr const char* kChannelVariables[] = {"NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS",
                                             "NCCL_MAX_CTAS",      "NCCL_MIN_NRINGS",    "NCCL_MAX_NRINGS"};

// Why NCCL's own numbers stand; empty if the policy applies.
std::string reason_to_leave(std::size_t nodes, const EnvironmentReader& environment) {
  // NCCL finds the tuner in this library also where another network carries its messages.
  if (current_epoch.load(std::memory_order_acquire) == 0) return "Bagua-Net is not active";
  const std::optional<std::string> network = environment("NCCL_NET");
  if (network && !network->empty() && strcasecmp(network->c_str(), kPluginName) != 0) return "NCCL_NET=" + *network;
  for (const char* name : kChannelVariables) {
    const std::optional<std::string> value = environment(name);
    if (value && !value->empty()) return std::string(name) + "=" + *value;
  }
  PluginConfig config;
  if (!parse_plugin_config(environment, &config).is_ok()) return "the settings cannot be read";
  if (config.rails) return "BAGUA_NET_RAILS=" + std::to_string(*config.rails);
  if (nodes <= 2) return "nodes: " + std::to_string(nodes);
  return "";
}

}  // namespace

nccl::Result init(std::size_t ranks, std::size_t nodes, nccl::Logger* logger, void** ctx) noexcept {
  if (ctx == nullptr) return nccl::Result::kInvalidArgument;
  *ctx = nullptr;
  // A failure here is one: if this rank alone left its numbers to NCCL, the collectives would hang.
  try {
    install_nccl_logger(logger);
    const std::string reason = reason_to_leave(nodes, process_environment());
    if (!reason.empty()) {
      BAGUA_NET_INFO("Bagua-Net tuner: leaves all to NCCL (" + reason + ")");
      return nccl::Result::kSuccess;
    }
    auto tuned = std::make_unique<TunedCommunicator>(TunedCommunicator{nodes, ranks});
    BAGUA_NET_INFO("Bagua-Net tuner: at most 2 channels up to " + std::to_string(kTwoChannelBytes >> 10) +
                   " KiB, 4 up to " + std::to_string(kFourChannelBytes >> 20) + " MiB, over " + std::to_string(nodes) +
                   " nodes");
    *ctx = tuned.release();
    return nccl::Result::kSuccess;
  } catch (...) {
    return nccl::Result::kSystemError;
  }
}

void choose_channels(const void* ctx, std::size_t bytes, int* channels) noexcept {
  if (ctx == nullptr || channels == nullptr) return;
  const auto& tuned = *static_cast<const TunedCommunicator*>(ctx);
  const int most = most_channels(bytes, tuned.nodes, tuned.ranks);
  if (most > 0) *channels = most;
}

nccl::Result finalize(void* ctx) noexcept {
  delete static_cast<TunedCommunicator*>(ctx);
  return nccl::Result::kSuccess;
}

}  // namespace bagua_net::abi::tuner
