#include "transport/send_comm.h"

#include <algorithm>

#include "base/monotonic_clock.h"
#include "transport/thread_load.h"

namespace bagua_net {
namespace {

// Streams that were asked for come within round trips, or the peer refused them and may do so again.
constexpr std::int64_t kAskAgainNs = 10'000'000'000;

// Waking a worker takes as long as copying some 256 KiB, handing a message to one that is awake as copying 16 KiB: in
// units of BAGUA_NET_INLINE_BYTES, the largest message that sleeping workers are not waited for, and the largest that
// those awake do not get.
constexpr std::size_t kAsleepMultiple = 4;
constexpr std::size_t kAwakeShare = 4;

constexpr int kLivenessCheckMs = 1000;
constexpr int kForgetLivenessMs = 5000;
// One may be lost, and the answer to the next be on its way.
constexpr int kUnansweredTransmissions = 3;

}  // namespace

SendComm::SendComm(std::string peer, std::shared_ptr<StreamArrivals> arrivals, SendPolicy policy, WorkerPool* pool,
                   std::size_t streams, CommStats stats)
    : Comm(std::move(peer), Direction::kSend, policy.measures_rates ? Path::kBetweenHosts : Path::kWithinHost, pool,
           std::move(arrivals), std::move(stats)),
      policy_(std::move(policy)),
      first_streams_(streams),
      workers_own_stripes_(pool->size() > 0 && streams > 1),
      own_chunks_({1, std::min(policy_.min_chunk_bytes, policy_.max_chunk_bytes), policy_.max_chunk_bytes}),
      striped_chunks_({1, std::min(policy_.min_chunk_bytes, policy_.max_chunk_bytes), policy_.max_chunk_bytes}) {}

SendComm::~SendComm() {
  if (large_under_way_ > 0) policy_.growth->end_busy(monotonic_ns());
  stop_streams();
}

Status SendComm::create(EstablishedConnection connection, SendPolicy policy, WorkerPool* pool,
                        std::unique_ptr<SendComm>* comm, CommStats stats) {
  std::vector<std::unique_ptr<ByteStream>> streams;
  for (OwnedFd& socket : connection.sockets) streams.push_back(make_tcp_byte_stream(std::move(socket)));
  policy.max_chunk_bytes = connection.max_chunk_bytes;
  return create(std::move(streams), std::move(connection.peer), std::move(connection.arrivals), std::move(policy), pool,
                comm, std::move(stats));
}

Status SendComm::create(std::vector<std::unique_ptr<ByteStream>> streams, std::string peer,
                        std::shared_ptr<StreamArrivals> arrivals, SendPolicy policy, WorkerPool* pool,
                        std::unique_ptr<SendComm>* comm, CommStats stats) {
  const std::size_t count = streams.size();
  std::unique_ptr<SendComm> created(
      new SendComm(std::move(peer), std::move(arrivals), std::move(policy), pool, count, std::move(stats)));
  BAGUA_NET_RETURN_IF_ERROR(created->start_streams(std::move(streams)));
  created->follow_target(count, 0);
  *comm = std::move(created);
  return Status::ok();
}

std::unique_ptr<DataStream> SendComm::make_stream(std::unique_ptr<ByteStream> bytes, int index) {
  ChunkScheduler* scheduler = workers_own_stripes_ && index > 0 ? &striped_chunks_ : &own_chunks_;
  std::function<void(int)> kick_stream;
  if (policy_.measures_rates) kick_stream = [this](int other) { kick(other); };
  const bool zero_copy = policy_.zero_copy && scheduler == &striped_chunks_;
  auto stream =
      std::make_unique<SendStream>(std::move(bytes), this, index, scheduler, zero_copy, std::move(kick_stream));
  send_streams_.push_back(stream.get());
  return stream;
}

bool SendComm::should_stripe(std::size_t bytes) const {
  if (!workers_own_stripes_ || bytes <= policy_.inline_bytes / kAwakeShare) return false;
  if (has_awake_worker()) return true;
  // Between hosts each connection may be limited, and what is a large message there takes longer than a wake-up.
  return bytes > policy_.inline_bytes * (policy_.measures_rates ? 1 : kAsleepMultiple);
}

bool SendComm::wants_workers(std::size_t bytes) const {
  if (!workers_own_stripes_ || bytes <= policy_.inline_bytes / kAwakeShare) return false;
  return bytes > policy_.inline_bytes || ThreadLoad::of_this_thread().is_busy();
}

Status SendComm::isend(const void* data, std::size_t bytes, MemoryRegistration* registration, Request** request) {
  *request = nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_failed()) return give_up();
  Request* posted = free_request();
  if (posted == nullptr) return Status::ok();
  if (has_arrivals()) BAGUA_NET_RETURN_IF_ERROR(adopt_arrivals());
  if (policy_.growth != nullptr && is_large(bytes)) watch_growth();
  // The schedulers only read through this pointer.
  posted->start(this, next_number_++, const_cast<void*>(data), bytes, registration);
  posted->striped_ = should_stripe(bytes);
  stats_.add_sent(bytes, posted->striped_);
  stats_.posted(posted->number_);
  posted->handed_over_ns_ = 0;
  if (!posted->striped_) {
    own_chunks_.push(posted);
    drive_own_streams();
    if (wants_workers(bytes)) {
      rouse_workers(chunks_in(bytes));
      stats_->kept_from_asleep.add(1);
    }
  } else {
    const std::int64_t now_ns = monotonic_ns();
    if (striped_under_way_++ == 0 && !all_streams_are_full()) posted->handed_over_ns_ = now_ns;
    (has_awake_worker() ? stats_->handed_to_awake : stats_->handed_to_asleep).add(1);
    const std::size_t waiting = striped_chunks_.push(posted);
    ThreadLoad::of_this_thread().add_handed_over(bytes, now_ns);
    kick_streams(waiting);
  }
  *request = posted;
  return Status::ok();
}

