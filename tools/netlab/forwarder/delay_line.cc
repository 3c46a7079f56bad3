#include "delay_line.h"

#include <poll.h>
#include <time.h>
#include <unistd.h>

namespace netlab {

namespace {

constexpr std::int64_t kNsPerSecond = 1'000'000'000;
// Packets taken before those that are due are looked for again.
constexpr int kMaxBatch = 16;

std::int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kNsPerSecond + now.tv_nsec;
}

// There is one writer.
void add(std::atomic<std::uint64_t>& counter, std::uint64_t amount) {
  counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
}

}  // namespace

void DelayLine::run() {
  do {
    do {
      release(monotonic_ns());
    } while (take());
  } while (wait());
}

void DelayLine::release(std::int64_t now) {
  while (!ring_.empty() && ring_.front().release_ns <= now) {
    const std::size_t length = ring_.front().length;
    const auto late = static_cast<std::uint64_t>(now - ring_.front().release_ns);
    if (write(target_, ring_.front_data(), length) < 0) {
      add(refused_, 1);
    } else {
      add(packets_, 1);
      add(bytes_, length);
      add(late_ns_, late);
      if (late > latest_ns_.load(std::memory_order_relaxed)) {
        latest_ns_.store(late, std::memory_order_relaxed);
      }
    }
    ring_.pop();
  }
}

bool DelayLine::take() {
  for (int taken = 0; taken < kMaxBatch; ++taken) {
    char* room = ring_.room();
    if (room == nullptr) {
      add(full_, 1);
      return false;
    }
    const ssize_t length = read(source_, room, kMaxPacketBytes);
    if (length <= 0) {
      return taken > 0;
    }
    ring_.push(static_cast<std::size_t>(length), monotonic_ns() + delay_ns_);
  }
  return true;
}

bool DelayLine::wait() {
  timespec time_left{};
  const timespec* timeout = nullptr;
  if (!ring_.empty()) {
    std::int64_t left = ring_.front().release_ns - monotonic_ns();
    left = left < 0 ? 0 : left;
    time_left.tv_sec = left / kNsPerSecond;
    time_left.tv_nsec = left % kNsPerSecond;
    timeout = &time_left;
  }
  // A full ring has packets that leave, which is waited for.
  pollfd sources[] = {{stop_event_, POLLIN, 0}, {ring_.room() == nullptr ? -1 : source_, POLLIN, 0}};
  ppoll(sources, 2, timeout, nullptr);
  return (sources[0].revents & POLLIN) == 0;
}

Counters DelayLine::counters() const {
  const auto order = std::memory_order_relaxed;
  return {packets_.load(order), bytes_.load(order),   refused_.load(order),
          full_.load(order),    late_ns_.load(order), latest_ns_.load(order)};
}

}  // namespace netlab
