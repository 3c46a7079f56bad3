// The tuner tables v2 to v6: when the tuner acts and when it leaves everything to NCCL, what it says about that, and
// that communicators do not disturb each other. What it chooses: abi_tuner_policy_test.cc.
#include <cstdlib>
#include <thread>
#include <utility>

#include "abi_tuner.h"

namespace abi_test {
namespace {

// Both kinds of communicator that it acts for.
void check_acts(const Tuner& tuner) {
  check_choices(tuner, 2, 2, {{32 * kKiB, low_latency(1)}, {512 * kKiB, simple(2)}});
  check_choices(tuner, 5, 5, {{64 * kKiB, only_channels(2)}});
}

// Communicators that it would act for otherwise.
void check_leaves_all_because(const Tuner& tuner, const std::string& reason) {
  check_leaves_all(tuner, 2, 2);
  check_leaves_all(tuner, 4, 4);
  check_leaves_all(tuner, 16, 4);
  const std::string line = "leaves all to NCCL (" + reason + ")";
  check_lines({line, line, line});
}

void is_named_and_leaves_the_chunk_size(int version) {
  with_network(version, [](const Tuner& tuner) {
    CHECK_EQ(std::string(tuner.name()), std::string("BaguaNet"));
    CHECK(!tuner.has_chunk_size());
  });
}

void acts(int version) {
  with_network(version, [](const Tuner& tuner) { check_acts(tuner); });
}

void says_what_it_chooses(int version) {
  with_network(version, [](const Tuner& tuner) {
    for (const auto& [ranks, nodes] : {std::pair{2, 2}, {3, 3}, {4, 4}, {5, 5}, {4, 3}, {16, 4}, {4, 2}}) {
      CHECK_SUCCESS(tuner.finalize(tuned(tuner, static_cast<std::size_t>(ranks), static_cast<std::size_t>(nodes))));
    }
    check_lines({"chooses protocol and channels by size, 2 ranks on 2 nodes",
                 "chooses protocol and channels by size, 3 ranks on 3 nodes",
                 "chooses protocol and channels by size, 4 ranks on 4 nodes",
                 "chooses channels by size, 5 ranks on 5 nodes", "chooses channels by size, 4 ranks on 3 nodes",
                 "chooses channels by size, 16 ranks on 4 nodes", "chooses channels by size, 4 ranks on 2 nodes"});
  });
}

void leaves_all_within_one_node(int version) {
  with_network(version, [](const Tuner& tuner) {
    check_leaves_all(tuner, 2, 1);
    check_leaves_all(tuner, 8, 1);
    check_lines({"leaves all to NCCL (2 ranks on 1 node)", "leaves all to NCCL (8 ranks on 1 node)"});
  });
}

void leaves_all_with_each(const Environment& settings) {
  for (const auto& [variable, value] : settings) {
    const std::string setting = variable + "=" + value;
    const auto leaves_all = [&](int version) {
      with_network(version, [&](const Tuner& tuner) { check_leaves_all_because(tuner, setting); });
    };
    with_every_tuner({{variable, value}}, leaves_all, kOldestTuner, setting);
  }
}

// With such a setting the network would not have started; but a program may change its environment later.
void leaves_all_with_unreadable_settings(int version) {
  with_network(version, [](const Tuner& tuner) {
    CHECK_EQ(setenv("BAGUA_NET_RAILS", "many", 1), 0);
    check_leaves_all_because(tuner, "the settings cannot be read");
  });
}

void leaves_all_without_the_network(int version) {
  check_leaves_all_because(Tuner(version), "Bagua-Net is not active");
}

void leaves_all_when_the_network_declined(int version) {
  const PluginLibrary library;
  const Net net(library, kNewestVersion, &CapturedLog::log);
  void* network_ctx = nullptr;
  CHECK(net.init(&network_ctx) != Result::kSuccess);
  leaves_all_without_the_network(version);
}

// 2.28 to 2.30 finalize the network of one communicator while another goes on: that one's ranks must go on choosing as
// before, or they would no longer agree with those that have not finalized theirs.
void leaves_all_after_the_network_was_finalized(int version) {
  void* before = nullptr;
  with_network(version, [&](const Tuner& tuner) { before = tuned(tuner, 2, 2); });
  const Tuner tuner(version);
  CapturedLog::get().clear();
  check_leaves_all_because(tuner, "Bagua-Net is not active");
  check_choice(tuner, before, 32 * kKiB, low_latency(1));
  check_choice(tuner, before, 512 * kKiB, simple(2));
  CHECK_SUCCESS(tuner.finalize(before));
}

void survives_null(int version) {
  with_network(version, [](const Tuner& tuner) {
    CHECK_RESULT(tuner.init(4, 4, &CapturedLog::log, nullptr), Result::kInvalidArgument);
    check_choice(tuner, nullptr, 64 * kKiB, kAllNccls);
    CHECK_SUCCESS(tuner.finalize(nullptr));
    void* ctx = nullptr;
    CHECK_SUCCESS(tuner.init(4, 4, nullptr, &ctx));
    check_choice(tuner, ctx, 64 * kKiB, low_latency(1));
    CHECK_SUCCESS(tuner.finalize(ctx));
  });
}

void keeps_communicators_apart(int version) {
  with_network(version, [](const Tuner& tuner) {
    void* const large = tuned(tuner, 64, 8);
    void* const medium = tuned(tuner, 16, 4);
    void* const small = tuned(tuner, 4, 4);
    void* const pair = tuned(tuner, 2, 2);
    void* const local = tuned(tuner, 8, 1);
    std::vector<std::thread> threads;
    std::array<std::string, 4> failures;
    for (std::string& failure : failures) {
      threads.emplace_back([&] {
        try {
          for (int i = 0; i < 200; ++i) {
            check_choice(tuner, large, 256 * kKiB, kAllNccls);
            check_choice(tuner, medium, 256 * kKiB, only_channels(2));
            check_choice(tuner, small, 256 * kKiB, simple(1));
            check_choice(tuner, pair, 256 * kKiB, simple(2));
            check_choice(tuner, local, 256 * kKiB, kAllNccls);
          }
        } catch (const std::exception& error) {
          failure = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& failure : failures) CHECK_EQ(failure, std::string());
    CHECK_SUCCESS(tuner.finalize(large));
    CHECK_SUCCESS(tuner.finalize(pair));
    check_choice(tuner, small, 256 * kKiB, simple(1));
    check_choice(tuner, medium, 256 * kKiB, only_channels(2));
    CHECK_SUCCESS(tuner.finalize(small));
    CHECK_SUCCESS(tuner.finalize(medium));
    CHECK_SUCCESS(tuner.finalize(local));
  });
}

bool register_tuner_cases() {
  register_tuner_case("is_named_and_leaves_the_chunk_size", {}, is_named_and_leaves_the_chunk_size);
  register_tuner_case("acts", {}, acts);
  register_tuner_case("acts_when_chosen_by_name", {{"NCCL_NET", "baguanet"}}, acts);
  register_tuner_case("acts_in_spite_of_empty_settings",
                      {{"NCCL_MAX_NCHANNELS", ""},
                       {"NCCL_ALGO", ""},
                       {"NCCL_PROTO", ""},
                       {"BAGUA_NET_RAILS", "auto"},
                       {"NCCL_NET", ""}},
                      acts);
  register_tuner_case("says_what_it_chooses", {}, says_what_it_chooses);
  register_tuner_case("leaves_all_within_one_node", {}, leaves_all_within_one_node);
  const Environment settings{{"NCCL_MIN_NCHANNELS", "4"}, {"NCCL_MAX_NCHANNELS", "4"},
                             {"NCCL_MIN_CTAS", "8"},      {"NCCL_MAX_CTAS", "2"},
                             {"NCCL_MIN_NRINGS", "4"},    {"NCCL_MAX_NRINGS", "2"},
                             {"NCCL_ALGO", "Tree"},       {"NCCL_PROTO", "LL128"},
                             {"BAGUA_NET_RAILS", "2"},    {"NCCL_THREAD_THRESHOLDS", "16 64 8 32 128 512"},
                             {"NCCL_NET", "Socket"}};
  const Environment forbidding_ours{{"NCCL_ALGO", "^NVLS,RING"},
                                    {"NCCL_PROTO", "^LL128,simple"},
                                    {"NCCL_ALGO", "allreduce:^nvls"},
                                    {"NCCL_PROTO", "^ll"}};
  register_case("leaves_all_with_a_users_setting", [=] { leaves_all_with_each(settings); });
  register_case("leaves_all_where_ours_are_forbidden", [=] { leaves_all_with_each(forbidding_ours); });
  register_tuner_case("acts_where_others_are_forbidden",
                      {{"NCCL_ALGO", "^NVLS,CollnetDirect"}, {"NCCL_PROTO", "^LL128"}}, acts);
  register_tuner_case("leaves_all_with_unreadable_settings", {}, leaves_all_with_unreadable_settings);
  register_tuner_case("leaves_all_without_the_network", {}, leaves_all_without_the_network);
  register_tuner_case("leaves_all_when_the_network_declined", {{"ENABLE_BAGUA_NET", "0"}},
                      leaves_all_when_the_network_declined);
  register_tuner_case("leaves_all_after_the_network_was_finalized", {}, leaves_all_after_the_network_was_finalized);
  register_tuner_case("survives_null", {}, survives_null);
  register_tuner_case("keeps_communicators_apart", {}, keeps_communicators_apart);
  return true;
}

const bool tuner_cases_registered = register_tuner_cases();

}  // namespace
}  // namespace abi_test