std::size_t SendComm::chunks_in(std::size_t bytes) const {
  return (bytes + policy_.min_chunk_bytes - 1) / policy_.min_chunk_bytes;
}

void SendComm::kick_streams(std::size_t waiting_bytes) {
  // No more streams than can get a chunk; blocked ones come back by themselves. The first ones first: few workers that
  // stay awake serve medium messages better than many that fall asleep in between.
  std::size_t wanted = chunks_in(waiting_bytes);
  for (std::size_t index = 1; index < in_use_ && wanted > 0; ++index) {
    if (streams_[index].stream->is_blocked()) continue;
    kick(static_cast<int>(index));
    --wanted;
  }
}

void SendComm::watch_growth() {
  const std::int64_t now_ns = monotonic_ns();
  // Another still waits for its turn, or the kernel has no room. Workers pull a chunk when the kernel takes it, so that
  // their connections hardly ever look full, however long messages wait.
  const bool waits = large_under_way_ > 0 || all_streams_are_full();
  if (large_under_way_++ == 0) policy_.growth->begin_busy(now_ns);
  policy_.growth->add_posted(waits);
  stats_.set_growth(policy_.growth->target(), policy_.growth->trials(), policy_.growth->gains());
  const auto target = static_cast<std::size_t>(std::min(policy_.growth->target(), policy_.most_streams));
  follow_target(std::max(target, first_streams_), now_ns);
}

bool SendComm::all_streams_are_full() const {
  for (std::size_t index = first_wide_stream(); index < in_use_; ++index) {
    if (!send_streams_[index]->is_full()) return false;
  }
  return true;
}

