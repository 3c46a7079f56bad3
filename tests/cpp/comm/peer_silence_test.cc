// When a sender replaces streams that are not answered, and when it finds that the peer's host has vanished.
#include "transport/comm/peer_silence.h"

#include <string>

#include "support/check.h"
#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

constexpr int kMaxSilenceS = 30;
constexpr std::int64_t kMaxSilenceMs = 30000;

PeerLiveness unanswered(std::int64_t ms, int transmissions = kUnansweredTransmissions) {
  PeerLiveness liveness;
  liveness.ms = ms;
  liveness.transmissions = transmissions;
  liveness.packet_bytes = 1448;
  return liveness;
}

constexpr std::int64_t kNobodyAnswers = PeerSilence::kNeverAnswered;

// The streams from 0 on, each over a path of its own. elsewhere_ms: how long ago what other paths answered was sent.
PeerSilence::Verdict check(PeerSilence& silence, std::initializer_list<PeerLiveness> streams, std::int64_t now_ms,
                           std::int64_t elsewhere_ms = kNobodyAnswers) {
  PeerSilence::Observations observations;
  std::size_t index = 0;
  for (const PeerLiveness& liveness : streams) {
    observations[index] = {liveness, index};
    ++index;
  }
  return silence.check(observations, now_ms, [&](std::size_t) { return elsewhere_ms; });
}

// At two looks, of which the second finds this. streams: how many are silent then.
std::size_t found_silent(std::initializer_list<PeerLiveness> streams, std::int64_t elsewhere_ms = kNobodyAnswers) {
  PeerSilence silence(kMaxSilenceS, true, true);
  CHECK(check(silence, streams, 1000000 - kCheckPathsMs, elsewhere_ms).streams.empty());
  const PeerSilence::Verdict verdict = check(silence, streams, 1000000, elsewhere_ms);
  CHECK(verdict.host.empty());
  return verdict.streams.size();
}

bool is_healthy(const PeerSilence::Verdict& verdict) { return verdict.host.empty() && verdict.streams.empty(); }

}  // namespace

// The user's 0 ends the error, and not the replacement.
TEST_CASE(without_a_limit_a_silent_path_is_left_and_no_host_has_vanished) {
  PeerSilence silence(0, true, true);
  CHECK(silence.is_due(1));
  const auto look = [&](std::int64_t now_ms) {
    return check(silence, {unanswered(100, 0), unanswered(now_ms)}, 1000000 + now_ms);
  };
  look(700);
  CHECK_EQ(look(900).streams.size(), 1u);
  const std::int64_t day_ms = 86'400'000;
  CHECK(check(silence, {unanswered(day_ms), unanswered(day_ms)}, day_ms).host.empty());
}

TEST_CASE(a_check_is_due_once_a_second) {
  PeerSilence silence(kMaxSilenceS, true);
  CHECK(silence.is_due(100000));
  CHECK(!silence.is_due(100999));
  CHECK(silence.is_due(101000));
}

TEST_CASE(without_recovery_a_host_has_vanished_after_the_limit) {
  PeerSilence silence(kMaxSilenceS, false);
  const std::int64_t now_ms = 1000000;
  CHECK(is_healthy(check(silence, {unanswered(kMaxSilenceMs - 1)}, now_ms)));
  // Two transmissions may be lost in a healthy network.
  CHECK(is_healthy(check(silence, {unanswered(kMaxSilenceMs, kUnansweredTransmissions - 1)}, now_ms)));
  const PeerSilence::Verdict verdict = check(silence, {unanswered(kMaxSilenceMs)}, now_ms);
  CHECK_EQ(verdict.host.find("that host has not answered for 30 s, though data was sent again 3 times"), 0u);
  CHECK(verdict.host.find("BAGUA_NET_KEEPALIVE_S=30 ") != std::string::npos);
}

TEST_CASE(a_stream_that_had_nothing_to_send_was_not_silent) {
  PeerSilence silence(kMaxSilenceS, false);
  const std::int64_t now_ms = 1000000;
  // The last answer is old, and there was nothing to answer until now.
  CHECK(is_healthy(check(silence, {unanswered(2 * kMaxSilenceMs, 0)}, now_ms)));
  CHECK(is_healthy(check(silence, {unanswered(3 * kMaxSilenceMs)}, now_ms + kMaxSilenceMs - 1)));
  CHECK(!is_healthy(check(silence, {unanswered(3 * kMaxSilenceMs)}, now_ms + kMaxSilenceMs)));
}

TEST_CASE(a_pause_without_checks_was_not_silent) {
  PeerSilence silence(kMaxSilenceS, false);
  std::int64_t now_ms = 1000000;
  CHECK(silence.is_due(now_ms));
  silence.add_stream(0, now_ms);
  now_ms += 60000;
  CHECK(silence.is_due(now_ms));
  CHECK(is_healthy(check(silence, {unanswered(kMaxSilenceMs)}, now_ms)));
}

// Nobody has looked for an answer to the replacement.
TEST_CASE(while_this_process_is_stopped_no_host_vanishes) {
  for (const bool has_paths : {false, true}) {
    PeerSilence silence(kMaxSilenceS, true, has_paths);
    std::int64_t now_ms = 1000000;
    const auto look = [&](std::int64_t passed_ms) {
      now_ms += passed_ms;
      CHECK(silence.is_due(now_ms));
      return check(silence, {unanswered(10000)}, now_ms);
    };
    for (int looked = 0; look(1000).streams.empty(); ++looked) CHECK(looked < 2);
    silence.add_stream(0, now_ms);
    CHECK(look(3600000).host.empty());
    // It has vanished all the same.
    for (int looked = 0; look(1000).host.empty(); ++looked) CHECK(looked < 200);
  }
}

