#include "transport/comm.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/log_sink.h"
#include "base/monotonic_clock.h"

namespace bagua_net {
namespace {

static_assert(CommTrace::kMaxMessages >= kMaxRequestsPerComm);

// What the calling thread moves on one stream before it returns to NCCL, whose progress thread serves every other
// connection too.
constexpr std::size_t kCallerTurnBytes = 1u << 20;

// Several streams of one thread move a chunk (or what one read gives) each in turn. With longer turns the first would
// take a whole message before the others are asked, which helps nothing where the network limits each connection. Nor
// would it that the first always begins: small messages, one after the other, would all be its.
constexpr std::size_t kOneMove = 1;
constexpr int kCallerRounds = 8;

constexpr int kLookMs = 1000;

}  // namespace

Status Request::test(bool* done, std::size_t* bytes) { return comm_->test(this, done, bytes); }

Comm::~Comm() {
  if (is_stalled_) [[maybe_unused]]
    const std::string ignored = stalls_->goes_on(this);
}

Status Comm::start_streams(std::vector<std::unique_ptr<ByteStream>> streams) {
  if (recovers_) {
    RecoveryThread* recovery = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(pool_->recovery(&recovery));
    recovery_id_ = recovery->add(this, direction_ == Direction::kSend);
    recovery_ = recovery;
    const std::uint64_t id = recovery_id_;
    if (arrivals_ != nullptr) arrivals_->set_on_change([recovery, id] { recovery->notify(id); });
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::unique_ptr<ByteStream>& bytes : streams) {
    BAGUA_NET_RETURN_IF_ERROR(add_stream(make_stream(std::move(bytes), static_cast<int>(stream_count_), false), false));
  }
  return Status::ok();
}

Status Comm::attach(Place& place, EventLoopWorker* worker) {
  std::uint64_t id = 0;
  place.stream->set_polled(true);
  BAGUA_NET_RETURN_IF_ERROR(worker->attach(place.stream.get(), &id, lane_.path));
  place.worker_stream_id.store(id);
  place.worker.store(worker);
  // Whoever kicked it in between found no worker.
  worker->kick(id);
  return Status::ok();
}

Status Comm::add_stream(std::unique_ptr<DataStream> stream, bool replaces) {
  const int index = stream->index();
  Place& place = places_[static_cast<std::size_t>(index)];
  stream->set_stats(stats_.open_stream(index));
  {
    // Either fail() sees this stream, or this sees the failure.
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    place.stream = std::move(stream);
    if (has_failed()) place.stream->shutdown();
  }
  stream_count_ = std::max(stream_count_, static_cast<std::size_t>(index) + 1);
  if (arrivals_ != nullptr && recovers_ && direction_ == Direction::kReceive) {
    int in_use = 0;
    for (const Place& other : places_) in_use += other.stream != nullptr ? 1 : 0;
    arrivals_->set_free_places(kMaxStreams - in_use);
  }
  if (alone_ || (is_callers(index) && !replaces)) {
    own_streams_.push_back(place.stream.get());
    if (!alone_) watch(*place.stream);
    return Status::ok();
  }
  EventLoopWorker* worker = nullptr;
  if (is_callers(index)) {
    BAGUA_NET_RETURN_IF_ERROR(pool_->assign_replacement(lane_, index, &worker));
    replacements_ |= std::uint64_t{1} << index;
  } else {
    BAGUA_NET_RETURN_IF_ERROR(pool_->assign(lane_, index, &worker));
  }
  return attach(place, worker);
}

// A calling thread that does not call would not notice that a message is to be sent again.
void Comm::watch(const DataStream& stream) {
  if (recovery_ == nullptr || direction_ != Direction::kSend) return;
  const Status status = recovery_->watch(stream.fd(), recovery_id_);
  if (!status.is_ok()) log("Bagua-Net: a connection to " + peer_ + " is not watched: " + status.message());
}

void Comm::detach(Place& place) {
  EventLoopWorker* worker = place.worker.exchange(nullptr);
  if (worker == nullptr) return;
  worker->detach(place.stream.get(), place.worker_stream_id.load());
  place.stream->set_polled(false);
}

void Comm::remove(int index) {
  Place& place = places_[static_cast<std::size_t>(index)];
  detach(place);
  const auto own = std::find(own_streams_.begin(), own_streams_.end(), place.stream.get());
  if (own != own_streams_.end()) {
    own_streams_.erase(own);
    if (recovery_ != nullptr && direction_ == Direction::kSend) recovery_->unwatch(place.stream->fd());
  }
  std::unique_ptr<DataStream> gone;
  {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    gone = std::move(place.stream);
  }
  const std::uint64_t bit = std::uint64_t{1} << index;
  replacements_ &= ~bit;
  over_streams_.fetch_and(~bit);
}

void Comm::on_stream_over(int index, StreamState state) {
  const std::uint64_t bit = std::uint64_t{1} << index;
  over_streams_.fetch_or(bit, std::memory_order_release);
  if (state != StreamState::kLost) return;
  lost_streams_.fetch_or(bit, std::memory_order_release);
  if (recovery_ != nullptr) recovery_->notify(recovery_id_);
}

void Comm::handle_losses() {
  for (std::uint64_t lost = lost_streams_.exchange(0, std::memory_order_acquire); lost != 0; lost &= lost - 1) {
    const int index = __builtin_ctzll(lost);
    Place& place = places_[static_cast<std::size_t>(index)];
    if (place.stream == nullptr || place.stream->state() != StreamState::kLost) continue;
    stats_->streams_lost.add(1);
    detach(place);
    on_lost(*place.stream);
    remove(index);
  }
}

void Comm::take_over_streams() {
  for (std::uint64_t waiting = replacements_; waiting != 0; waiting &= waiting - 1) {
    const int index = __builtin_ctzll(waiting);
    Place& place = places_[static_cast<std::size_t>(index)];
    if (place.stream->is_over() || !may_take_over(*place.stream)) continue;
    detach(place);
    replacements_ &= ~(std::uint64_t{1} << index);
    if (place.stream->is_over()) continue;  // at the last moment: it goes with the losses
    own_streams_.push_back(place.stream.get());
    watch(*place.stream);
  }
}

void Comm::adopt_changes() {
  if (!stopped_ && lost_streams_.load(std::memory_order_relaxed) != 0) handle_losses();
  if (has_arrivals()) adopt_arrivals();
  if (!stopped_ && replacements_ != 0) take_over_streams();
}

void Comm::adopt_arrivals() {
  for (StreamArrivals::Arrival& arrival : arrivals_->take()) {
    const int index = stopped_ ? -1 : place_of(arrival.joining);
    if (index < 0) continue;  // the socket closes
    const bool replaces = arrival.joining != Joining::kMore;
    const Status status =
        add_stream(make_stream(make_byte_stream(std::move(arrival.socket), faults_), index, replaces), replaces);
    stats_->streams_joined.add(1);
    if (status.is_ok()) {
      on_joined(index);
    } else {
      fail(status);  // the peer may send on it already, and nobody would read that
    }
  }
  if (const auto failed = arrivals_->take_failure()) on_join_failure(*failed);
}

std::vector<std::string> Comm::recover() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!stopped_ && !has_failed()) {
    tick();
    adopt_changes();
  }
  return std::exchange(log_, {});
}

