#include "transport/stream/event_loop_worker.h"

#include <algorithm>

#include "base/background_thread.h"
#include "base/monotonic_clock.h"

namespace bagua_net {
namespace {

// How much a stream moves before it is the turn of the worker's other streams. Within a host, enough that the loop
// costs little. Between hosts one chunk: otherwise one connection, which the network may limit, would take everything.
constexpr std::size_t kTurnBytes = 1u << 20;
constexpr std::size_t kNetworkTurnBytes = 1;

}  // namespace

EventLoopWorker::~EventLoopWorker() {
  if (!thread_.joinable()) return;
  {
    const MutexLock lock(kick_mutex_);
    stopping_ = true;
  }
  poller_.wake();
  thread_.join();
}

Status EventLoopWorker::start(int number) {
  BAGUA_NET_RETURN_IF_ERROR(poller_.open());
  return start_background_thread(
      "bagua-net-io" + std::to_string(number), &affinity_, [this] { run(); }, &thread_,
      [this](const Status& failure) { fail(failure); });
}

void EventLoopWorker::fail(const Status& failure) {
  const MutexLock lock(streams_mutex_);
  failure_ = failure;
  for (const auto& [id, attached] : streams_) attached.stream->fail(failure);
}

Status EventLoopWorker::attach(DataStream* stream, std::uint64_t* stream_id, PeerLocation location) {
  {
    const CallersLock lock(streams_mutex_);
    BAGUA_NET_RETURN_IF_ERROR(failure_);
    *stream_id = next_id_++;
    streams_.emplace(*stream_id, Attached{stream, location});
    if (location == PeerLocation::kWithinHost) ++within_host_;
  }
  // Edge-triggered: one event per change, none while a parked stream has unread bytes.
  const Status status = poller_.add(stream->fd(), *stream_id, stream->poll_flags() | EPOLLET);
  if (!status.is_ok()) {
    const CallersLock lock(streams_mutex_);
    forget(*stream_id);
  }
  return status;
}

void EventLoopWorker::detach(DataStream* stream, std::uint64_t stream_id) {
  poller_.remove(stream->fd());
  const CallersLock lock(streams_mutex_);
  forget(stream_id);  // ids in runnable_, kicked_ and collected events become stale and are skipped
}

void EventLoopWorker::forget(std::uint64_t stream_id) {
  const auto found = streams_.find(stream_id);
  if (found == streams_.end()) return;
  if (found->second.location == PeerLocation::kWithinHost) --within_host_;
  streams_.erase(found);
}

int EventLoopWorker::spin_us_now() const {
  return within_host_ > 0 ? spin_us_ : std::min(spin_us_, polling_time_.us());
}

void EventLoopWorker::kick(std::uint64_t stream_id) {
  bool wake = false;
  {
    const MutexLock lock(kick_mutex_);
    kicked_.push_back(stream_id);
    has_kicks_.store(true, std::memory_order_relaxed);
    wake = sleeping_;
    sleeping_ = false;
  }
  if (wake) poller_.wake();
}

void EventLoopWorker::rouse() {
  {
    const MutexLock lock(kick_mutex_);
    if (!sleeping_) return;
    sleeping_ = false;
  }
  poller_.wake();
}

void EventLoopWorker::make_runnable(std::uint64_t stream_id) {
  const auto found = streams_.find(stream_id);
  if (found == streams_.end() || found->second.runnable) return;
  found->second.runnable = true;
  runnable_.push_back(stream_id);
}

void EventLoopWorker::take_event(const EpollPoller::Event& event) {
  if ((event.flags & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
    const auto found = streams_.find(event.id);
    // An error alone may be a notice of a zero-copy send.
    if (found != streams_.end() && ((event.flags & (EPOLLRDHUP | EPOLLHUP)) != 0 || found->second.stream->is_broken()))
      found->second.stream->set_peer_ended();
  }
  make_runnable(event.id);
}

void EventLoopWorker::collect_kicks() {
  if (!has_kicks_.load(std::memory_order_relaxed)) return;
  const MutexLock lock(kick_mutex_);
  for (const std::uint64_t id : kicked_) make_runnable(id);
  kicked_.clear();
  has_kicks_.store(false, std::memory_order_relaxed);
}

bool EventLoopWorker::run_streams() {
  next_runnable_.clear();
  for (const std::uint64_t id : runnable_) {
    const auto found = streams_.find(id);
    if (found == streams_.end()) continue;
    const std::size_t turn = found->second.location == PeerLocation::kWithinHost ? kTurnBytes : kNetworkTurnBytes;
    if (found->second.stream->progress(turn) == StreamProgress::kMore) {
      next_runnable_.push_back(id);
    } else {
      found->second.runnable = false;
    }
  }
  runnable_.swap(next_runnable_);
  return !runnable_.empty();
}

// True: from now on a kick wakes the poller.
bool EventLoopWorker::prepare_to_sleep() {
  const MutexLock lock(kick_mutex_);
  if (!kicked_.empty() || stopping_) return false;
  sleeping_ = true;
  awake_.store(false, std::memory_order_relaxed);
  return true;
}

void EventLoopWorker::run() {
  std::vector<EpollPoller::Event> events;
  std::int64_t last_work_us = monotonic_us();
  std::int64_t idle_since_us = last_work_us;
  bool was_busy = false;
  awake_.store(true, std::memory_order_relaxed);
  for (;;) {
    bool busy = false;
    bool worked = false;
    int spin_us = 0;
    {
      const MutexLock lock(streams_mutex_);
      for (const EpollPoller::Event& event : events) take_event(event);
      collect_kicks();
      worked = !runnable_.empty();
      if (worked && !was_busy) polling_time_.add_wait(monotonic_us() - idle_since_us);
      busy = run_streams();
      spin_us = spin_us_now();
    }
    streams_mutex_.step_aside();

    int timeout_ms = 0;
    if (!busy) {
      const std::int64_t now_us = monotonic_us();
      if (worked) last_work_us = idle_since_us = now_us;
      if (now_us - last_work_us >= spin_us) {
        if (prepare_to_sleep()) timeout_ms = -1;
        const MutexLock lock(kick_mutex_);
        if (stopping_) return;
      }
    }
    was_busy = busy;
    poller_.wait(timeout_ms, &events);
    if (timeout_ms != 0) {
      const MutexLock lock(kick_mutex_);
      sleeping_ = false;
      awake_.store(true, std::memory_order_relaxed);
      last_work_us = monotonic_us();
    }
  }
}

}  // namespace bagua_net