TEST_CASE(with_recovery_a_silent_stream_is_replaced_sooner_if_another_is_answered) {
  PeerSilence silence(kMaxSilenceS, true);
  const std::int64_t now_ms = 1000000;
  CHECK(is_healthy(check(silence, {unanswered(500, 0), unanswered(2999)}, now_ms)));
  const PeerSilence::Verdict one = check(silence, {unanswered(500, 0), unanswered(3000)}, now_ms);
  CHECK(one.host.empty());
  CHECK_EQ(one.streams.size(), 1u);
  CHECK_EQ(one.streams[0].index, 1u);
  CHECK_EQ(one.streams[0].ms, 3000);
}

TEST_CASE(with_several_paths_a_silent_one_is_left_once_another_has_answered_meanwhile) {
  CHECK_EQ(found_silent({unanswered(100, 0), unanswered(699)}), 0u);
  CHECK_EQ(found_silent({unanswered(100, 0), unanswered(700, 2)}), 1u);
  // A long path is sent again late.
  CHECK_EQ(found_silent({unanswered(100, 0), unanswered(1499, 1)}), 0u);
  CHECK_EQ(found_silent({unanswered(100, 0), unanswered(1500, 1)}), 1u);
  // The others may have delivered all they had. Then the host is asked over them.
  CHECK_EQ(found_silent({unanswered(9000, 0), unanswered(700, 2)}), 0u);
  CHECK_EQ(found_silent({unanswered(9000, 0), unanswered(700, 2)}, 100), 1u);
}

// A peer whose machine is paused, or an outage: no other path is better.
TEST_CASE(paths_that_are_silent_with_all_others_have_the_time_of_a_busy_host) {
  CHECK_EQ(found_silent({unanswered(2999), unanswered(2999)}), 0u);
  CHECK_EQ(found_silent({unanswered(2999, 0), unanswered(2999)}), 0u);
  CHECK_EQ(found_silent({unanswered(3000), unanswered(3000)}), 2u);
  // What another path answered was sent before, or directly after.
  CHECK_EQ(found_silent({unanswered(9000, 0), unanswered(1000)}, 900), 0u);
}

// The nearest healthy situations to a silent path, as on a machine that is busy.
TEST_CASE(what_this_host_did_not_send_or_had_no_time_to_read_is_not_silent) {
  PeerLiveness late = unanswered(2000, 2);
  late.unanswered_ms = 130;  // nothing was sent for seconds, and nobody looked
  CHECK_EQ(found_silent({unanswered(10, 0), late}), 0u);
  PeerLiveness queued = unanswered(2999);
  queued.went_out = false;
  CHECK_EQ(found_silent({unanswered(10, 0), queued}), 0u);
  queued.ms = 3000;
  CHECK_EQ(found_silent({unanswered(10, 0), queued}), 1u);
  // Between two looks, the answers were read.
  PeerSilence silence(kMaxSilenceS, true, true);
  CHECK(check(silence, {unanswered(10, 0), unanswered(5000)}, 1000000).streams.empty());
  CHECK(silence.is_suspicious());
  CHECK(check(silence, {unanswered(10, 0), unanswered(10, 0)}, 1000200).streams.empty());
  CHECK(!silence.is_suspicious());
  CHECK(check(silence, {unanswered(10, 0), unanswered(5000)}, 1010000).streams.empty());
  // Another connection has taken its place.
  silence.add_stream(1, 1010000);
  CHECK(check(silence, {unanswered(10, 0), unanswered(5000)}, 1020000).streams.empty());
}

// The kernel probes an idle connection after seconds, and a long path answers when this process goes on.
TEST_CASE(while_this_process_is_stopped_no_path_is_silent) {
  PeerSilence silence(kMaxSilenceS, true, true);
  std::int64_t now_ms = 1000000;
  CHECK(silence.is_due(now_ms));
  CHECK(is_healthy(check(silence, {unanswered(10, 0), unanswered(10, 0)}, now_ms)));
  now_ms += 3000;
  for (std::int64_t looked_ms = kCheckPathsMs;; looked_ms += kCheckPathsMs, now_ms += kCheckPathsMs) {
    CHECK(silence.is_due(now_ms));
    // A path that stays silent is left, a look after its limit.
    const bool is_silent = !is_healthy(check(silence, {unanswered(10, 0), unanswered(3000 + looked_ms, 1)}, now_ms));
    CHECK_EQ(is_silent, looked_ms > kSilentLongPathMs + kCheckPathsMs);
    if (is_silent) break;
  }
}

TEST_CASE(with_recovery_silent_streams_are_replaced_after_a_third_of_the_limit) {
  PeerSilence silence(kMaxSilenceS, true);
  const std::int64_t now_ms = 1000000;
  CHECK(is_healthy(check(silence, {unanswered(9999), unanswered(9999)}, now_ms)));
  CHECK_EQ(check(silence, {unanswered(10000), unanswered(10000)}, now_ms).streams.size(), 2u);
}

TEST_CASE(with_recovery_a_host_has_vanished_if_replacements_are_not_answered_either) {
  const std::int64_t now_ms = 1000000;
  for (const bool is_acknowledged : {false, true}) {
    PeerSilence silence(kMaxSilenceS, true);
    CHECK_EQ(check(silence, {unanswered(10000)}, now_ms).streams.size(), 1u);
    silence.add_stream(0, now_ms + 5000);
    if (is_acknowledged) silence.on_acknowledgement();
    CHECK(check(silence, {unanswered(14999)}, now_ms + 19999).host.empty());
    CHECK_EQ(check(silence, {unanswered(15000)}, now_ms + 20000).host.empty(), is_acknowledged);
  }
}

}  // namespace bagua_net
