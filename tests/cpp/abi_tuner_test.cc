// The tuner tables v2 to v6: which number of channels they write for which size and shape of communicator, that they
// write nothing else, and when they leave everything to NCCL. Driven through the built library, as NCCL does it.
#include "abi/tuner_types.h"

#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "abi_support_transfer.h"

namespace abi_test {
namespace {

using bagua_net::nccl::LogLevel;
using bagua_net::nccl::TunedFunction;

constexpr int kOldestTuner = 2;
constexpr int kNewestTuner = 6;
constexpr int kAlgorithms = 7;
constexpr int kProtocols = 3;
constexpr int kUntouched = -7;  // what an output holds that nobody has written

constexpr std::size_t kKiB = 1024;
constexpr std::size_t kMiB = 1024 * kKiB;

constexpr TunedFunction kFunctions[] = {TunedFunction::kBroadcast, TunedFunction::kReduce, TunedFunction::kAllGather,
                                        TunedFunction::kReduceScatter, TunedFunction::kAllReduce};

// What getCollInfo did with its outputs.
struct Answer {
  Result result;
  int channels;
  bool rest_untouched;
};

// One interface over the five tables.
class Tuner {
 public:
  explicit Tuner(int version) : version_(version), library_(dlopen(PluginLibrary::path(), RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) throw std::runtime_error(std::string("cannot open the plugin: ") + dlerror());
    const std::string symbol = "ncclTunerPlugin_v" + std::to_string(version);
    table_ = dlsym(library_, symbol.c_str());
    if (table_ == nullptr) throw std::runtime_error(symbol + " is not exported");
  }
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;
  ~Tuner() { dlclose(library_); }

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

