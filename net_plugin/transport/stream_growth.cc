#include "transport/stream_growth.h"

#include <algorithm>

namespace bagua_net {
namespace {

// A window is this much time in use: many round trips of any network, and at 400 Mb/s still ten messages.
constexpr std::int64_t kWindowNs = 200'000'000;

// Most messages found every connection full: more connections may help.
constexpr double kFullShare = 0.5;

// Twice the connections under a limit of each flow are twice the rate, until the interface is full. A tenth is more
// than the rate of one and the same number of connections varies from window to window.
constexpr double kLeastGain = 1.1;

// After a trial without gain. It doubles each time: a network that is simply full is asked ever more rarely.
constexpr std::int64_t kFirstPauseNs = 5'000'000'000;
constexpr std::int64_t kLongestPauseNs = 300'000'000'000;

}  // namespace

void StreamGrowth::begin_busy(std::int64_t now_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (busy_comms_++ == 0) busy_since_ns_ = now_ns;
}

void StreamGrowth::end_busy(std::int64_t now_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--busy_comms_ == 0) window_.busy_ns += std::max<std::int64_t>(now_ns - busy_since_ns_, 0);
}

void StreamGrowth::add_message(std::size_t bytes, bool full, std::int64_t now_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (busy_comms_ > 0) {
    window_.busy_ns += std::max<std::int64_t>(now_ns - busy_since_ns_, 0);
    busy_since_ns_ = now_ns;
  }
  window_.bytes += bytes;
  ++window_.messages;
  if (full) ++window_.full_messages;
  if (window_.busy_ns >= kWindowNs) close_window(now_ns);
}

void StreamGrowth::close_window(std::int64_t now_ns) {
  const Window closed = window_;
  window_ = {};
  switch (phase_) {
    case Phase::kWatching: {
      const int target = target_.load(std::memory_order_relaxed);
      const bool is_full = closed.full_messages > kFullShare * closed.messages;
      if (!is_full || target >= most_ || now_ns < next_trial_ns_) return;
      former_rate_ = closed.rate();
      former_target_ = target;
      target_.store(std::min(2 * target, most_), std::memory_order_relaxed);
      phase_ = Phase::kSettling;
      return;
    }
    case Phase::kSettling: phase_ = Phase::kJudging; return;
    case Phase::kJudging:
      end_trial(closed.rate() >= kLeastGain * former_rate_, now_ns);
      phase_ = Phase::kWatching;
      return;
  }
}

void StreamGrowth::end_trial(bool gained, std::int64_t now_ns) {
  if (gained) {
    pause_ns_ = 0;
    return;
  }
  target_.store(former_target_, std::memory_order_relaxed);
  pause_ns_ = std::clamp(2 * pause_ns_, kFirstPauseNs, kLongestPauseNs);
  next_trial_ns_ = now_ns + pause_ns_;
}

}  // namespace bagua_net
