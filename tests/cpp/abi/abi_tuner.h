// One interface over NCCL's tuner tables v2 to v6, and what they were seen to choose. Each call goes through the real
// table of the built library, as NCCL does it.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "abi/tuner_types.h"
#include "abi_connection.h"

namespace abi_test {

using bagua_net::nccl::TunedFunction;

constexpr int kOldestTuner = 2;
constexpr int kNewestTuner = 6;
constexpr int kOldestTunerWithCosts = 3;

// NCCL's numbers.
constexpr int kRing = 1;
constexpr int kLowLatency = 0;
constexpr int kSimple = 2;

constexpr int kUntouched = -7;  // what an output holds that nobody has written

constexpr TunedFunction kRingFunctions[] = {TunedFunction::kAllGather, TunedFunction::kReduceScatter,
                                            TunedFunction::kAllReduce};
// The last one stands for what a later NCCL may ask about.
constexpr TunedFunction kLeftFunctions[] = {TunedFunction::kReduce, static_cast<TunedFunction>(5)};

// What NCCL would run. It gives 0 channels, which stand for its own number.
struct Choice {
  int algorithm;
  int protocol;
  int channels;
};
constexpr Choice kAllNccls{kUntouched, kUntouched, 0};
constexpr Choice only_channels(int channels) { return {kUntouched, kUntouched, channels}; }
constexpr Choice low_latency(int channels) { return {kRing, kLowLatency, channels}; }
constexpr Choice simple(int channels) { return {kRing, kSimple, channels}; }

inline bool operator==(const Choice& left, const Choice& right) {
  return left.algorithm == right.algorithm && left.protocol == right.protocol && left.channels == right.channels;
}
inline std::ostream& operator<<(std::ostream& out, const Choice& choice) {
  if (choice.algorithm == kUntouched && choice.protocol == kUntouched) {
    out << "NCCL's pair";
  } else {
    out << "algorithm " << choice.algorithm << ", protocol " << choice.protocol;
  }
  return out << ", " << choice.channels << " channels";
}

// NCCL's float[algorithms][protocols], between cells that are not to be written.
class CostTable {
 public:
  // The size that NCCL 2.23 and later have. Some pairs cannot run; (ring, LL) and (ring, Simple) can.
  explicit CostTable(int algorithms = 7, int protocols = 3)
      : algorithms_(algorithms),
        protocols_(protocols),
        cells_(static_cast<std::size_t>(kGuard + algorithms * protocols + kGuard)) {
    for (std::size_t i = 0; i < cells_.size(); ++i) cells_[i] = 10.0F * static_cast<float>(i + 1);
    for (int algorithm = 0; algorithm < algorithms; ++algorithm) {
      for (int protocol = 0; protocol < protocols; ++protocol) {
        if ((algorithm + protocol) % 2 == 0 && algorithm != kRing) set(algorithm, protocol, -1.0F);
      }
    }
  }
  int algorithms() const { return algorithms_; }
  int protocols() const { return protocols_; }
  float** for_nccl() { return reinterpret_cast<float**>(cells_.data() + kGuard); }
  void set(int algorithm, int protocol, float cost) { cells_[index(algorithm, protocol)] = cost; }

  // The pair whose cost became 0; fails if anything else has changed since `before`.
  Choice chosen_since(const CostTable& before, int channels) const {
    Choice choice = only_channels(channels);
    for (std::size_t i = 0; i < cells_.size(); ++i) {
      if (cells_[i] == before.cells_[i]) continue;
      const int cell = static_cast<int>(i) - kGuard;
      if (cell < 0 || cell >= algorithms_ * protocols_) throw std::runtime_error("written outside of the cost table");
      if (cells_[i] != 0.0F) throw std::runtime_error("a cost became " + std::to_string(cells_[i]));
      if (choice.algorithm != kUntouched) throw std::runtime_error("two costs were changed");
      choice.algorithm = cell / protocols_;
      choice.protocol = cell % protocols_;
    }
    return choice;
  }