  Answer ask(void* ctx, TunedFunction function, std::size_t bytes, int registered = 0) const {
    using namespace bagua_net::nccl;
    Answer answer{Result::kSuccess, 0, false};
    if (version_ == 2) {
      int algorithm = kUntouched;
      int protocol = kUntouched;
      answer.result =
          as<TunerTableV2>().getCollInfo(ctx, function, bytes, 0, 0, 1, &algorithm, &protocol, &answer.channels);
      answer.rest_untouched = algorithm == kUntouched && protocol == kUntouched;
      return answer;
    }
    std::array<float, kAlgorithms * kProtocols> costs;
    for (std::size_t i = 0; i < costs.size(); ++i) costs[i] = i % 4 == 0 ? -1.0F : 10.0F * static_cast<float>(i);
    const auto before = costs;
    auto** const table = reinterpret_cast<float**>(costs.data());
    answer.result = version_ == 3 ? as<TunerTableV3>().getCollInfo(ctx, function, bytes, 1, table, kAlgorithms,
                                                                   kProtocols, &answer.channels)
                                  : as<TunerTableV4>().getCollInfo(ctx, function, bytes, 1, table, kAlgorithms,
                                                                   kProtocols, registered, &answer.channels);
    answer.rest_untouched = costs == before;
    return answer;
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
  void* const library_;
  const void* table_;
};

int channels_for(const Tuner& tuner, void* ctx, std::size_t bytes) {
  int channels = kUntouched;
  for (const TunedFunction function : kFunctions) {
    for (const int registered : {0, 1}) {
      const Answer answer = tuner.ask(ctx, function, bytes, registered);
      CHECK_SUCCESS(answer.result);
      CHECK(answer.rest_untouched);
      if (channels != kUntouched) CHECK_EQ(answer.channels, channels);
      channels = answer.channels;
    }
  }
  return channels;
}

// The network is up, as it is when NCCL looks for a tuner.
void with_network(int version, const std::function<void(const Tuner& tuner)>& body) {
  const PluginLibrary library;
  const std::unique_ptr<Net> net = library.net(kNewestVersion, &CapturedLog::log);
  void* network_ctx = nullptr;
  CHECK_SUCCESS(net->init(&network_ctx));
  body(Tuner(version));
  CHECK_SUCCESS(net->finalize(network_ctx));
}

void* tuned(const Tuner& tuner, std::size_t ranks, std::size_t nodes) {
  void* ctx = slot_content(2);
  CHECK_SUCCESS(tuner.init(ranks, nodes, &CapturedLog::log, &ctx));
  return ctx;
}

struct Expected {
  std::size_t bytes;
  int channels;
};

void check_sizes(const Tuner& tuner, std::size_t ranks, std::size_t nodes, const std::vector<Expected>& expected) {
  void* const ctx = tuned(tuner, ranks, nodes);
  for (const Expected& row : expected) {
    const int channels = channels_for(tuner, ctx, row.bytes);
    if (channels != row.channels) {
      check::fail(__FILE__, __LINE__,
                  std::to_string(row.bytes) + " bytes over " + std::to_string(ranks) + " ranks on " +
                      std::to_string(nodes) + " nodes: " + std::to_string(channels) + " channels, not " +
                      std::to_string(row.channels));
    }
  }
  CHECK_SUCCESS(tuner.finalize(ctx));
}

void lowers_channels_by_size(int version) {
  with_network(version, [](const Tuner& tuner) {
    CHECK_EQ(std::string(tuner.name()), std::string("BaguaNet"));
    CHECK(!tuner.has_chunk_size());
    const std::vector<Expected> expected = {{0, 0},
                                            {1, 0},
                                            {64 * kKiB - 1, 0},
                                            {64 * kKiB, 2},
                                            {512 * kKiB, 2},
                                            {512 * kKiB + 1, 4},
                                            {16 * kMiB, 4},
                                            {16 * kMiB + 1, 0},
                                            {256 * kMiB, 0},
                                            {SIZE_MAX, 0}};
    check_sizes(tuner, 4, 4, expected);
    check_sizes(tuner, 3, 3, expected);
    CHECK(
        CapturedLog::get().informed("Bagua-Net tuner: at most 2 channels up to 512 KiB, 4 up to 16 MiB, over 4 nodes"));
    CHECK(CapturedLog::get().informed("over 3 nodes"));
  });
}

// With many ranks NCCL itself opens one channel for what would be two with few: 4 KiB per rank and channel.
void never_raises_the_number(int version) {
  with_network(version, [](const Tuner& tuner) {
    check_sizes(tuner, 32, 4,
                {{256 * kKiB - 1, 0}, {256 * kKiB, 2}, {512 * kKiB, 2}, {512 * kKiB + 1, 4}, {16 * kMiB, 4}});
    check_sizes(tuner, 512, 64, {{512 * kKiB, 0}, {8 * kMiB - 1, 0}, {8 * kMiB, 4}, {16 * kMiB, 4}});
    check_sizes(tuner, 100000, 12500, {{512 * kKiB, 0}, {16 * kMiB, 0}});
  });
}

const std::vector<Expected> kAllNccls = {{8, 0}, {64 * kKiB, 0}, {512 * kKiB, 0}, {4 * kMiB, 0}, {256 * kMiB, 0}};

void leaves_few_nodes_alone(int version) {
  with_network(version, [](const Tuner& tuner) {
    check_sizes(tuner, 8, 1, kAllNccls);
    check_sizes(tuner, 2, 2, kAllNccls);
    check_sizes(tuner, 16, 2, kAllNccls);
    CHECK(CapturedLog::get().informed("leaves all to NCCL (nodes: 1)"));
    CHECK(CapturedLog::get().informed("leaves all to NCCL (nodes: 2)"));
  });
}

void leaves_all_with_the_users_setting(int version, const std::string& setting) {
  with_network(version, [&](const Tuner& tuner) {
    check_sizes(tuner, 4, 4, kAllNccls);
    CHECK(CapturedLog::get().informed("leaves all to NCCL (" + setting + ")"));
  });
}

void acts_in_spite_of_empty_settings(int version) {
  with_network(version, [](const Tuner& tuner) { check_sizes(tuner, 4, 4, {{64 * kKiB, 2}, {4 * kMiB, 4}}); });
}

void leaves_all_without_the_network(int version) {
  const Tuner tuner(version);
  check_sizes(tuner, 4, 4, kAllNccls);
  CHECK(CapturedLog::get().informed("leaves all to NCCL (Bagua-Net is not active)"));
}

void leaves_all_when_the_network_declined(int version) {
  const PluginLibrary library;
  const std::unique_ptr<Net> net = library.net(kNewestVersion, &CapturedLog::log);
  void* network_ctx = nullptr;
  CHECK(net->init(&network_ctx) != Result::kSuccess);
  leaves_all_without_the_network(version);
}

// 2.28 to 2.30 finalize the network of one communicator while another goes on.
void leaves_all_after_the_network_was_finalized(int version) {
  with_network(version, [](const Tuner& tuner) { check_sizes(tuner, 4, 4, {{64 * kKiB, 2}}); });
  leaves_all_without_the_network(version);
}

void survives_null(int version) {
  with_network(version, [](const Tuner& tuner) {
    CHECK_RESULT(tuner.init(4, 4, &CapturedLog::log, nullptr), Result::kInvalidArgument);
    CHECK_EQ(channels_for(tuner, nullptr, 64 * kKiB), 0);
    CHECK_SUCCESS(tuner.finalize(nullptr));
    void* ctx = nullptr;
    CHECK_SUCCESS(tuner.init(4, 4, nullptr, &ctx));
    CHECK_EQ(channels_for(tuner, ctx, 64 * kKiB), 2);
    CHECK_SUCCESS(tuner.finalize(ctx));
  });
}

void keeps_communicators_apart(int version) {
  with_network(version, [](const Tuner& tuner) {
    void* const large = tuned(tuner, 64, 8);
    void* const small = tuned(tuner, 4, 4);
    void* const pair = tuned(tuner, 2, 2);
    std::vector<std::thread> threads;
    std::array<std::string, 4> failures;
    for (std::string& failure : failures) {
      threads.emplace_back([&] {
        try {
          for (int i = 0; i < 1000; ++i) {
            CHECK_EQ(channels_for(tuner, large, 256 * kKiB), 0);
            CHECK_EQ(channels_for(tuner, small, 256 * kKiB), 2);
            CHECK_EQ(channels_for(tuner, pair, 256 * kKiB), 0);
          }
        } catch (const std::exception& error) {
          failure = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& failure : failures) CHECK_EQ(failure, std::string());
    CHECK_SUCCESS(tuner.finalize(large));
    CHECK_EQ(channels_for(tuner, small, 256 * kKiB), 2);
    CHECK_SUCCESS(tuner.finalize(small));
    CHECK_SUCCESS(tuner.finalize(pair));
  });
}

bool register_all() {
  const Environment settings{{"NCCL_MIN_NCHANNELS", "4"}, {"NCCL_MAX_NCHANNELS", "4"}, {"NCCL_MIN_CTAS", "8"},
                             {"NCCL_MAX_CTAS", "2"},      {"NCCL_MIN_NRINGS", "4"},    {"NCCL_MAX_NRINGS", "2"},
                             {"BAGUA_NET_RAILS", "2"},    {"NCCL_NET", "Socket"}};
  for (int version = kOldestTuner; version <= kNewestTuner; ++version) {
    const auto add = [&](const std::string& name, const Environment& environment, std::function<void()> body) {
      register_case(name + "_v" + std::to_string(version), [=] { in_own_process(environment, body); });
    };
    add("lowers_channels_by_size", {}, [=] { lowers_channels_by_size(version); });
    add("lowers_channels_when_chosen_by_name", {{"NCCL_NET", "baguanet"}}, [=] { lowers_channels_by_size(version); });
    add("never_raises_the_number", {}, [=] { never_raises_the_number(version); });
    add("leaves_few_nodes_alone", {}, [=] { leaves_few_nodes_alone(version); });
    for (const auto& [variable, value] : settings) {
      const std::string setting = variable + "=" + value;
      add("leaves_all_with_" + variable, {{variable, value}},
          [=] { leaves_all_with_the_users_setting(version, setting); });
    }
    add("acts_in_spite_of_empty_settings", {{"NCCL_MAX_NCHANNELS", ""}, {"BAGUA_NET_RAILS", "auto"}, {"NCCL_NET", ""}},
        [=] { acts_in_spite_of_empty_settings(version); });
    add("leaves_all_without_the_network", {}, [=] { leaves_all_without_the_network(version); });
    add("leaves_all_when_the_network_declined", {{"ENABLE_BAGUA_NET", "0"}},
        [=] { leaves_all_when_the_network_declined(version); });
    add("leaves_all_after_the_network_was_finalized", {}, [=] { leaves_all_after_the_network_was_finalized(version); });
    add("survives_null", {}, [=] { survives_null(version); });
    add("keeps_communicators_apart", {}, [=] { keeps_communicators_apart(version); });
  }
  return true;
}

const bool registered = register_all();

}  // namespace
}  // namespace abi_test

CHECK_MAIN
