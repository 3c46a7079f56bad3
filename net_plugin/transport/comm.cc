#include "transport/comm.h"

#include <algorithm>

namespace bagua_net {
namespace {

// What the calling thread moves on one stream before it returns to NCCL, whose progress thread serves every other
// connection too.
constexpr std::size_t kCallerTurnBytes = 1u << 20;

}  // namespace

Status Request::test(bool* done, std::size_t* bytes) { return comm_->test(this, done, bytes); }

Comm::~Comm() = default;

Status Comm::start_streams(std::vector<std::unique_ptr<DataStream>> streams, WorkerPool* pool) {
  streams_.reserve(streams.size());
  for (std::unique_ptr<DataStream>& stream : streams) streams_.push_back({std::move(stream)});
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    DrivenStream& driven = streams_[index];
    if (index == 0 || pool->size() == 0) {
      own_streams_.push_back(driven.stream.get());
      continue;
    }
    EventLoopWorker* worker = nullptr;
    BAGUA_NET_RETURN_IF_ERROR(pool->assign(&worker));
    BAGUA_NET_RETURN_IF_ERROR(worker->attach(driven.stream.get(), &driven.worker_stream_id));
    driven.worker = worker;
  }
  return Status::ok();
}

void Comm::stop_streams() {
  // Holding mutex_ while waiting for a worker is safe: workers never take it.
  const std::lock_guard<std::mutex> lock(mutex_);
  for (DrivenStream& driven : streams_) {
    if (driven.worker != nullptr) driven.worker->detach(driven.stream.get(), driven.worker_stream_id);
    driven.worker = nullptr;
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
  }
  failed_.store(true, std::memory_order_release);
  for (DrivenStream& driven : streams_) driven.stream->shutdown();
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
  for (DataStream* stream : own_streams_) stream->progress(kCallerTurnBytes);
}

void Comm::kick(int stream_index) {
  DrivenStream& driven = streams_[static_cast<std::size_t>(stream_index)];
  if (driven.worker != nullptr) driven.worker->kick(driven.worker_stream_id);
}

Status Comm::test(Request* request, bool* done, std::size_t* bytes) {
  *done = false;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!request->in_use_) return Status::internal_error("test of a request that is not outstanding");
  if (!request->is_done()) {
    if (has_failed()) return failure();
    if (has_own_work(*request)) drive_own_streams();
    if (!request->is_done()) {
      if (has_failed()) return failure();
      return check_progress_possible();
    }
  }
  *done = true;
  *bytes = message_bytes(*request);
  request->in_use_ = false;
  return Status::ok();
}

}  // namespace bagua_net
