#include "abi/tuner_entry.h"

#include <strings.h>

#include <memory>
#include <optional>
#include <string>

#include "abi/collective_policy.h"
#include "abi/nccl_log.h"
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

// NCCL's numbers.
constexpr int kRing = 1;
constexpr int kLowLatency = 0;
constexpr int kSimple = 2;

std::string shape(std::size_t nodes, std::size_t ranks) {
  return std::to_string(ranks) + (ranks == 1 ? " rank on " : " ranks on ") + std::to_string(nodes) +
         (nodes == 1 ? " node" : " nodes");
}

// Why NCCL's own numbers stand; empty if the policy applies.
std::string reason_to_leave(std::size_t nodes, std::size_t ranks, const EnvironmentReader& environment) {
  // NCCL finds the tuner in this library also where another network carries its messages.
  if (current_epoch.load(std::memory_order_acquire) == 0) return "Bagua-Net is not active";
  const std::optional<std::string> network = environment("NCCL_NET");
  if (network && !network->empty() && strcasecmp(network->c_str(), kPluginName) != 0) return "NCCL_NET=" + *network;
  std::string chosen = tuning_choice(environment);
  if (!chosen.empty()) return chosen;
  PluginConfig config;
  if (!parse_plugin_config(environment, &config).is_ok()) return "the settings cannot be read";
  if (nodes < 2) return shape(nodes, ranks);
  return "";
}

CollectiveChoice choice_for(const void* ctx, nccl::TunedFunction function, std::size_t bytes) {
  if (ctx == nullptr) return {};
  const auto& tuned = *static_cast<const TunedCommunicator*>(ctx);
  return choose_collective(function, bytes, tuned.nodes, tuned.ranks);
}

int number_of(RingProtocol protocol) { return protocol == RingProtocol::kLowLatency ? kLowLatency : kSimple; }

}  // namespace

nccl::Result init(std::size_t ranks, std::size_t nodes, nccl::Logger* logger, void** ctx) noexcept {
  if (ctx == nullptr) return nccl::Result::kInvalidArgument;
  *ctx = nullptr;
  // A failure here is one: if this rank alone left its numbers to NCCL, the collectives would hang.
  try {
    install_nccl_logger(logger);
    const std::string reason = reason_to_leave(nodes, ranks, process_environment());
    if (!reason.empty()) {
      BAGUA_NET_INFO("Bagua-Net tuner: leaves all to NCCL (" + reason + ")");
      return nccl::Result::kSuccess;
    }
    auto tuned = std::make_unique<TunedCommunicator>(TunedCommunicator{nodes, ranks});
    const std::string what = is_measured_shape(nodes, ranks) ? "protocol and channels" : "channels";
    BAGUA_NET_INFO("Bagua-Net tuner: chooses " + what + " by size, " + shape(nodes, ranks));
    *ctx = tuned.release();
    return nccl::Result::kSuccess;
  } catch (...) {
    return nccl::Result::kSystemError;
  }
}

void choose(const void* ctx, nccl::TunedFunction function, std::size_t bytes, int* algorithm, int* protocol,
            int* channels) noexcept {
  const CollectiveChoice choice = choice_for(ctx, function, bytes);
  if (choice.protocol != RingProtocol::kAny) {
    *algorithm = kRing;
    *protocol = number_of(choice.protocol);
  }
  if (choice.channels > 0) *channels = choice.channels;
}

void choose(const void* ctx, nccl::TunedFunction function, std::size_t bytes, float** cost_table, int algorithms,
            int protocols, int* channels) noexcept {
  const CollectiveChoice choice = choice_for(ctx, function, bytes);
  if (choice.protocol != RingProtocol::kAny) {
    const int protocol = number_of(choice.protocol);
    if (kRing >= algorithms || protocol >= protocols) return;
    // Really float[algorithms][protocols]; a negative cost says that the pair cannot run.
    const auto ring_row = static_cast<std::size_t>(kRing) * static_cast<std::size_t>(protocols);
    float* const cost = reinterpret_cast<float*>(cost_table) + ring_row + protocol;
    if (*cost < 0) return;
    *cost = 0;
  }
  if (choice.channels > 0) *channels = choice.channels;
}

nccl::Result finalize(void* ctx) noexcept {
  delete static_cast<TunedCommunicator*>(ctx);
  return nccl::Result::kSuccess;
}

}  // namespace bagua_net::abi::tuner
