#include "transport/stream/worker_pool.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/log_sink.h"
#include "base/monotonic_clock.h"

namespace bagua_net {
namespace {

// Most comms have three streams for workers. They are distributed evenly over the pool.
constexpr std::size_t kUsualStreams = 3;

}  // namespace

WorkerPool::Lane WorkerPool::open_lane(Direction direction, PeerLocation location, std::size_t turn) {
  const MutexLock lock(mutex_);
  start();
  std::vector<std::optional<PeerLocation>>& turns = turns_[static_cast<std::size_t>(direction)];
  if (turns.size() <= turn) turns.resize(turn + 1);
  turns[turn] = location;
  // Those before it that may go there. Of those whose handshakes go on, most do.
  const auto elsewhere = std::count_if(turns.begin(), turns.begin() + static_cast<std::ptrdiff_t>(turn),
                                       [=](const auto& one) { return one && *one != location; });
  const std::size_t number = turn - static_cast<std::size_t>(elsewhere);
  // The first streams of a comm and of its counterpart in the ring should not meet.
  return {direction == Direction::kSend ? number : number + width(location) / 2, location};
}

void WorkerPool::start() {
  if (std::exchange(has_started_, true)) return;
  for (int number = 0; number < wanted_; ++number) {
    auto started = std::make_unique<EventLoopWorker>(spin_us_, affinity_);
    const Status status = started->start(number);
    if (!status.is_ok()) {
      BAGUA_NET_WARN("Bagua-Net: going on with " + std::to_string(number) + " I/O threads instead of " +
                     std::to_string(wanted_) + ": " + status.message());
      break;
    }
    workers_.push_back(std::move(started));
  }
  size_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
}

Status WorkerPool::assign(const Lane& lane, int stream_index, EventLoopWorker** worker) {
  const MutexLock lock(mutex_);
  if (workers_.empty()) return Status::internal_error("a worker was asked of a pool without workers");
  const std::size_t count = width(lane.location);
  const std::size_t distance = std::max<std::size_t>(count / kUsualStreams, 1);
  *worker = workers_[(lane.first + static_cast<std::size_t>(stream_index) * distance) % count].get();
  return Status::ok();
}

RecoveryThread* WorkerPool::recovery() {
  const MutexLock lock(mutex_);
  if (!std::exchange(has_started_recovery_, true)) {
    auto started = std::make_unique<RecoveryThread>();
    const Status status = started->start(links_);
    if (!status.is_ok()) {
      BAGUA_NET_WARN("Bagua-Net: connections that are lost are replaced only while the application calls: " +
                     status.message());
      return nullptr;
    }
    recovery_ = std::move(started);
  }
  return recovery_.get();
}

void WorkerPool::close(std::unique_ptr<Recoverable> closing) {
  if (closing->is_closed(monotonic_ms())) return;
  RecoveryThread* const thread = running_recovery();
  // Without it, the destructor waits.
  if (thread != nullptr) thread->close(std::move(closing));
}

bool WorkerPool::is_closing() {
  RecoveryThread* const thread = running_recovery();
  return thread != nullptr && thread->is_closing();
}

void WorkerPool::wait_until_closed() {
  if (RecoveryThread* const thread = running_recovery()) thread->wait_until_closed();
}

RecoveryThread* WorkerPool::running_recovery() {
  const MutexLock lock(mutex_);
  return recovery_.get();
}

void WorkerPool::stop() {
  const MutexLock lock(mutex_);
  recovery_.reset();
  workers_.clear();
  has_started_ = has_started_recovery_ = false;
  size_.store(wanted_, std::memory_order_relaxed);
}

namespace {

struct Cost {
  std::int64_t picoseconds;  // of a core, for a byte that is sent and one that is received
  int unknown_mbps;          // what an interface of unknown speed is taken for
  // What workers are counted for at least. Those of a cipher compute between two chunks, so each more of them costs
  // more: six carry 25 Gb/s each way as ten do, with 2.8 cores less at both ends.
  int least_mbps;
};

// Without a cipher they wait more than they work, and leave half of the CPUs to the application, but four are few.
constexpr int kFew = 4;

Cost cost_of(Cipher cipher) {
  switch (cipher) {
    case Cipher::kNone: break;
    case Cipher::kAes256Gcm: return {1000, 80'000, 48'000};
    case Cipher::kChaCha20Poly1305: return {2000, 80'000, 48'000};
  }
  return {640, 100'000, 50'000};
}

}  // namespace

int network_workers(int fastest_mbps, Cipher cipher, int cpus, bool joins) {
  constexpr std::int64_t kPerMbps = 8'000'000;  // picoseconds in which 1 Mb/s moves a byte
  const Cost cost = cost_of(cipher);
  const int mbps = fastest_mbps == 0 ? cost.unknown_mbps : std::max(fastest_mbps, cost.least_mbps);
  const std::int64_t busy = mbps * (joins ? cost.picoseconds * 3 / 2 : cost.picoseconds);
  const auto workers = static_cast<int>((busy + kPerMbps - 1) / kPerMbps);
  return cipher == Cipher::kNone ? std::min(workers, std::max(kFew, cpus / 2)) : workers;
}

}  // namespace bagua_net
