#include "transport/comm/comm.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/log_sink.h"
#include "base/monotonic_clock.h"
#include "os/tcp_socket.h"

namespace bagua_net {
namespace {

static_assert(CommTrace::kMaxMessages >= kMaxRequestsPerComm);

// What the calling thread moves on one stream before it returns to NCCL, whose progress thread serves every other
// connection too.
constexpr std::size_t kCallerTurnBytes = 1u << 20;

// If one thread drives several streams, they take turns, and each turn is one chunk or one read. With longer turns the
// first stream would take a whole message, although the network may limit each connection. The turns begin with a
// different stream each time, because otherwise the first stream would carry all small messages; where the comm has
// several paths it should, because the path of the first one was chosen for that.
constexpr std::size_t kOneMove = 1;
constexpr int kCallerRounds = 8;

// How long a comm that gives up waits for the network card, which takes milliseconds unless the link is down.
constexpr std::int64_t kReleaseLimitMs = 1000;

}  // namespace

Status Request::test(bool* done, std::size_t* bytes) { return comm_->test(this, done, bytes); }

Comm::~Comm() {
  if (is_stalled_) stalls_->forget(this);
}

Status Comm::start_streams(std::vector<std::unique_ptr<ByteStream>> streams) {
  if (recovers_) recovery_ = pool_->recovery();
  if (recovery_ != nullptr) {
    recovery_id_ = recovery_->new_id();
    if (arrivals_ != nullptr) {
      arrivals_->set_on_change([recovery = recovery_, id = recovery_id_] { recovery->notify(id); });
    }
  }
  const MutexLock lock(mutex_);
  int index = 0;
  for (std::unique_ptr<ByteStream>& bytes : streams) {
    BAGUA_NET_RETURN_IF_ERROR(add_stream(make_stream(std::move(bytes), index++), StreamPhase::kLive));
  }
  return Status::ok();
}

void Comm::publish() {
  {
    const MutexLock lock(mutex_);
    is_whole_ = true;
  }
  if (recovery_ != nullptr) recovery_->add(recovery_id_, this, direction_ == Direction::kSend);
}

Status Comm::drive(std::size_t index) {
  if (is_own(index)) return Status::ok();
  StreamTable::Place& place = streams_[index];
  EventLoopWorker* worker = nullptr;
  BAGUA_NET_RETURN_IF_ERROR(pool_->assign(lane_, static_cast<int>(index), &worker));
  std::uint64_t id = 0;
  place.stream->set_polled();
  BAGUA_NET_RETURN_IF_ERROR(worker->attach(place.stream.get(), &id, lane_.location));
  place.worker_stream_id.store(id);
  place.worker.store(worker);
  // A kick that came before the worker was stored has had no effect.
  worker->kick(id);
  return Status::ok();
}

Status Comm::add_stream(std::unique_ptr<DataStream> stream, StreamPhase phase) {
  const auto index = static_cast<std::size_t>(stream->index());
  StreamTable::Place& place = streams_[index];
  stream->set_stats(stats_.open_stream(stream->index(), local_address(stream->fd())));
  {
    // Either fail() shuts this stream down, or the failure is already visible here.
    const MutexLock lock(failure_mutex_);
    place.stream = std::move(stream);
    if (has_failed()) place.stream->shutdown();
  }
  move(index, phase);
  return drive(index);
}

void Comm::move(std::size_t index, StreamPhase to) {
  streams_.move(index, to);
  if (arrivals_ != nullptr) arrivals_->set_streams(static_cast<int>(kMaxStreams - streams_.free_places()));
  if (is_own(index)) watch(streams_[index]);
}

// While the application does not call the comm, only the recovery thread can notice that a message has to be sent
// again.
void Comm::watch(const StreamTable::Place& place) {
  if (recovery_ == nullptr || place.stream == nullptr || alone_) return;
  std::uint32_t flags = 0;
  if (direction_ == Direction::kSend) flags = EPOLLRDHUP;
  if (place.phase() == StreamPhase::kReplaying) flags = EPOLLIN | EPOLLOUT | EPOLLRDHUP;
  const Status status = recovery_->watch(place.stream->fd(), recovery_id_, flags);
  if (!status.is_ok()) log("Bagua-Net: a connection to " + peer_ + " is not watched: " + status.message());
}

void Comm::detach(std::size_t index) {
  StreamTable::Place& place = streams_[index];
  EventLoopWorker* worker = place.worker.exchange(nullptr);
  if (worker != nullptr) worker->detach(place.stream.get(), place.worker_stream_id.load());
}

void Comm::remove(std::size_t index, StreamPhase to) {
  StreamTable::Place& place = streams_[index];
  detach(index);
  if (recovery_ != nullptr && is_own(index)) recovery_->unwatch(place.stream->fd());
  std::unique_ptr<DataStream> gone;
  {
    const MutexLock lock(failure_mutex_);
    gone = std::move(place.stream);
  }
  move(index, to);
}

void Comm::on_stream_over(int /*index*/, StreamState state) {
  some_are_over_.store(true, std::memory_order_release);
  if (state == StreamState::kLost) ask_for_recovery();
}

bool Comm::take_away_streams() {
  if (!some_are_over_.load(std::memory_order_relaxed)) return false;
  some_are_over_.exchange(false, std::memory_order_acquire);
  bool any = false;
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    StreamTable::Place& place = streams_[index];
    if (place.stream == nullptr || place.phase() == StreamPhase::kEnded) continue;
    if (place.stream->state() == StreamState::kEnded) {
      any |= place.stream->is_given_back();
      place.stream->is_given_back() ? remove(index, on_given_back(index)) : move(index, StreamPhase::kEnded);
      continue;
    }
    if (place.stream->state() != StreamState::kLost) continue;
    detach(index);
    const StreamPhase to = on_lost(*place.stream);
    remove(index, to);
    any = true;
  }
  return any;
}