void Comm::stop_recovering() {
  if (arrivals_ != nullptr) arrivals_->set_on_change({});
  // recovery_ stays: streams may still notify, for nothing.
  if (recovery_ != nullptr) recovery_->remove(recovery_id_);
}

void Comm::drive_alone() {
  alone_ = true;
  for (std::size_t index = 0; index < stream_count_; ++index) {
    Place& place = places_[index];
    if (place.worker.load() == nullptr) continue;
    detach(place);
    own_streams_.push_back(place.stream.get());
  }
  replacements_ = 0;
}

void Comm::stop_streams() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stop_driving();
}

void Comm::stop_driving() {
  // Holding mutex_ while waiting for a worker is safe: workers never take it.
  if (stopped_) return;
  const bool is_orderly = !has_failed();
  for (std::size_t index = 0; index < stream_count_; ++index) {
    Place& place = places_[index];
    if (place.stream == nullptr) continue;
    detach(place);
    if (is_orderly) place.stream->say_goodbye();
    place.stream->abandon();
  }
  stopped_ = true;
}

Status Comm::register_memory(void* data, std::size_t bytes, MemoryRegistration** registration) {
  const std::lock_guard<std::mutex> lock(mutex_);
  registrations_.push_back(std::make_unique<MemoryRegistration>(MemoryRegistration{data, bytes}));
  *registration = registrations_.back().get();
  return Status::ok();
}

