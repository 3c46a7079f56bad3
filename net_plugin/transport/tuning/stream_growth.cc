#include "transport/tuning/stream_growth.h"

#include <algorithm>
#include <utility>

namespace bagua_net {
namespace {

// A window is this long in busy time, which is many round trips of any network. It also has a minimum number of
// messages, because a message counts when it has been sent, and the borders of the window cut messages. After a change,
// connections first have to find their rate, which takes ten round trips on long paths.
constexpr std::int64_t kWindowNs = 100'000'000;
constexpr std::int64_t kSettlingNs = 200'000'000;
constexpr int kWindowMessages = 10;
// A shorter pause between two messages counts as busy time. A small send is done once the kernel has it, so if each
// message waits for the peer's answer, the time that the network takes would look like a pause.
constexpr std::int64_t kShortPauseNs = 3'000'000;

// If more than this part of the messages had to wait, more connections may help.
constexpr double kWaitingShare = 0.5;

// 2 Gb/s of a comm, in the time in which it has messages under way. It begins with four connections, and providers
// limit one to 5 or 10 Gb/s. Between two emulated hosts without a limit, an all-reduce of 4 MiB took 0.48 ms, and 1.3
// during a trial: its messages are cut for 16 connections, and moving them takes all processors. At 25 Gb/s, where each
// of eight comms moves 3, one took 1.4 ms, and 1.8 to 2.0 during a trial.
constexpr double kFastBytesPerNs = 0.25;
// Of what the interface tells. At 25 Gb/s, 128 connections instead of 32 made 4 MiB take 2.6 ms instead of 1.35: they
// lose packets to each other.
constexpr double kFullShare = 0.5;

// If each connection is limited, the rate is proportional to their number until the interface is full. With a constant
// number, the rate varies by 3 to 10 % from window to window.
constexpr int kFactor = 4;
constexpr double kMinGain = 1.2;
// Between the mean sizes of the messages in two windows that are compared. A job's buckets repeat in each step, many to
// a window.
constexpr double kMaxSizeRatio = 1.25;

// The pause after a trial without a gain. It doubles each time, because the network may simply be full.
constexpr std::int64_t kFirstPauseNs = 5'000'000'000;
constexpr std::int64_t kLongestPauseNs = 300'000'000'000;

}  // namespace

void StreamGrowth::begin_busy(std::int64_t now_ns) {
  const MutexLock lock(mutex_);
  if (busy_comms_ > 0) {
    count_busy_time(now_ns);
  } else {
    busy_since_ns_ = now_ns - idle_since_ns_ < kShortPauseNs ? idle_since_ns_ : now_ns;
  }
  ++busy_comms_;
}

void StreamGrowth::end_busy(std::int64_t now_ns) {
  const MutexLock lock(mutex_);
  count_busy_time(now_ns);
  if (--busy_comms_ == 0) idle_since_ns_ = now_ns;
}

void StreamGrowth::count_busy_time(std::int64_t now_ns) {
  const std::int64_t passed_ns = std::max<std::int64_t>(now_ns - busy_since_ns_, 0);
  busy_since_ns_ = now_ns;
  window_.busy_ns += passed_ns;
  window_.comm_busy_ns += passed_ns * busy_comms_;
}

void StreamGrowth::add_posted(bool waits) {
  const MutexLock lock(mutex_);
  ++window_.posted_messages;
  if (waits) ++window_.waiting_messages;
}

void StreamGrowth::add_sent(std::size_t bytes, std::int64_t now_ns) {
  const MutexLock lock(mutex_);
  if (busy_comms_ > 0) count_busy_time(now_ns);
  window_.bytes += bytes;
  ++window_.sent_messages;
  const bool settles = phase_ == Phase::kSettling || phase_ == Phase::kSettlingBack;
  if (window_.busy_ns < (settles ? kSettlingNs : kWindowNs) || window_.sent_messages < kWindowMessages) return;
  close_window(now_ns);
}

bool StreamGrowth::Window::is_short() const { return waiting_messages > kWaitingShare * posted_messages; }

bool StreamGrowth::Window::is_fast() const {
  return static_cast<double>(bytes) > kFastBytesPerNs * static_cast<double>(comm_busy_ns);
}

bool StreamGrowth::Window::is_like(const Window& other) const {
  const double ratio = message_bytes() / other.message_bytes();
  return ratio < kMaxSizeRatio && ratio > 1 / kMaxSizeRatio;
}

void StreamGrowth::close_window(std::int64_t now_ns) {
  const Window closed = std::exchange(window_, {});
  switch (phase_) {
    case Phase::kWatching:
      if (told_bytes_per_ns_ > 0 && closed.rate() >= kFullShare * told_bytes_per_ns_) return;
      if (closed.is_short() && !closed.is_fast() && now_ns >= next_trial_ns_) begin_trial(closed);
      return;
    case Phase::kSettling: phase_ = Phase::kJudging; return;
    case Phase::kJudging:
      trial_rate_ = closed.rate();
      if (!closed.is_like(before_) || trial_rate_ < kMinGain * before_.rate()) {
        end_trial(false, now_ns);
        return;
      }
      target_.store(former_target_, std::memory_order_relaxed);
      phase_ = Phase::kSettlingBack;
      return;
    case Phase::kSettlingBack: phase_ = Phase::kConfirming; return;
    case Phase::kConfirming:
      end_trial(closed.is_like(before_) && trial_rate_ >= kMinGain * closed.rate(), now_ns);
      return;
  }
}

void StreamGrowth::begin_trial(const Window& before) {
  if (target() >= most_) return;
  trials_.fetch_add(1, std::memory_order_relaxed);
  before_ = before;
  former_target_ = target();
  trial_target_ = std::min(kFactor * former_target_, most_);
  target_.store(trial_target_, std::memory_order_relaxed);
  kept_.store(trial_target_, std::memory_order_relaxed);
  phase_ = Phase::kSettling;
}

void StreamGrowth::end_trial(bool gained, std::int64_t now_ns) {
  phase_ = Phase::kWatching;
  target_.store(gained ? trial_target_ : former_target_, std::memory_order_relaxed);
  kept_.store(target(), std::memory_order_relaxed);
  if (gained) {
    gains_.fetch_add(1, std::memory_order_relaxed);
    pause_ns_ = 0;
    return;
  }
  pause_ns_ = std::clamp(2 * pause_ns_, kFirstPauseNs, kLongestPauseNs);
  next_trial_ns_ = now_ns + pause_ns_;
}

}  // namespace bagua_net