void SendComm::follow_target(std::size_t target, std::int64_t now_ns) {
  if (target > streams_.size()) {
    if (now_ns >= ask_again_ns_) asked_for_ = streams_.size();
    if (target > asked_for_) {
      policy_.open_streams(static_cast<int>(target - asked_for_));
      asked_for_ = target;
      ask_again_ns_ = now_ns + kAskAgainNs;
    }
  }
  const std::size_t in_use = std::min(target, streams_.size());
  if (in_use == in_use_ && known_streams_ == streams_.size()) return;
  for (std::size_t index = 0; index < send_streams_.size(); ++index) send_streams_[index]->set_in_use(index < in_use);
  const bool fewer = in_use < in_use_;
  in_use_ = in_use;
  known_streams_ = streams_.size();
  const auto first = static_cast<int>(first_wide_stream());
  const int end = std::max(static_cast<int>(in_use), first + 1);
  (workers_own_stripes_ ? striped_chunks_ : own_chunks_).set_streams(first, end);
  if (!fewer) return;
  // Those that are out of use now may have been the only ones that were told of a message.
  for (int index = first; index < end; ++index) kick(index);
}

bool SendComm::has_own_work(const Request& request) const { return !request.striped_; }

std::size_t SendComm::message_bytes(const Request& request) const { return request.capacity_; }

// [Note: hosts that vanish] The kernel sends keepalive probes only while nothing waits to be acknowledged or sent, so
// they tell a receiver that its peer's host is gone, and not a sender: that repeats its data for a quarter of an hour.
// TCP_USER_TIMEOUT would end that, and also every connection to a rank that lives and does not read for a while, as in
// a long checkpoint. So the sender looks itself: that rank's kernel answers probes of its closed window, a host that is
// gone or behind a network that drops our packets answers nothing.
Status SendComm::check_progress_possible() {
  if (policy_.max_silence_s == 0) return Status::ok();
  const std::int64_t now_ms = coarse_monotonic_ms();
  if (now_ms < check_liveness_ms_) return Status::ok();
  // What was seen before a pause, in which nothing was sent, says nothing about what is sent now.
  if (now_ms - check_liveness_ms_ > kForgetLivenessMs) answered_ms_.clear();
  answered_ms_.resize(send_streams_.size(), now_ms);
  check_liveness_ms_ = now_ms + kLivenessCheckMs;
  for (std::size_t index = 0; index < send_streams_.size(); ++index) {
    send_streams_[index]->sample_delivery();
    PeerLiveness liveness;
    if (!send_streams_[index]->peer_liveness(&liveness) || liveness.transmissions == 0) {
      answered_ms_[index] = now_ms;
      continue;
    }
    // The last answer may be old because the stream had nothing to send.
    const std::int64_t silent_ms = std::min(liveness.ms, now_ms - answered_ms_[index]);
    if (liveness.transmissions < kUnansweredTransmissions || silent_ms < std::int64_t{policy_.max_silence_s} * 1000) {
      continue;
    }
    fail(Status::remote_error("that host has not answered for " + std::to_string(silent_ms / 1000) +
                              " s, though data was sent again " + std::to_string(liveness.transmissions) +
                              " times: it or the network is down, or the network drops packets of " +
                              std::to_string(liveness.packet_bytes) +
                              " bytes (compare the MTU of hosts and switches). BAGUA_NET_KEEPALIVE_S=" +
                              std::to_string(policy_.max_silence_s) + " sets how long to wait"));
    const Status failure = give_up();
    // An orderly end would wait behind the data that does not get through; a reset may, and tells the peer.
    for (SendStream* stream : send_streams_) stream->reset();
    return failure;
  }
  return Status::ok();
}

void SendComm::on_finished(const Request& request) {
  if (request.striped_) --striped_under_way_;
  if (policy_.growth == nullptr || !is_large(request.capacity_)) return;
  const std::int64_t now_ns = monotonic_ns();
  policy_.growth->add_sent(request.capacity_, now_ns);
  if (--large_under_way_ == 0) policy_.growth->end_busy(now_ns);
}

}  // namespace bagua_net