Status Comm::deregister_memory(MemoryRegistration* registration) {
  bool in_use = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    in_use = std::any_of(requests_.begin(), requests_.end(), [&](const Request& request) {
      return request.in_use_ && request.registration_ == registration && !request.is_done();
    });
  }
  if (in_use) {
    fail(Status::remote_error("the communicator was aborted while data was in flight"));
    stop_streams();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(registrations_.begin(), registrations_.end(),
                                  [&](const auto& owned) { return owned.get() == registration; });
  if (found == registrations_.end()) {
    return Status::internal_error("deregistration of memory that was never registered on this comm");
  }
  registrations_.erase(found);
  return Status::ok();
}

void Comm::fail(Status status) {
  {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    if (!failure_.is_ok()) return;
    failure_ = status;
    try {
      failure_ = status.with_context("connection to " + peer_);
      stats_.fail(failure_.message());
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it counts without its context, too
    }
  }
  if (arrivals_ != nullptr) arrivals_->close();
  failed_.store(true);
  if (stalls_ != nullptr) [[maybe_unused]]
    const std::string ignored = stalls_->goes_on(this);
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  for (const Place& place : places_) {
    if (place.stream != nullptr) place.stream->shutdown();
  }
}

Status Comm::give_up() {
  stop_driving();
  return failure();
}

Status Comm::failure() {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  return failure_;
}

bool Comm::has_unfinished_requests() const {
  return std::any_of(requests_.begin(), requests_.end(),
                     [](const Request& request) { return request.in_use_ && !request.is_done(); });
}

Request* Comm::free_request() {
  Request& request = requests_[next_number_ % requests_.size()];
  return request.in_use_ ? nullptr : &request;
}

void Comm::drive_own_streams() {
  if (stopped_) return;
  if (own_streams_.size() <= 1) {
    if (!own_streams_.empty()) own_streams_[0]->progress(kCallerTurnBytes);
    return;
  }
  const std::size_t count = own_streams_.size();
  const std::size_t first = lane_.path == Path::kBetweenHosts ? next_own_ % count : 0;
  bool more = true;
  for (int round = 0; more && round < kCallerRounds; ++round) {
    more = false;
    for (std::size_t step = 0; step < count; ++step) {
      const std::size_t index = (first + step) % count;
      if (own_streams_[index]->progress(kOneMove) != StreamProgress::kMore) continue;
      more = true;
      next_own_ = index + 1;
    }
  }
}

void Comm::kick(int stream_index) {
  // A kick that comes after the stream was detached finds nobody.
  const Place& place = places_[static_cast<std::size_t>(stream_index)];
  EventLoopWorker* worker = place.worker.load(std::memory_order_acquire);
  if (worker != nullptr) worker->kick(place.worker_stream_id.load(std::memory_order_acquire));
}

void Comm::kick_replacements() {
  for (std::uint64_t waiting = replacements_; waiting != 0; waiting &= waiting - 1) kick(__builtin_ctzll(waiting));
}

bool Comm::has_awake_worker() const {
  EventLoopWorker* worker = places_[1].worker.load(std::memory_order_relaxed);
  return worker != nullptr && worker->is_awake();
}

void Comm::rouse_workers(std::size_t streams) {
  for (std::size_t index = 1; index < stream_count_ && index <= streams; ++index) {
    EventLoopWorker* worker = places_[index].worker.load(std::memory_order_relaxed);
    if (worker == nullptr || worker->is_awake()) continue;
    worker->rouse();
    stats_->wake_ups.add(1);
  }
}

Status Comm::test(Request* request, bool* done, std::size_t* bytes) {
  std::string line;
  Status status = Status::ok();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    status = test_locked(request, done, bytes, &line);
  }
  if (!line.empty()) BAGUA_NET_WARN(line);
  return status;
}

std::string Comm::look_for_stall() {
  const std::int64_t now_ms = coarse_monotonic_ms();
  if (now_ms < look_ms_) return {};
  look_ms_ = now_ms + std::min(kLookMs, stalls_->after_ms());
  const std::int64_t waited_ms = stats_.oldest_request_ms();
  if (waited_ms < stalls_->after_ms()) return {};
  is_stalled_ = true;
  return stalls_->waits(this, {peer_, direction_ == Direction::kReceive, waited_ms, stall_reason()}, now_ms);
}

Status Comm::test_locked(Request* request, bool* done, std::size_t* bytes, std::string* line) {
  *done = false;
  if (!request->in_use_) return Status::internal_error("test of a request that is not outstanding");
  if (has_changes()) adopt_changes();
  if (!request->is_done()) {
    if (has_failed()) return give_up();
    if (has_own_work(*request)) drive_own_streams();
    if (!request->is_done()) {
      if (has_failed()) return give_up();
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
