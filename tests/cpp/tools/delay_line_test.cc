// PacketRing and DelayLine of netlab's forwarder: packets leave in order, unchanged and not before their time. Socket
// pairs that keep packets apart stand in for TAP devices.
#include "forwarder/delay_line.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "forwarder/packet_ring.h"
#include "support/check.h"

namespace netlab {
namespace {

constexpr std::int64_t kMs = 1'000'000;
constexpr int kPatienceMs = 20'000;

std::int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 * kMs + now.tv_nsec;
}

std::string packet(std::size_t length, unsigned number) {
  std::string text(length, static_cast<char>('a' + number % 26));
  return text;
}

void push(PacketRing& ring, const std::string& text, std::int64_t release_ns) {
  char* room = ring.room();
  CHECK(room != nullptr);
  std::copy(text.begin(), text.end(), room);
  ring.push(text.size(), release_ns);
}

std::string front(const PacketRing& ring) { return {ring.front_data(), ring.front().length}; }

TEST_CASE(a_ring_gives_back_what_was_put_in_whatever_the_order_of_the_calls) {
  std::minstd_rand random(7);  // NOLINT(bugprone-random-generator-seed): the same packets in every run
  PacketRing ring(1 << 20);
  std::deque<std::string> expected;
  bool was_full = false;
  for (unsigned number = 0; number < 20000; ++number) {
    // Phases of growing and of shrinking, so that it is full at times and empty at others.
    const bool grows = number / 500 % 2 == 0 ? random() % 4 != 0 : random() % 4 == 0;
    if (grows && ring.room() != nullptr) {
      expected.push_back(packet(random() % 3 == 0 ? random() % kMaxPacketBytes : random() % 100, number));
      push(ring, expected.back(), number);
    } else if (!expected.empty()) {
      was_full = was_full || ring.room() == nullptr;
      CHECK(!ring.empty());
      CHECK(front(ring) == expected.front());
      ring.pop();
      expected.pop_front();
    }
    CHECK_EQ(ring.empty(), expected.empty());
  }
  CHECK(was_full);
}

TEST_CASE(a_full_ring_has_room_again_when_packets_have_left) {
  PacketRing ring(1);
  push(ring, packet(kMaxPacketBytes, 0), 1);
  push(ring, packet(kMaxPacketBytes, 1), 2);
  CHECK(ring.room() == nullptr);
  ring.pop();
  push(ring, packet(10, 2), 3);
  CHECK_EQ(ring.front().release_ns, std::int64_t{2});
  ring.pop();
  CHECK(front(ring) == packet(10, 2));
  ring.pop();
  CHECK(ring.empty());
}

class Wire {
 public:
  explicit Wire(std::int64_t delay_ns, std::size_t ring_bytes = 4 << 20) : stop_(eventfd(0, EFD_CLOEXEC)) {
    for (auto& pair : pairs_) {
      CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair.data()), 0);
    }
    // Not the target: it would refuse packets where the receiver is late.
    CHECK_EQ(fcntl(pairs_[0][1], F_SETFL, O_NONBLOCK), 0);
    line_ = std::make_unique<DelayLine>(pairs_[0][1], pairs_[1][1], stop_, delay_ns, ring_bytes);
    thread_ = std::thread([this] { line_->run(); });
  }
  ~Wire() {
    end();
    close(stop_);
    for (const auto& pair : pairs_) {
      for (const int descriptor : pair) {
        if (descriptor >= 0) close(descriptor);
      }
    }
  }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  void end() {
    eventfd_write(stop_, 1);
    if (thread_.joinable()) thread_.join();
  }
  void send(const std::string& text) {
    CHECK_EQ(write(pairs_[0][0], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  std::string receive() {
    pollfd source{pairs_[1][0], POLLIN, 0};
    CHECK_EQ(poll(&source, 1, kPatienceMs), 1);
    std::string text(kMaxPacketBytes, '\0');
    const ssize_t length = read(pairs_[1][0], text.data(), text.size());
    CHECK(length > 0);
    text.resize(static_cast<std::size_t>(length));
    return text;
  }
  void close_receiver() {
    close(pairs_[1][0]);
    pairs_[1][0] = -1;
  }
  Counters counters() const { return line_->counters(); }

 private:
  int stop_;
  std::array<std::array<int, 2>, 2> pairs_{};  // by end of the wire: the test's socket, the line's
  std::unique_ptr<DelayLine> line_;
  std::thread thread_;
};

TEST_CASE(packets_leave_in_order_unchanged_and_not_before_their_time) {
  constexpr std::int64_t kDelay = 30 * kMs;
  Wire wire(kDelay);
  std::vector<std::int64_t> sent;
  for (unsigned number = 0; number < 10; ++number) {
    sent.push_back(now_ns());
    wire.send(packet(1000 * (number + 1), number));
  }
  for (unsigned number = 0; number < 10; ++number) {
    CHECK(wire.receive() == packet(1000 * (number + 1), number));
    CHECK(now_ns() - sent[number] >= kDelay);
  }
  wire.end();
  const Counters counted = wire.counters();
  CHECK_EQ(counted.packets, std::uint64_t{10});
  CHECK_EQ(counted.bytes, std::uint64_t{55000});
  CHECK(counted.late_ns >= counted.latest_ns);
}

TEST_CASE(a_full_ring_keeps_packets_at_their_source) {
  Wire wire(5 * kMs, 1);  // raised to two of the largest
  std::thread sender([&] {
    for (unsigned number = 0; number < 12; ++number) wire.send(packet(60000, number));
  });
  for (unsigned number = 0; number < 12; ++number) CHECK(wire.receive() == packet(60000, number));
  sender.join();
  wire.end();
  CHECK_EQ(wire.counters().packets, std::uint64_t{12});
  CHECK(wire.counters().full > 0);
}

TEST_CASE(what_the_target_does_not_take_is_counted_and_does_not_stop_the_line) {
  signal(SIGPIPE, SIG_IGN);  // a TAP device has none
  Wire wire(0);
  wire.close_receiver();
  for (unsigned number = 0; number < 3; ++number) wire.send("x");
  const std::int64_t deadline = now_ns() + kPatienceMs * kMs;
  while (wire.counters().refused < 3) {
    CHECK(now_ns() < deadline);
    std::this_thread::yield();
  }
  CHECK_EQ(wire.counters().packets, std::uint64_t{0});
}

TEST_CASE(it_ends_while_packets_are_under_way) {
  Wire wire(3600 * 1000 * kMs);
  wire.send("x");
  wire.end();
  CHECK_EQ(wire.counters().packets, std::uint64_t{0});
}

}  // namespace
}  // namespace netlab
