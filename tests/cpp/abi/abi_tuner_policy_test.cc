// What the tuner tables v2 to v6 choose for which size and shape of communicator, and that they write nothing else. Two
// ranks are an example, with every boundary; whatever is chosen otherwise anywhere changes a digest. When they act at
// all: abi_tuner_test.cc.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <utility>

#include "abi_tuner.h"
#include "wire/connect_handle.h"

namespace abi_test {
namespace {

constexpr std::size_t kHuge = std::numeric_limits<std::size_t>::max();

// LL from 4 to 16 KiB per rank; then a second channel from 128 KiB per rank on, and one more for every 256 KiB, until
// there are eight. A rank's share is rounded down.
void chooses_for_two_ranks(int version) {
  with_network(version, [](const Tuner& tuner) {
    check_choices(tuner, 2, 2,
                  {{0, kAllNccls},
                   {8 * kKiB - 1, kAllNccls},
                   {8 * kKiB, low_latency(1)},
                   {32 * kKiB + 1, low_latency(1)},
                   {32 * kKiB + 2, simple(1)},
                   {256 * kKiB - 1, simple(1)},
                   {256 * kKiB, simple(2)},
                   {1536 * kKiB - 1, simple(2)},
                   {1536 * kKiB, simple(3)},
                   {2 * kMiB, simple(4)},
                   {4 * kMiB - 1, simple(7)},
                   {4 * kMiB, simple(0)},
                   {kHuge, simple(0)}});
  });
}

// NCCL gives up a channel while the share of each is below this; where the pair is NCCL's, the largest that it may be.
std::size_t nccls_share(const Choice& choice, std::size_t ranks) {
  const std::size_t simple_share = 32 * kKiB;
  const std::size_t low_latency_share = 4 * kKiB * ranks;
  if (choice.algorithm == kUntouched) return std::max(simple_share, low_latency_share);
  return choice.protocol == kLowLatency ? low_latency_share : simple_share;
}

// A number that is told replaces NCCL's own: it must not be larger, whatever the size.
void never_raises_the_number(int version) {
  with_network(version, [](const Tuner& tuner) {
    for (const auto& [ranks, nodes] : std::initializer_list<std::pair<std::size_t, std::size_t>>{
             {2, 2}, {3, 3}, {4, 4}, {5, 5}, {4, 2}, {16, 2}, {6, 3}, {9, 9}, {32, 4}, {512, 64}}) {
      void* const ctx = tuned(tuner, ranks, nodes);
      for (std::size_t bytes = 1; bytes < 64 * kMiB; bytes += 1 + bytes / 50) {
        for (const TunedFunction function : {TunedFunction::kAllGather, TunedFunction::kReduceScatter,
                                             TunedFunction::kAllReduce, TunedFunction::kBroadcast}) {
          const Choice choice = tuner.ask(ctx, function, bytes);
          const std::size_t nccls = std::max<std::size_t>(1, bytes / nccls_share(choice, ranks));
          if (choice.channels >= 0 && static_cast<std::size_t>(choice.channels) <= nccls) continue;
          std::ostringstream message;
          message << bytes << " bytes over " << ranks << " ranks: " << choice << "; NCCL would open " << nccls;
          check::fail(__FILE__, __LINE__, message.str());
        }
      }
      CHECK_SUCCESS(tuner.finalize(ctx));
    }
  });
}

// Ranks of two versions that choose otherwise hang, so such versions must refuse each other.
constexpr std::uint64_t kChoicesOfProtocol4 = 14719383740466661649u;

void the_protocol_number_changes_with_the_choices(int version) {
  with_network(version, [](const Tuner& tuner) {
    std::uint64_t digest = 14695981039346656037u;  // FNV-1a
    const auto add = [&digest](int number) { digest = (digest ^ static_cast<std::uint32_t>(number)) * 1099511628211u; };
    for (const auto& [ranks, nodes] : std::initializer_list<std::pair<std::size_t, std::size_t>>{
             {2, 2}, {3, 3}, {4, 4}, {5, 5}, {3, 2}, {4, 2}, {16, 2}, {6, 3}, {32, 4}, {512, 64}}) {
      void* const ctx = tuned(tuner, ranks, nodes);
      // Every multiple of a 16th between two powers of two, and the sizes beside it.
      for (std::size_t power = kKiB; power <= 64 * kMiB; power *= 2) {
        for (std::size_t bytes = power; bytes < 2 * power; bytes += power / 16) {
          for (const std::size_t near : {bytes - 1, bytes, bytes + 1}) {
            for (const TunedFunction function : {TunedFunction::kAllGather, TunedFunction::kReduceScatter,
                                                 TunedFunction::kAllReduce, TunedFunction::kBroadcast}) {
              const Choice choice = tuner.ask(ctx, function, near);
              for (const int number : {choice.algorithm, choice.protocol, choice.channels}) add(number);
            }
          }
        }
      }
      CHECK_SUCCESS(tuner.finalize(ctx));
    }
    // Otherwise: the tuner chooses otherwise. Raise kProtocolVersion, and write the new number here.
    CHECK_EQ(bagua_net::kProtocolVersion, 4);
    CHECK_EQ(digest, kChoicesOfProtocol4);
  });
}

constexpr std::size_t kLowLatencySize = 32 * kKiB;  // of two ranks
constexpr std::size_t kSimpleSize = 512 * kKiB;

// The channels are meant for the pair: without it they are NCCL's, too.
void leaves_a_pair_that_cannot_run(int version) {
  with_network(version, [](const Tuner& tuner) {
    void* const ctx = tuned(tuner, 2, 2);
    CostTable without_low_latency;
    without_low_latency.set(kRing, kLowLatency, -1.0F);
    CostTable without_simple;
    without_simple.set(kRing, kSimple, -1.0F);
    for (const TunedFunction function : kRingFunctions) {
      CHECK_EQ(tuner.ask(ctx, function, kLowLatencySize, without_low_latency), kAllNccls);
      CHECK_EQ(tuner.ask(ctx, function, kSimpleSize, without_low_latency), simple(2));
      CHECK_EQ(tuner.ask(ctx, function, kLowLatencySize, without_simple), low_latency(1));
      CHECK_EQ(tuner.ask(ctx, function, kSimpleSize, without_simple), kAllNccls);
      CHECK_EQ(tuner.ask(ctx, function, 4 * kMiB, without_simple), kAllNccls);
    }
    CHECK_SUCCESS(tuner.finalize(ctx));
    // Channels alone are told whatever can run.
    void* const more = tuned(tuner, 5, 5);
    CHECK_EQ(tuner.ask(more, TunedFunction::kAllReduce, kSimpleSize, without_simple), only_channels(2));
    CHECK_SUCCESS(tuner.finalize(more));
  });
}

// A cost of 0 is one of a pair that can run.
void takes_a_pair_that_costs_nothing(int version) {
  with_network(version, [](const Tuner& tuner) {
    void* const ctx = tuned(tuner, 2, 2);
    CostTable costs;
    costs.set(kRing, kLowLatency, 0.0F);
    costs.set(kRing, kSimple, 0.0F);
    CHECK_EQ(tuner.ask(ctx, TunedFunction::kAllReduce, kLowLatencySize, costs), only_channels(1));
    CHECK_EQ(tuner.ask(ctx, TunedFunction::kAllReduce, kSimpleSize, costs), only_channels(2));
    CHECK_SUCCESS(tuner.finalize(ctx));
  });
}

// NCCL says how large its table is; another version's may be smaller or larger than any that there was.
void keeps_within_the_cost_table(int version) {
  with_network(version, [](const Tuner& tuner) {
    void* const ctx = tuned(tuner, 2, 2);
    const auto check_table = [&](int algorithms, int protocols, const Choice& small, const Choice& large) {
      const CostTable costs(algorithms, protocols);
      for (const TunedFunction function : kRingFunctions) {
        CHECK_EQ(tuner.ask(ctx, function, kLowLatencySize, costs), small);
        CHECK_EQ(tuner.ask(ctx, function, kSimpleSize, costs), large);
      }
    };
    check_table(0, 0, kAllNccls, kAllNccls);
    check_table(0, 3, kAllNccls, kAllNccls);
    check_table(1, 3, kAllNccls, kAllNccls);
    check_table(7, 0, kAllNccls, kAllNccls);
    check_table(7, 1, low_latency(1), kAllNccls);
    check_table(7, 2, low_latency(1), kAllNccls);
    // The pair is in the last cell.
    check_table(2, 1, low_latency(1), kAllNccls);
    check_table(2, 3, low_latency(1), simple(2));
    check_table(9, 5, low_latency(1), simple(2));
    CHECK_SUCCESS(tuner.finalize(ctx));
  });
}

bool register_tuner_policy_cases() {
  register_tuner_case("chooses_for_two_ranks", {}, chooses_for_two_ranks);
  register_tuner_case("the_protocol_number_changes_with_the_choices", {}, the_protocol_number_changes_with_the_choices);
  register_tuner_case("never_raises_the_number", {}, never_raises_the_number);
  register_tuner_case("leaves_a_pair_that_cannot_run", {}, leaves_a_pair_that_cannot_run, kOldestTunerWithCosts);
  register_tuner_case("takes_a_pair_that_costs_nothing", {}, takes_a_pair_that_costs_nothing, kOldestTunerWithCosts);
  register_tuner_case("keeps_within_the_cost_table", {}, keeps_within_the_cost_table, kOldestTunerWithCosts);
  return true;
}

const bool tuner_policy_cases_registered = register_tuner_policy_cases();

}  // namespace
}  // namespace abi_test
