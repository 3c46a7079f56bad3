// Messages from one comm to another with many under way, every byte verified: in its own receive, once, and nothing
// written beyond it or after it was done. The sender overwrites its memory as soon as a request is done.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "support/comm_parts.h"
#include "support/pause.h"
#include "transport/comm/recv_comm.h"
#include "transport/comm/send_comm.h"

namespace bagua_net {

class Traffic {
 public:
  static constexpr std::size_t kDeepest = 2 * kMaxRequestsPerComm;  // more than a comm takes

  struct Habits {
    std::size_t lag = 0;          // receives are posted when so many more messages were sent, or all
    unsigned receive_one_in = 1;  // looks; of the others none posts a receive
    std::size_t room_beyond = 1;  // a receive has room for so many bytes more than its message
    unsigned seed = 1;
    std::size_t window = kDeepest;
  };

  Traffic(SendComm& sender, RecvComm& receiver) : Traffic(sender, receiver, Habits()) {}
  Traffic(SendComm& sender, RecvComm& receiver, Habits habits)
      : sender_(sender), receiver_(receiver), habits_(habits), random_(habits.seed) {}

  std::size_t messages() const { return next_; }

  // `step` is called before each round of calls.
  void run(const std::vector<std::size_t>& sizes, const std::function<void()>& step = [] {}) {
    const std::size_t begin = next_;
    next_ += sizes.size();
    std::int64_t progress_ms = monotonic_ms();
    Pause pause;
    while (sends_done_ < next_ || receives_done_ < next_) {
      if (monotonic_ms() - progress_ms > kDeadlineMs) {
        check::fail(__FILE__, __LINE__,
                    "no progress: " + std::to_string(sends_done_) + " sent and " + std::to_string(receives_done_) +
                        " received of " + std::to_string(next_));
      }
      step();
      if (posted_ < next_ && posted_ < std::min(sends_done_, receives_done_) + habits_.window) {
        post_send(sizes[posted_ - begin]);
      }
      const bool is_due = received_ + habits_.lag < posted_ || posted_ == next_;
      if (received_ < posted_ && is_due && (random_() % habits_.receive_one_in == 0 || posted_ == next_)) {
        post_receive();
      }
      if (finish_some()) {
        progress_ms = monotonic_ms();
        pause.begin_again();
      } else if (posted_ == next_ || posted_ == std::min(sends_done_, receives_done_) + habits_.window) {
        pause();
      }
    }
  }

 private:
  struct Slot {
    std::size_t size = 0;
    std::vector<std::uint8_t> sent;
    std::vector<std::uint8_t> room;
    Request* send = nullptr;  // nullptr: done, or not posted
    Request* receive = nullptr;
  };

  Slot& slot(std::size_t number) { return slots_[number % slots_.size()]; }

  void post_send(std::size_t size) {
    Slot& one = slot(posted_);
    if (!is_prepared_) {
      one.size = size;
      one.sent = make_message(posted_, size);
    }
    CHECK_OK(sender_.isend(one.sent.data(), size, nullptr, &one.send));
    is_prepared_ = one.send == nullptr;  // no room now
    if (one.send != nullptr) ++posted_;
  }
  void post_receive() {
    Slot& one = slot(received_);
    one.room.assign(one.size + habits_.room_beyond, 0xee);
    CHECK_OK(receiver_.irecv(one.room.data(), one.room.size(), nullptr, &one.receive));
    if (one.receive != nullptr) ++received_;
  }

  // Not in order: a message of many chunks may be overtaken.
  bool finish_some() {
    bool any = false;
    for (std::size_t number = std::min(sends_done_, receives_done_); number < posted_; ++number) {
      Slot& one = slot(number);
      std::size_t bytes = 0;
      bool done = false;
      if (one.send != nullptr) CHECK_OK(one.send->test(&done, &bytes));
      if (done) {
        CHECK_EQ(bytes, one.size);
        one.send = nullptr;
        std::fill(one.sent.begin(), one.sent.end(), std::uint8_t{0x5a});
        any = true;
      }
      done = false;
      if (number < received_ && one.receive != nullptr) CHECK_OK(one.receive->test(&done, &bytes));
      if (done) {
        CHECK_EQ(bytes, one.size);
        one.receive = nullptr;
        CHECK(byte_patterns::all_bytes_are(one.room.data() + one.size, one.room.size() - one.size, 0xee));
        one.room.resize(one.size);
        CHECK(one.room == make_message(number, one.size));
        std::fill(one.room.begin(), one.room.end(), std::uint8_t{0xa5});
        any = true;
      }
    }
    while (sends_done_ < posted_ && slot(sends_done_).send == nullptr) ++sends_done_;
    while (receives_done_ < received_ && slot(receives_done_).receive == nullptr) {
      const std::vector<std::uint8_t>& room = slot(receives_done_).room;
      if (!byte_patterns::all_bytes_are(room.data(), room.size(), 0xa5)) {
        check::fail(__FILE__, __LINE__, "memory was written after its receive was done");
      }
      ++receives_done_;
    }
    return any;
  }

  SendComm& sender_;
  RecvComm& receiver_;
  const Habits habits_;
  std::mt19937 random_;
  std::array<Slot, kDeepest> slots_;
  bool is_prepared_ = false;  // the message that is posted next
  std::size_t next_ = 0;
  std::size_t posted_ = 0;
  std::size_t received_ = 0;  // receives that were posted
  std::size_t sends_done_ = 0;
  std::size_t receives_done_ = 0;
};

}  // namespace bagua_net
