// netlab's forwarder: wires with a delay. Each wire joins two TAP devices, whose descriptors netlab opened and passed
// on; two threads a wire, one for each direction. See docs/how-to/emulate-networks.md.
//
//   forwarder FIRST:SECOND:DELAY_NS:RING_BYTES...      (descriptors and numbers, decimal)
//
// Prints "ready", then for every line on its standard input a line of JSON: a list with the counters of each direction,
// wires in order, first to second before second to first. Ends at the end of its standard input, so that it cannot
// outlive who holds the other end; the devices vanish with the last descriptor.
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

namespace {

// The largest packet that a TAP device gives: 64 KiB with Ethernet and virtio headers; and what reading needs spare.
constexpr std::size_t kMaxPacketBytes = 68UL * 1024;
// Packets taken before those that are due are looked for again.
constexpr int kMaxBatch = 16;
constexpr std::int64_t kNsPerSecond = 1'000'000'000;

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

std::int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kNsPerSecond + now.tv_nsec;
}

// The packets that are under way, oldest first. The memory is mapped twice in a row, so that a packet is never split at
// its end: it is read and written where it lies. It becomes resident as it is first used.
class PacketRing {
 public:
  struct Packet {
    std::int64_t release_ns;  // CLOCK_MONOTONIC: when it leaves
    std::size_t length;
    char* data() { return reinterpret_cast<char*>(this + 1); }
  };

  explicit PacketRing(std::size_t bytes) : bytes_(std::max(bytes, 2 * kMaxPacketBytes)) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    bytes_ = (bytes_ + page - 1) / page * page;
    const int memory = memfd_create("netlab", MFD_CLOEXEC);
    if (memory < 0 || ftruncate(memory, static_cast<off_t>(bytes_)) != 0) fail("netlab forwarder: memory");
    void* reserved = mmap(nullptr, 2 * bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    memory_ = static_cast<char*>(reserved);
    for (char* half : {memory_, memory_ + bytes_}) {
      if (reserved == MAP_FAILED ||
          mmap(half, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory, 0) == MAP_FAILED) {
        fail("netlab forwarder: mmap");
      }
    }
    close(memory);
  }

  bool empty() const { return head_ == tail_; }
  // Where the next packet may be written, with room for kMaxPacketBytes; null while the ring is full.
  Packet* room() { return tail_ - head_ + sizeof(Packet) + kMaxPacketBytes > bytes_ ? nullptr : at(tail_); }
  void push() { tail_ += record_bytes(at(tail_)->length); }
  Packet* front() { return at(head_); }
  void pop() {
    head_ += record_bytes(front()->length);
    if (empty()) head_ = tail_ = 0;  // memory that was just used is in the cache
  }

 private:
  static std::size_t record_bytes(std::size_t length) { return (sizeof(Packet) + length + 15) / 16 * 16; }
  Packet* at(std::size_t position) { return reinterpret_cast<Packet*>(memory_ + position % bytes_); }

  std::size_t bytes_;
  char* memory_ = nullptr;
  std::size_t head_ = 0;  // both only grow, until the ring is empty
  std::size_t tail_ = 0;
};

// One direction of a wire. Every packet that one TAP device's host sends is handed to the other device a fixed time
// after it was taken, in order. Packets pass with their virtio header, so that TCP's 64 KiB packets stay whole: one
// read and one write for each. run() is the body of a thread of its own.
class DelayLine {
 public:
  // `stop_event` becomes readable when run() shall return.
  DelayLine(int source, int target, int stop_event, std::int64_t delay_ns, std::size_t ring_bytes)
      : source_(source), target_(target), stop_event_(stop_event), delay_ns_(delay_ns), ring_(ring_bytes) {}

  void run() {
    do {
      do {
        release(monotonic_ns());
      } while (take());
    } while (wait());
  }

  void print(const char* separator) const {
    std::printf("%s{\"packets\": %" PRIu64 ", \"full\": %" PRIu64 ", \"late_ns\": %" PRIu64 ", \"latest_ns\": %" PRIu64
                "}",
                separator, packets_.load(), full_.load(), late_ns_.load(), latest_ns_.load());
  }