void Comm::end_replaying() {
  for (std::size_t index = 0; streams_.count(StreamPhase::kReplaying) != 0 && index < streams_.size(); ++index) {
    const StreamTable::Place& place = streams_[index];
    if (place.phase() == StreamPhase::kReplaying && has_replayed(*place.stream)) move(index, StreamPhase::kLive);
  }
}

void Comm::adopt_changes() {
  bool changed = false;
  if (!stopped_) {
    changed = take_away_streams();
    end_replaying();
  }
  if (has_arrivals()) changed |= adopt_arrivals();
  if (stopped_ || has_failed()) return;
  if (changed) on_change();
  ask_for_streams();
}

bool Comm::adopt_arrivals() {
  bool any = false;
  for (StreamArrivals::Arrival& arrival : arrivals_->take()) {
    const int index = stopped_ ? -1 : place_of(arrival);
    if (index < 0) continue;  // the socket closes
    const bool replays = arrival.joining != Joining::kMore && is_own(static_cast<std::size_t>(index));
    const Status status = add_stream(make_stream(make_byte_stream(std::move(arrival.socket), faults_), index),
                                     replays ? StreamPhase::kReplaying : StreamPhase::kLive);
    on_joined(static_cast<std::size_t>(index), arrival);
    stats_->streams_joined.add(1);
    any = true;
    // The peer may already send on this stream, and nobody would read it.
    if (!status.is_ok()) fail(status);
  }
  for (const StreamArrivals::Failure& failed : arrivals_->take_failures()) on_join_failure(failed);
  return any;
}

std::vector<RareLog::Line> Comm::recover() {
  const MutexLock lock(mutex_);
  assert(is_whole_);
  if (!stopped_ && !has_failed()) {
    tick();
    adopt_changes();
    if (streams_.count(StreamPhase::kReplaying) != 0) {
      const bool more = drive_own_streams();
      adopt_changes();
      if (more) ask_for_recovery();
    }
  }
  return std::exchange(log_, {});
}

