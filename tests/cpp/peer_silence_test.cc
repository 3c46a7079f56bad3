// When a sender replaces streams that are not answered, and when it finds that the peer's host has vanished.
#include "transport/comm/peer_silence.h"

#include <string>

#include "support/check.h"

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

// The streams from 0 on.
PeerSilence::Verdict check(PeerSilence& silence, std::initializer_list<PeerLiveness> streams, std::int64_t now_ms) {
  PeerSilence::Observations observations;
  std::size_t index = 0;
  for (const PeerLiveness& liveness : streams) observations[index++] = liveness;
  return silence.check(observations, now_ms);
}

bool is_healthy(const PeerSilence::Verdict& verdict) { return verdict.host.empty() && verdict.streams.empty(); }

}  // namespace

TEST_CASE(without_a_limit_no_check_is_due) { CHECK(!PeerSilence(0, true).is_due(1)); }

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
  now_ms += 60000;
  CHECK(silence.is_due(now_ms));
  CHECK(is_healthy(check(silence, {unanswered(kMaxSilenceMs)}, now_ms)));
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

TEST_CASE(with_several_paths_a_silent_one_is_left_though_the_others_have_nothing_to_send) {
  PeerSilence silence(kMaxSilenceS, true, true);
  const std::int64_t now_ms = 1000000;
  CHECK(is_healthy(check(silence, {unanswered(9000, 0), unanswered(699)}, now_ms)));
  // A long path is sent again late.
  CHECK(is_healthy(check(silence, {unanswered(9000, 0), unanswered(1499, 1)}, now_ms)));
  CHECK_EQ(check(silence, {unanswered(9000, 0), unanswered(1500, 1)}, now_ms).streams.size(), 1u);
  CHECK_EQ(check(silence, {unanswered(9000, 0), unanswered(700, 2)}, now_ms).streams.size(), 1u);
  // All are silent: it is the host, or they go over one path.
  PeerSilence outage(kMaxSilenceS, true, true);
  CHECK(is_healthy(check(outage, {unanswered(1499), unanswered(1499)}, now_ms)));
  CHECK_EQ(check(outage, {unanswered(1500), unanswered(1500)}, now_ms).streams.size(), 2u);
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

CHECK_MAIN
