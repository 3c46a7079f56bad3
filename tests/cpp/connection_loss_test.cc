// Connections are cut while messages are under way, again and again: every message arrives whole, once, in its receive.
// Long run: BAGUA_TEST_FAULTS=<number of cuts> connection_loss_test random_cuts_0_0 (and the others of that name).
#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/context_pair.h"
#include "support/cut_connections.h"

namespace bagua_net {
namespace {

PluginConfig config_with(int workers, std::optional<int> streams = 4) {
  PluginConfig config;
  config.workers = workers;
  config.streams = streams;
  config.keepalive_s = 10;
  return config;
}

std::size_t random_size(std::mt19937& random) {
  switch (random() % 6) {
    case 0: return 0;
    case 1: return random() % 2000;
    case 2: return random() % 70000;
    case 3: return random() % (1u << 20);
    case 4: return random() % (2u << 20);
    default: return random() % (8u << 20);
  }
}

// Messages with as many under way as the comm takes, each verified. The sender overwrites its memory as soon as a
// request is done, and the receiver its own. `step` is called before each round of calls; it ends when that says so.
class Traffic {
 public:
  Traffic(ContextPair& pair, unsigned seed) : pair_(pair), random_(seed) {}

  void run(std::size_t messages, const std::function<void()>& step) {
    const std::size_t end = next_ + messages;
    std::int64_t progress_ms = monotonic_ms();
    while (sends_done_ < end || receives_done_ < end) {
      if (monotonic_ms() - progress_ms > kDeadlineMs) {
        check::fail(__FILE__, __LINE__, "no progress: " + std::to_string(sends_done_) + " sent and " +
                                            std::to_string(receives_done_) + " received of " + std::to_string(end));
      }
      step();
      if (posted_ < end && posted_ < sends_done_ + kWindow && posted_ < receives_done_ + kWindow) {
        Slot& slot = slots_[posted_ % kWindow];
        slot.size = random_size(random_);
        slot.sent = make_message(posted_, slot.size);
        slot.received.assign(slot.size + 1, 0xee);
        slot.is_sending = slot.is_receiving = true;
        slot.receive = nullptr;
        slot.send = pair_.send(slot.sent);
        if (slot.send != nullptr) ++posted_;
      }
      // Receives lag behind, by a few messages.
      if (receives_posted_ < posted_ && (random_() % 4 == 0 || posted_ == end)) {
        Slot& slot = slots_[receives_posted_ % kWindow];
        slot.receive = pair_.receive(slot.received);
        if (slot.receive != nullptr) ++receives_posted_;
      }
      for (std::size_t number = std::min(sends_done_, receives_done_); number < posted_; ++number) {
        Slot& slot = slots_[number % kWindow];
        if (slot.is_sending && is_request_done(slot.send)) {
          slot.is_sending = false;
          std::fill(slot.sent.begin(), slot.sent.end(), std::uint8_t{0x5a});
          progress_ms = monotonic_ms();
        }
        if (slot.is_receiving && slot.receive != nullptr && number < receives_posted_ && is_request_done(slot.receive)) {
          slot.is_receiving = false;
          CHECK_EQ(int{slot.received.back()}, 0xee);
          slot.received.pop_back();
          CHECK(slot.received == make_message(number, slot.size));
          // Nothing writes there any more: verified before the next message takes the place.
          std::fill(slot.received.begin(), slot.received.end(), std::uint8_t{0xa5});
          progress_ms = monotonic_ms();
        }
      }
      while (sends_done_ < posted_ && !slots_[sends_done_ % kWindow].is_sending) ++sends_done_;
      while (receives_done_ < receives_posted_ && !slots_[receives_done_ % kWindow].is_receiving) {
        for (const std::uint8_t byte : slots_[receives_done_ % kWindow].received) {
          if (byte != 0xa5) check::fail(__FILE__, __LINE__, "memory was written after its receive was done");
        }
        ++receives_done_;
      }
    }
    next_ = end;
  }

 private:
  static constexpr std::size_t kWindow = 12;
  struct Slot {
    std::size_t size = 0;
    std::vector<std::uint8_t> sent;
    std::vector<std::uint8_t> received;
    Request* send = nullptr;
    Request* receive = nullptr;
    bool is_sending = false;
    bool is_receiving = false;
  };

  ContextPair& pair_;
  std::mt19937 random_;
  std::array<Slot, kWindow> slots_;
  std::size_t next_ = 0;
  std::size_t posted_ = 0;
  std::size_t receives_posted_ = 0;
  std::size_t sends_done_ = 0;
  std::size_t receives_done_ = 0;
};

int fault_count(int usual) {
  const char* const asked = std::getenv("BAGUA_TEST_FAULTS");
  return asked != nullptr ? std::atoi(asked) : usual;
}

void random_cuts(int sending_workers, int receiving_workers, int streams) {
  const unsigned seed = static_cast<unsigned>(100 * sending_workers + 10 * receiving_workers + streams);
  std::mt19937 random(seed);
  ContextPair pair(config_with(sending_workers, streams), config_with(receiving_workers, streams));
  Traffic traffic(pair, seed);
  const int faults = fault_count(40);
  int cuts = 0;
  std::size_t messages = 0;
  std::int64_t next_us = 0;
  while (cuts < faults) {
    traffic.run(10, [&] {
      const std::int64_t now_us = monotonic_us();
      if (now_us < next_us || cuts >= faults) return;
      cuts += cut_some(random, 2 * static_cast<std::size_t>(streams));
      next_us = now_us + static_cast<std::int64_t>(random() % (random() % 3 == 0 ? 1000 : 30000));
    });
    messages += 10;
  }
  traffic.run(10, [] {});
  std::printf("        %d cuts, %zu messages\n", cuts, messages + 10);
}

}  // namespace

TEST_CASE(without_faults) {
  for (const int workers : {0, 2}) {
    ContextPair pair(config_with(workers), config_with(workers));
    Traffic(pair, 1).run(60, [] {});
  }
}

TEST_CASE(random_cuts_without_workers) { random_cuts(0, 0, 4); }

TEST_CASE(random_cuts_with_workers) { random_cuts(2, 2, 4); }

TEST_CASE(random_cuts_with_workers_of_the_sender) { random_cuts(2, 0, 3); }

TEST_CASE(random_cuts_with_workers_of_the_receiver) { random_cuts(0, 2, 3); }

TEST_CASE(random_cuts_of_a_single_stream) { random_cuts(0, 0, 1); }

TEST_CASE(random_cuts_of_a_single_stream_with_workers) { random_cuts(2, 2, 1); }

}  // namespace bagua_net

CHECK_MAIN
