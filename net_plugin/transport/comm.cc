#include "transport/comm.h"

#include <algorithm>

namespace bagua_net {
namespace {

// What the calling thread moves on one stream before it returns to NCCL, whose progress thread serves every other
// connection too.
constexpr std::size_t kCallerTurnBytes = 1u << 20;

// Several streams of one thread move a chunk (or what one read gives) each in turn. With longer turns the first would
// take a whole message before the others are asked, which helps nothing where the network limits each connection.
constexpr std::size_t kOneMove = 1;
constexpr int kCallerRounds = 8;

}  // namespace

Status Request::test(bool* done, std::size_t* bytes) { return comm_->test(this, done, bytes); }

Comm::~Comm() = default;

Status Comm::start_streams(std::vector<std::unique_ptr<ByteStream>> streams) {
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.reserve(streams.size());
  for (std::unique_ptr<ByteStream>& bytes : streams) {
    BAGUA_NET_RETURN_IF_ERROR(add_stream(make_stream(std::move(bytes), static_cast<int>(streams_.size()))));
  }
  return Status::ok();
}

Status Comm::add_stream(std::unique_ptr<DataStream> stream) {
  stream->set_stats(stats_.open_stream(stream->index()));
  streams_.push_back({std::move(stream)});
  DrivenStream& driven = streams_.back();
  stream_count_.store(streams_.size());
  // fail() stores the failure before it reads the count: either it sees this stream, or this sees the failure.
  if (has_failed()) driven.stream->shutdown();
  if (streams_.size() == 1 || pool_->size() == 0) {
    own_streams_.push_back(driven.stream.get());
    return Status::ok();
  }
  EventLoopWorker* worker = nullptr;
  BAGUA_NET_RETURN_IF_ERROR(pool_->assign(lane_, driven.stream->index(), &worker));
  BAGUA_NET_RETURN_IF_ERROR(worker->attach(driven.stream.get(), &driven.worker_stream_id, lane_.path));
  driven.worker = worker;
  return Status::ok();
}

Status Comm::adopt_arrivals() {
  for (OwnedFd& socket : arrivals_->take()) {
    if (stopped_ || streams_.size() == streams_.capacity()) continue;  // the socket closes
    const Status status =
        add_stream(make_stream(make_tcp_byte_stream(std::move(socket)), static_cast<int>(streams_.size())));
    stats_->streams_joined.add(1);
    if (status.is_ok()) continue;
    // The peer may send on it already, and nobody would read that.
    fail(status);
    return give_up();
  }
  return Status::ok();
}

void Comm::stop_streams() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stop_driving();
}

void Comm::stop_driving() {
  // Holding mutex_ while waiting for a worker is safe: workers never take it.
  if (stopped_) return;
  for (DrivenStream& driven : streams_) {
    if (driven.worker != nullptr) driven.worker->detach(driven.stream.get(), driven.worker_stream_id);
    driven.stream->abandon();
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
    failure_ = status.with_context("connection to " + peer_);
    stats_.fail(failure_.message());
  }
  failed_.store(true);
  const std::size_t count = stream_count_.load();
  for (std::size_t index = 0; index < count; ++index) streams_[index].stream->shutdown();
}

Status Comm::give_up() {
  stop_driving();
  return failure();
}

Status Comm::failure() {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  return failure_;
}

Request* Comm::free_request() {
  Request& request = requests_[next_number_ % requests_.size()];
  return request.in_use_ ? nullptr : &request;
}

void Comm::drive_own_streams() {
  if (stopped_) return;
  if (own_streams_.size() == 1) {
    own_streams_[0]->progress(kCallerTurnBytes);
    return;
  }
  bool more = true;
  for (int round = 0; more && round < kCallerRounds; ++round) {
    more = false;
    for (DataStream* stream : own_streams_) more |= stream->progress(kOneMove) == StreamProgress::kMore;
  }
}

void Comm::kick(int stream_index) {
  // A kick that comes after the stream was detached finds nobody.
  const DrivenStream& driven = streams_[static_cast<std::size_t>(stream_index)];
  if (driven.worker != nullptr) driven.worker->kick(driven.worker_stream_id);
}

bool Comm::has_awake_worker() const {
  return streams_.size() > 1 && streams_[1].worker != nullptr && streams_[1].worker->is_awake();
}

void Comm::rouse_workers(std::size_t streams) {
  for (std::size_t index = 1; index < streams_.size() && index <= streams; ++index) {
    EventLoopWorker* worker = streams_[index].worker;
    if (worker == nullptr || worker->is_awake()) continue;
    worker->rouse();
    stats_->wake_ups.add(1);
  }
}

Status Comm::test(Request* request, bool* done, std::size_t* bytes) {
  *done = false;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!request->in_use_) return Status::internal_error("test of a request that is not outstanding");
  if (has_arrivals()) BAGUA_NET_RETURN_IF_ERROR(adopt_arrivals());
  if (!request->is_done()) {
    if (has_failed()) return give_up();
    if (has_own_work(*request)) drive_own_streams();
    if (!request->is_done()) {
      if (has_failed()) return give_up();
      return check_progress_possible();
    }
  }
  *done = true;
  *bytes = message_bytes(*request);
  on_finished(*request);
  stats_.finished(request->number_);
  request->in_use_ = false;
  return Status::ok();
}

}  // namespace bagua_net