void Comm::stop_recovering() {
  if (arrivals_ != nullptr) arrivals_->set_on_change({});
  // recovery_ is kept, because streams may still notify it. That has no effect any more.
  if (recovery_ != nullptr) recovery_->remove(recovery_id_);
}

void Comm::drive_alone() {
  alone_ = true;
  for (std::size_t index = 0; index < streams_.size(); ++index) detach(index);
}

void Comm::stop() {
  // Holding mutex_ while waiting for a worker is safe: workers never take it.
  if (stopped_) return;
  const bool is_orderly = !has_failed();
  std::vector<DataStream*> resetting;
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    StreamTable::Place& place = streams_[index];
    if (place.stream == nullptr) continue;
    detach(index);
    if (is_orderly) place.stream->say_end(next_number_);
    if (place.stream->release_memory()) resetting.push_back(place.stream.get());
  }
  const std::int64_t end_ms = monotonic_ms() + kReleaseLimitMs;
  for (DataStream* stream : resetting) {
    if (stream->wait_until_released(static_cast<int>(std::max<std::int64_t>(end_ms - monotonic_ms(), 0)))) continue;
    log("the network card still reads memory of a connection that was reset " + std::to_string(kReleaseLimitMs) +
        " ms ago, and what it sends of it is wrong if the memory changes; BAGUA_NET_MSG_ZEROCOPY=0 avoids that");
    break;
  }
  stopped_ = true;
}

Status Comm::register_memory(void* data, std::size_t bytes, MemoryRegistration** registration) {
  const MutexLock lock(mutex_);
  registrations_.push_back(std::make_unique<MemoryRegistration>(MemoryRegistration{data, bytes}));
  *registration = registrations_.back().get();
  return Status::ok();
}

Status Comm::deregister_memory(MemoryRegistration* registration) {
  bool in_use = false;
  {
    const MutexLock lock(mutex_);
    in_use = std::any_of(requests_.begin(), requests_.end(), [&](const Request& request) {
      return request.in_use_ && request.registration_ == registration && !request.is_done();
    });
  }
  if (in_use) fail(Status::remote_error("the communicator was aborted while data was in flight"));
  const MutexLock lock(mutex_);
  if (in_use) stop();
  const auto found = std::find_if(registrations_.begin(), registrations_.end(),
                                  [&](const auto& owned) { return owned.get() == registration; });
  if (found == registrations_.end()) {
    return Status::internal_error("deregistration of memory that was never registered on this comm");
  }
  registrations_.erase(found);
  return Status::ok();
}

void Comm::fail(Status status) noexcept {
  {
    const MutexLock lock(failure_mutex_);
    if (!failure_.is_ok()) return;
    failure_ = status;
    try {
      failure_ = status.with_context("connection to " + peer_);
      stats_.fail(failure_.message());
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the failure is kept without context
    }
  }
  if (arrivals_ != nullptr) arrivals_->close();
  failed_.store(true);
  if (stalls_ != nullptr) stalls_->forget(this);
  const MutexLock lock(failure_mutex_);
  for (std::size_t index = 0; index < kMaxStreams; ++index) {
    if (shared_streams()[index].stream != nullptr) shared_streams()[index].stream->shutdown();
  }
}

Status Comm::stop_failed() {
  stop();
  return failure();
}

Status Comm::failure() {
  const MutexLock lock(failure_mutex_);
  return failure_;
}

Comm::Unfinished Comm::unfinished() const {
  Unfinished found;
  for (const Request& request : requests_) {
    if (!request.in_use_ || request.is_done()) continue;
    ++found.requests;
    found.capacity_bytes += request.capacity_;
    found.moved_bytes += request.moved_.load(std::memory_order_relaxed);
    found.first_message = std::min(found.first_message, request.number_);
  }
  return found;
}