 private:
  static constexpr int kGuard = 16;
  std::size_t index(int algorithm, int protocol) const {
    return static_cast<std::size_t>(kGuard + algorithm * protocols_ + protocol);
  }

  int algorithms_;
  int protocols_;
  std::vector<float> cells_;
};

// One interface over the five tables.
class Tuner {
 public:
  explicit Tuner(int version) : version_(version), table_(library_.table("ncclTunerPlugin", version)) {}

  const char* name() const { return *static_cast<const char* const*>(table_); }

  Result init(std::size_t ranks, std::size_t nodes, bagua_net::nccl::Logger* logger, void** ctx) const {
    using namespace bagua_net::nccl;
    if (version_ < 5) return as<TunerTableV2>().init(ranks, nodes, logger, ctx);
    // NCCL lets a tuner change these.
    alignas(double) std::array<unsigned char, 4096> domain;
    alignas(double) std::array<unsigned char, 4096> constants;
    domain.fill(0xA5);
    constants.fill(0x5A);
    const auto domain_before = domain;
    const auto constants_before = constants;
    const Result result =
        as<TunerTableV5>().init(ctx, 0x1234, ranks, nodes, logger, reinterpret_cast<TunerNvlDomain*>(domain.data()),
                                reinterpret_cast<TunerConstants*>(constants.data()));
    CHECK(domain == domain_before);
    CHECK(constants == constants_before);
    return result;
  }

  // `hint` is what must not matter: support for other algorithms, aggregated collectives, registered buffers.
  Choice ask(void* ctx, TunedFunction function, std::size_t bytes, int hint = 0) const {
    if (version_ >= kOldestTunerWithCosts) return ask(ctx, function, bytes, CostTable(), hint);
    Choice choice = kAllNccls;
    CHECK_SUCCESS(as<bagua_net::nccl::TunerTableV2>().getCollInfo(
        ctx, function, bytes, hint, hint, 1 + hint, &choice.algorithm, &choice.protocol, &choice.channels));
    return choice;
  }
  Choice ask(void* ctx, TunedFunction function, std::size_t bytes, const CostTable& before, int hint = 0) const {
    using namespace bagua_net::nccl;
    CostTable costs = before;
    int channels = 0;
    const int algorithms = costs.algorithms();
    const int protocols = costs.protocols();
    CHECK_SUCCESS(version_ == 3 ? as<TunerTableV3>().getCollInfo(ctx, function, bytes, 1 + hint, costs.for_nccl(),
                                                                 algorithms, protocols, &channels)
                                : as<TunerTableV4>().getCollInfo(ctx, function, bytes, 1 + hint, costs.for_nccl(),
                                                                 algorithms, protocols, hint, &channels));
    return costs.chosen_since(before, channels);
  }

  Result finalize(void* ctx) const { return as<bagua_net::nccl::TunerTableV2>().destroy(ctx); }

  bool has_chunk_size() const { return version_ >= 6 && as<bagua_net::nccl::TunerTableV6>().getChunkSize != nullptr; }

 private:
  // Slots 0, 1 and 3 are the same in v2 to v4 and in v5 to v6; slot 2 in v4 to v6.
  template <typename Table>
  const Table& as() const {
    return *static_cast<const Table*>(table_);
  }

