// StreamGrowth: finds out by trials how many connections a comm should use. Networks limit single connections (cloud
// providers by policy, long or lossy paths by TCP's congestion window), and no property of an interface shows the
// limit. While large messages wait because all connections are full, a trial opens four times as many. The throughput
// of the whole interface in busy time, before and after, decides whether the new number is kept. No trial begins while
// a comm's connections move more than networks allow to a few of them, or half of what the interface tells: there the
// processors or the interface are the limit, and more connections are slower.
//
// There is one per network interface, shared by its send comms: if each comm decided for itself, comms would take
// bandwidth from each other, and all of them would grow without a gain. Any thread; the clock is passed in.
//
//   kWatching --messages wait, few connections are not fast, not too soon after a trial that failed--> four times:
//   kSettling kSettling --the new connections have found their rate--> kJudging kJudging  --it gained--> the former
//   number again: kSettlingBack          --it did not--> kWatching kSettlingBack --> kConfirming kConfirming --what was
//   gained is lost again--> four times the number: kWatching   --it is not--> kWatching
//
// Going back protects from chance: rates vary, and a number that was kept by mistake would never be tried again. The
// three windows that are compared must have messages of about the same size: larger ones are faster over any number of
// connections.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/mutex.h"

namespace bagua_net {

class StreamGrowth {
 public:
  // told_bytes_per_ns: the speed that the interface tells; 0: unknown.
  StreamGrowth(int initial, int most, double told_bytes_per_ns = 0)
      : most_(most), told_bytes_per_ns_(told_bytes_per_ns), target_(initial), kept_(initial) {}

  // Connections that a comm should use now.
  int target() const { return target_.load(std::memory_order_relaxed); }

  // Connections that a comm should keep open, including those of a trial that has not ended.
  int kept() const { return kept_.load(std::memory_order_relaxed); }

  // Trials of more connections ever, and those that gained.
  std::uint32_t trials() const { return trials_.load(std::memory_order_relaxed); }
  std::uint32_t gains() const { return gains_.load(std::memory_order_relaxed); }

  // A comm begins to have large messages in flight, or has none any more.
  void begin_busy(std::int64_t now_ns);
  void end_busy(std::int64_t now_ns);
  // A large message was posted. `waits`: more connections might move it sooner.
  void add_posted(bool waits);
  // One was sent.
  void add_sent(std::size_t bytes, std::int64_t now_ns);

 private:
  enum class Phase { kWatching, kSettling, kJudging, kSettlingBack, kConfirming };

  struct Window {
    std::int64_t busy_ns = 0;       // while at least one comm was busy, and short pauses
    std::int64_t comm_busy_ns = 0;  // the same of each comm, added up
    std::size_t bytes = 0;
    int sent_messages = 0;
    int posted_messages = 0;
    int waiting_messages = 0;

    double rate() const { return static_cast<double>(bytes) / static_cast<double>(busy_ns); }
    bool is_short() const;  // most messages waited
    bool is_fast() const;   // a comm, while it was busy
    // Its messages are about as large.
    bool is_like(const Window& other) const;
    double message_bytes() const { return static_cast<double>(bytes) / sent_messages; }
  };

  void count_busy_time(std::int64_t now_ns) REQUIRES(mutex_);
  void close_window(std::int64_t now_ns) REQUIRES(mutex_);
  void begin_trial(const Window& before) REQUIRES(mutex_);
  void end_trial(bool gained, std::int64_t now_ns) REQUIRES(mutex_);

  const int most_;
  const double told_bytes_per_ns_;
  std::atomic<int> target_;
  std::atomic<int> kept_;
  std::atomic<std::uint32_t> trials_{0};
  std::atomic<std::uint32_t> gains_{0};
  Mutex mutex_;
  Phase phase_ GUARDED_BY(mutex_) = Phase::kWatching;
  int busy_comms_ GUARDED_BY(mutex_) = 0;
  std::int64_t busy_since_ns_ GUARDED_BY(mutex_) = 0;
  std::int64_t idle_since_ns_ GUARDED_BY(mutex_) = 0;
  Window window_ GUARDED_BY(mutex_);
  Window before_ GUARDED_BY(mutex_);  // the trial
  double trial_rate_ GUARDED_BY(mutex_) = 0;
  int former_target_ GUARDED_BY(mutex_) = 0;
  int trial_target_ GUARDED_BY(mutex_) = 0;
  std::int64_t next_trial_ns_ GUARDED_BY(mutex_) = 0;
  std::int64_t pause_ns_ GUARDED_BY(mutex_) = 0;  // after the last trial that failed
};

}  // namespace bagua_net