 private:
  void release(std::int64_t now) {
    for (; !ring_.empty() && ring_.front()->release_ns <= now; ring_.pop()) {
      // An interface that is down takes none.
      if (write(target_, ring_.front()->data(), ring_.front()->length) < 0) continue;
      const auto late = static_cast<std::uint64_t>(now - ring_.front()->release_ns);
      packets_ += 1;
      late_ns_ += late;
      if (late > latest_ns_) latest_ns_ = late;
    }
  }

  // Whether any packet was there.
  bool take() {
    for (int taken = 0; taken < kMaxBatch; ++taken) {
      PacketRing::Packet* packet = ring_.room();
      if (packet == nullptr) {
        full_ += 1;
        return false;
      }
      const ssize_t length = read(source_, packet->data(), kMaxPacketBytes);
      if (length <= 0) return taken > 0;
      packet->length = static_cast<std::size_t>(length);
      packet->release_ns = monotonic_ns() + delay_ns_;
      ring_.push();
    }
    return true;
  }

  // Until a packet arrives or leaves; false when run() shall return.
  bool wait() {
    timespec time_left{};
    if (!ring_.empty()) {
      const std::int64_t left = std::max<std::int64_t>(0, ring_.front()->release_ns - monotonic_ns());
      time_left.tv_sec = left / kNsPerSecond;
      time_left.tv_nsec = left % kNsPerSecond;
    }
    // A full ring has packets that leave, which is waited for.
    pollfd sources[] = {{stop_event_, POLLIN, 0}, {ring_.room() == nullptr ? -1 : source_, POLLIN, 0}};
    ppoll(sources, 2, ring_.empty() ? nullptr : &time_left, nullptr);
    return (sources[0].revents & POLLIN) == 0;
  }

  const int source_;
  const int target_;
  const int stop_event_;
  const std::int64_t delay_ns_;
  PacketRing ring_;
  // Written by run()'s thread.
  std::atomic<std::uint64_t> packets_{0};
  std::atomic<std::uint64_t> full_{0};       // times that the ring had no room, so that packets waited at the source
  std::atomic<std::uint64_t> late_ns_{0};    // of all packets together: how much longer than the delay each was kept
  std::atomic<std::uint64_t> latest_ns_{0};  // of one
};

// A network does not wait for the machine's programs. Real-time priority is not given everywhere; then as much of a
// processor as there is to get. A timer may not be late by the 50 us that Linux allows itself to save wake-ups.
void hurry() {
  prctl(PR_SET_TIMERSLACK, 1UL);
  sched_param priority{};
  priority.sched_priority = 1;
  if (sched_setscheduler(0, SCHED_RR, &priority) != 0) setpriority(PRIO_PROCESS, 0, -20);
}

}  // namespace

int main(int count, char** arguments) {
  const int stop_event = eventfd(0, EFD_CLOEXEC);
  if (stop_event < 0) fail("netlab forwarder: eventfd");
  std::vector<std::unique_ptr<DelayLine>> lines;
  for (int number = 1; number < count; ++number) {
    std::int64_t numbers[4] = {};
    char* text = arguments[number];
    for (std::int64_t& one : numbers) {
      one = std::strtoll(text, &text, 10);
      text += *text == ':' ? 1 : 0;
    }
    const int ends[] = {static_cast<int>(numbers[0]), static_cast<int>(numbers[1])};
    const auto ring_bytes = static_cast<std::size_t>(numbers[3]);
    lines.push_back(std::make_unique<DelayLine>(ends[0], ends[1], stop_event, numbers[2], ring_bytes));
    lines.push_back(std::make_unique<DelayLine>(ends[1], ends[0], stop_event, numbers[2], ring_bytes));
  }
  std::vector<std::thread> threads;
  for (const auto& line : lines) {
    threads.emplace_back([delay_line = line.get()] {
      hurry();
      delay_line->run();
    });
  }
  std::printf("ready\n");
  std::fflush(stdout);
  for (int byte = std::getchar(); byte != EOF; byte = std::getchar()) {
    if (byte != '\n') continue;
    for (const auto& line : lines) line->print(&line == lines.data() ? "[" : ", ");
    std::printf("]\n");
    std::fflush(stdout);
  }
  eventfd_write(stop_event, 1);
  for (std::thread& thread : threads) thread.join();
  return 0;
}