  const int version_;
  const PluginLibrary library_;
  const void* const table_;
};

// The network is up, as it is when NCCL looks for a tuner.
inline void with_network(int version, const std::function<void(const Tuner& tuner)>& body) {
  const PluginLibrary library;
  const Net net(library, kNewestVersion, &CapturedLog::log);
  void* network_ctx = nullptr;
  CHECK_SUCCESS(net.init(&network_ctx));
  body(Tuner(version));
  CHECK_SUCCESS(net.finalize(network_ctx));
}

inline void* tuned(const Tuner& tuner, std::size_t ranks, std::size_t nodes) {
  void* ctx = slot_content(2);
  CHECK_SUCCESS(tuner.init(ranks, nodes, &CapturedLog::log, &ctx));
  CHECK(ctx != slot_content(2));
  return ctx;
}

inline void check_function(const Tuner& tuner, void* ctx, TunedFunction function, std::size_t bytes,
                           const Choice& expected) {
  for (const int hint : {0, 1}) {
    const Choice choice = tuner.ask(ctx, function, bytes, hint);
    if (choice == expected) continue;
    std::ostringstream message;
    message << "function " << static_cast<int>(function) << " of " << bytes << " bytes: " << choice << "; not "
            << expected;
    check::fail(__FILE__, __LINE__, message.str());
  }
}

// Of those that go round the ring; reduce and what is not known are left to NCCL.
inline void check_choice(const Tuner& tuner, void* ctx, std::size_t bytes, const Choice& expected) {
  for (const TunedFunction function : kRingFunctions) check_function(tuner, ctx, function, bytes, expected);
  for (const TunedFunction function : kLeftFunctions) check_function(tuner, ctx, function, bytes, kAllNccls);
}

struct Expected {
  std::size_t bytes;
  Choice choice;
};

inline void check_choices(const Tuner& tuner, std::size_t ranks, std::size_t nodes,
                          const std::vector<Expected>& expected) {
  void* const ctx = tuned(tuner, ranks, nodes);
  try {
    for (const Expected& row : expected) check_choice(tuner, ctx, row.bytes, row.choice);
  } catch (const std::exception& error) {
    throw std::runtime_error(std::to_string(ranks) + " ranks on " + std::to_string(nodes) + " nodes, " + error.what());
  }
  CHECK_SUCCESS(tuner.finalize(ctx));
}

// Everything is left to NCCL, at every size at which anything is chosen elsewhere.
inline void check_leaves_all(const Tuner& tuner, std::size_t ranks, std::size_t nodes) {
  void* const ctx = tuned(tuner, ranks, nodes);
  CHECK(ctx == nullptr);
  for (const std::size_t bytes : {std::size_t{8}, 32 * kKiB, 64 * kKiB, 512 * kKiB, 4 * kMiB, 256 * kMiB}) {
    check_choice(tuner, ctx, bytes, kAllNccls);
    check_function(tuner, ctx, TunedFunction::kBroadcast, bytes, kAllNccls);
  }
  CHECK_SUCCESS(tuner.finalize(ctx));
}

// What the tuner has logged so far, in order.
inline std::vector<std::string> tuner_lines() {
  const std::string start = "NET/BaguaNet: Bagua-Net tuner: ";
  std::vector<std::string> found;
  for (const LogLine& line : CapturedLog::get().lines()) {
    if (line.text.rfind(start, 0) != 0) continue;
    CHECK(line.level == bagua_net::nccl::LogLevel::kInfo);
    found.push_back(line.text.substr(start.size()));
  }
  return found;
}

// One line for each communicator.
inline void check_lines(const std::vector<std::string>& expected) {
  const std::vector<std::string> found = tuner_lines();
  for (std::size_t i = 0; i < expected.size() && i < found.size(); ++i) CHECK_EQ(found[i], expected[i]);
  CHECK_EQ(found.size(), expected.size());
}

// One case for all tables, each in a process of its own. What is wrong is preceded by the table and by `row`, which
// names the one of several environments.
inline void with_every_tuner(const Environment& environment, const std::function<void(int version)>& body,
                             int oldest = kOldestTuner, const std::string& row = "") {
  for (int version = oldest; version <= kNewestTuner; ++version) {
    try {
      in_own_process(environment, [&] { body(version); });
    } catch (const std::exception& error) {
      throw std::runtime_error("tuner v" + std::to_string(version) + (row.empty() ? "" : ", " + row) + ": " +
                               error.what());
    }
  }
}

inline void register_tuner_case(const std::string& name, const Environment& environment,
                                const std::function<void(int version)>& body, int oldest = kOldestTuner,
                                const char* file = __builtin_FILE()) {
  register_case(name, [=] { with_every_tuner(environment, body, oldest); }, file);
}

}  // namespace abi_test
