// Two comms over TCP whose number of streams follows StreamGrowth, and the time that makes it grow.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "support/comm_pair.h"
#include "support/traffic.h"
#include "transport/tuning/stream_growth.h"

namespace bagua_net {

constexpr std::size_t kLarge = 65536;  // SendPolicy's min_chunk_bytes

struct Growing {
  StreamGrowth growth;
  std::vector<int> asked;  // of open_streams

  Growing(int initial, int most) : growth(initial, most) {}
};

// The test hands the streams in that join.
struct GrowingComms : Growing, CommPair {
  Traffic traffic{*sender, *receiver};

  GrowingComms(int workers, std::size_t streams, int initial, int most, const SendPolicy& policy = {},
               bool recovers = false)
      : Growing(initial, most), CommPair(settings(workers, streams, most, policy, recovers)) {}

  Settings settings(int workers, std::size_t streams, int most, const SendPolicy& policy, bool recovers) {
    Settings settings = over_tcp(streams, workers);
    settings.watched = Watched::kReceivers;
    settings.sending = policy;
    settings.sending.growth = &growth;
    settings.sending.open_streams = [this](int count) { asked.push_back(count); };
    if (policy.most_streams == 1) settings.sending.most_streams = most;
    settings.receiving.recovers = recovers;
    if (recovers) settings.sending.replace_stream = [](Joining, std::size_t) {};
    return settings;
  }

  void join() {
    auto [near, far] = tcp_pair();
    watch(far);
    receiver_arrivals->hand_in(std::move(far));
    sender_arrivals->hand_in(std::move(near));
  }

  // The sender has closed it.
  bool has_ended(std::size_t index) const {
    std::uint8_t byte = 0;
    return ::recv(watched[index].get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
  }
  // From there on all of them.
  bool have_ended(std::size_t first) const {
    for (std::size_t index = first; index < watched.size(); ++index) {
      if (!has_ended(index)) return false;
    }
    return true;
  }

  std::vector<std::uint64_t> received_by_stream() const {
    std::vector<std::uint64_t> bytes;
    for (const OwnedFd& far : watched) bytes.push_back(bytes_received(far.get()));
    return bytes;
  }
  std::size_t used_streams() const {
    const std::vector<std::uint64_t> bytes = received_by_stream();
    return bytes.size() - static_cast<std::size_t>(std::count(bytes.begin(), bytes.end(), 0u));
  }

  void exchange(const std::vector<std::size_t>& sizes, const std::function<void()>& step = [] {}) {
    traffic.run(sizes, step);
  }
};

// Makes StreamGrowth see windows of 200 ms, long after any that the comms themselves report, and far apart.
class Windows {
 public:
  explicit Windows(StreamGrowth& growth) : growth_(growth) {}

  void pass(int messages) {
    // As many comms as the bytes would need on a network whose connections are slow.
    for (int comm = 0; comm < kComms; ++comm) growth_.begin_busy(now_ns_);
    // More full messages than any that the comms may have reported since the last window.
    for (int message = 0; message < 10 * messages; ++message) growth_.add_posted(true);
    for (int message = 1; message < messages; ++message) growth_.add_sent(kMoreThanAnyNetwork, now_ns_ + 99'000'000);
    growth_.add_sent(kMoreThanAnyNetwork, now_ns_ + 200'000'000);
    for (int comm = 0; comm < kComms; ++comm) growth_.end_busy(now_ns_ + 200'000'000);
    now_ns_ += 1'000'000'000'000;
  }

  // A network on which each connection adds as much: every trial gains.
  void pass_until(int target) {
    for (int window = 0; growth_.target() != target; ++window) {
      CHECK(window < 100);
      pass(growth_.target() * kMessages);
    }
  }

  // Little moves until the number is back at this one. On a slow machine the comm's own messages may have ended the
  // trial.
  void pass_until_back_at(int target) {
    for (int window = 0; growth_.target() > target; ++window) {
      CHECK(window < 100);
      pass(kMessages / 10);
    }
  }

 private:
  static constexpr int kMessages = 100;
  static constexpr std::size_t kMoreThanAnyNetwork = std::size_t{1} << 28;  // in 2 ms
  static constexpr int kComms = 8192;

  StreamGrowth& growth_;
  std::int64_t now_ns_ = 1'000'000'000'000'000'000;
};

}  // namespace bagua_net