Request* Comm::free_request() {
  Request& request = requests_[next_number_ % requests_.size()];
  return request.in_use_ ? nullptr : &request;
}

bool Comm::drive_own_streams() {
  if (stopped_) return false;
  const std::size_t count = own_streams();
  if (count <= 1) {
    DataStream* const only = streams_[0].stream.get();
    return only != nullptr && only->progress(kCallerTurnBytes) == StreamProgress::kMore;
  }
  const std::size_t first = lane_.location == PeerLocation::kBetweenHosts && !first_is_nearest_ ? next_own_ % count : 0;
  bool more = true;
  for (int round = 0; more && round < kCallerRounds; ++round) {
    more = false;
    for (std::size_t step = 0; step < count; ++step) {
      const std::size_t index = (first + step) % count;
      DataStream* const stream = streams_[index].stream.get();
      if (stream == nullptr || stream->progress(kOneMove) != StreamProgress::kMore) continue;
      more = true;
      next_own_ = index + 1;
    }
  }
  return more;
}

void Comm::kick(int stream_index) {
  // A kick that comes after the stream was detached has no effect.
  const StreamTable::Place& place = shared_streams()[static_cast<std::size_t>(stream_index)];
  EventLoopWorker* worker = place.worker.load(std::memory_order_acquire);
  if (worker != nullptr) worker->kick(place.worker_stream_id.load(std::memory_order_acquire));
}

bool Comm::has_awake_worker() const {
  EventLoopWorker* worker = streams_[1].worker.load(std::memory_order_relaxed);
  return worker != nullptr && worker->is_awake();
}

void Comm::rouse_workers(std::size_t streams) {
  for (std::size_t index = 1; index < streams_.size() && index <= streams; ++index) {
    EventLoopWorker* worker = streams_[index].worker.load(std::memory_order_relaxed);
    if (worker == nullptr || worker->is_awake()) continue;
    worker->rouse();
    stats_->wake_ups.add(1);
  }
}

Status Comm::test(Request* request, bool* done, std::size_t* bytes) {
  std::string line;
  Status status = Status::ok();
  {
    const MutexLock lock(mutex_);
    status = test_locked(request, done, bytes, &line);
  }
  if (!line.empty()) BAGUA_NET_WARN(line);
  return status;
}

std::string Comm::look_for_stall() {
  const std::int64_t now_ms = coarse_monotonic_ms();
  if (now_ms < look_ms_) return {};
  look_ms_ = now_ms + stalls_->look_again_ms();
  const std::int64_t waited_ms = stats_.oldest_request_ms();
  if (waited_ms < stalls_->after_ms()) return {};
  is_stalled_ = true;
  return stalls_->waits(
      this,
      {peer_, direction_ == Direction::kReceive ? StallReport::Waits::kToReceive : StallReport::Waits::kToSend,
       waited_ms, stall_reason()},
      now_ms);
}

Status Comm::test_locked(Request* request, bool* done, std::size_t* bytes, std::string* line) {
  *done = false;
  if (!request->in_use_) return Status::internal_error("test of a request that is not outstanding");
  if (has_changes()) adopt_changes();
  if (!request->is_done()) {
    if (has_failed()) return stop_failed();
    if (has_own_work(*request)) drive_own_streams();
    if (!request->is_done()) {
      if (has_failed()) return stop_failed();
      if (stalls_ != nullptr) *line = look_for_stall();
      return check_progress_possible();
    }
  }
  *done = true;
  *bytes = message_bytes(*request);
  on_finished(*request);
  stats_.finished(request->number_, *bytes);
  if (is_stalled_ && stats_.oldest_request_ms() < stalls_->after_ms()) {
    is_stalled_ = false;
    *line = stalls_->goes_on(this);
  }
  request->in_use_ = false;
  return Status::ok();
}

}  // namespace bagua_net
