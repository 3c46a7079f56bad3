#include "transport/send_comm.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

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
// With recovery: a stream that does not answer, while another one of the comm does, is given up after this time. If no
// other says anything, or that is sooner, after this part of the time after which the host counts as gone: the rest is
// for a new connection.
constexpr int kSilentStreamMs = 3000;
constexpr int kRecentAnswerMs = 1000;
constexpr int kSilentShare = 3;

// With one stream: what has to be sent again at most, where cutting gains nothing else.
constexpr std::size_t kMaxAloneBytes = 1u << 20;

// For connections that could not be opened, while the comm has others.
constexpr int kReplaceAgainMs = 10000;
// A warning for each loss would fill the log of a job whose network closes connections all the time.
constexpr int kLogMs = 10000;
// What closing a comm may take: NCCL aborts within a second.
constexpr int kLingerMs = 700;
// Of that, for a peer to say whether what its kernel has is damaged. It may not call its comm any more, and there are
// as many comms to close as channels and peers.
constexpr int kDamageMs = 300;

ChunkPolicy chunk_policy(const SendPolicy& policy) {
  ChunkPolicy chunks{1, std::min(policy.min_chunk_bytes, policy.max_chunk_bytes), policy.max_chunk_bytes};
  if (policy.replace_stream) chunks.max_alone_bytes = std::max(kMaxAloneBytes, chunks.max_bytes);
  return chunks;
}

}  // namespace

SendComm::SendComm(std::string peer, std::shared_ptr<StreamArrivals> arrivals, SendPolicy policy, WorkerPool* pool,
                   std::size_t streams, CommStats stats)
    : Comm(std::move(peer), Direction::kSend, policy.measures_rates ? Path::kBetweenHosts : Path::kWithinHost, pool,
           std::move(arrivals), static_cast<bool>(policy.replace_stream), policy.faults, policy.stalls,
           std::move(stats)),
      policy_(std::move(policy)),
      first_streams_(streams),
      workers_own_stripes_(pool->size() > 0 && streams > 1),
      own_chunks_(chunk_policy(policy_)),
      striped_chunks_(chunk_policy(policy_)) {}

SendComm::~SendComm() {
  stop_recovering();
  if (large_under_way_ > 0) policy_.growth->end_busy(monotonic_ns());
  const std::lock_guard<std::mutex> lock(mutex_);
  linger();
  stop_driving();
}

Status SendComm::create(EstablishedConnection connection, SendPolicy policy, WorkerPool* pool,
                        std::unique_ptr<SendComm>* comm, CommStats stats) {
  std::vector<std::unique_ptr<ByteStream>> streams;
  for (OwnedFd& socket : connection.sockets) streams.push_back(make_byte_stream(std::move(socket), policy.faults));
  policy.max_chunk_bytes = connection.max_chunk_bytes;
  policy.checksums = connection.checksums;
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
  {
    const std::lock_guard<std::mutex> lock(created->mutex_);
    created->follow_target(count, 0);
  }
  *comm = std::move(created);
  return Status::ok();
}

std::unique_ptr<DataStream> SendComm::make_stream(std::unique_ptr<ByteStream> bytes, int index, bool replaces) {
  ChunkScheduler* scheduler = is_striped(index) ? &striped_chunks_ : &own_chunks_;
  std::function<void(int)> kick_stream;
  if (policy_.measures_rates) kick_stream = [this](int other) { kick(other); };
  const bool zero_copy = policy_.zero_copy && scheduler == &striped_chunks_;
  auto stream =
      std::make_unique<SendStream>(std::move(bytes), this, index, scheduler, zero_copy, std::move(kick_stream),
                                   recovers_ ? &replay_of(index) : nullptr, replaces, policy_.checksums);
  send_streams_[static_cast<std::size_t>(index)] = stream.get();
  answered_ms_[static_cast<std::size_t>(index)] = coarse_monotonic_ms();
  return stream;
}

bool SendComm::should_stripe(std::size_t bytes) const {
  if (!workers_own_stripes_ || bytes <= policy_.inline_bytes / kAwakeShare) return false;
  if (has_awake_worker() || flows_are_limited()) return true;
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
  if (has_changes()) {
    adopt_changes();
    if (has_failed()) return give_up();
  }
  if (policy_.growth != nullptr && is_large(bytes)) watch_growth(bytes);
  // The schedulers only read through this pointer.
  posted->start(this, next_number_++, const_cast<void*>(data), bytes, registration);
  posted->striped_ = should_stripe(bytes);
  stats_.add_sent(bytes, posted->striped_);
  stats_.posted(posted->number_, posted->striped_ ? CommTrace::Path::kStriped : CommTrace::Path::kInline);
  posted->handed_over_ns_ = 0;
  if (!posted->striped_) {
    own_chunks_.push(posted);
    drive_own_streams();
    kick_replacements();
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

std::size_t SendComm::min_chunk_bytes() const {
  return flows_are_limited() ? std::max<std::size_t>(policy_.min_chunk_bytes / kLimitedFlowShare, 1)
                             : policy_.min_chunk_bytes;
}

std::size_t SendComm::chunks_in(std::size_t bytes) const {
  const std::size_t chunk = min_chunk_bytes();
  return (bytes + chunk - 1) / chunk;
}

void SendComm::kick_streams(std::size_t waiting_bytes) {
  // No more streams than can get a chunk; blocked ones come back by themselves. The first ones first: few workers that
  // stay awake serve medium messages better than many that fall asleep in between. Where each flow is limited, all of
  // them in turn: one after the other, medium messages would have the rate of the first ones only.
  std::size_t wanted = chunks_in(waiting_bytes);
  const std::size_t wide = in_use_ - 1;
  const std::size_t first = flows_are_limited() ? next_kicked_ : 0;
  for (std::size_t step = 0; step < wide && wanted > 0; ++step) {
    const std::size_t index = 1 + (first + step) % wide;
    if (send_streams_[index] == nullptr || send_streams_[index]->is_blocked()) continue;
    kick(static_cast<int>(index));
    next_kicked_ = first + step + 1;
    --wanted;
  }
}

void SendComm::watch_growth(std::size_t bytes) {
  const std::int64_t now_ns = monotonic_ns();
  // Another still waits for its turn, or the kernel has no room, or will be busy with this one. Workers pull a chunk
  // when the kernel takes it, so that their connections hardly ever look full, however long messages wait.
  ChunkScheduler& chunks = should_stripe(bytes) ? striped_chunks_ : own_chunks_;
  const bool waits = large_under_way_ > 0 || all_streams_are_full() || chunks.outlasts_a_round_trip(bytes);
  if (large_under_way_++ == 0) policy_.growth->begin_busy(now_ns);
  policy_.growth->add_posted(waits);
  stats_.set_growth(policy_.growth->target(), policy_.growth->trials(), policy_.growth->gains());
  const auto target = static_cast<std::size_t>(std::min(policy_.growth->target(), policy_.most_streams));
  follow_target(std::max(target, first_streams_), now_ns);
}

bool SendComm::all_streams_are_full() const {
  for (std::size_t index = first_wide_stream(); index < in_use_; ++index) {
    if (send_streams_[index] != nullptr && !send_streams_[index]->is_full()) return false;
  }
  return true;
}

void SendComm::follow_target(std::size_t target, std::int64_t now_ns) {
  if (target > stream_count_) {
    if (now_ns >= ask_again_ns_) asked_for_ = stream_count_;
    if (target > asked_for_) {
      policy_.open_streams(static_cast<int>(target - asked_for_));
      asked_for_ = target;
      ask_again_ns_ = now_ns + kAskAgainNs;
    }
  }
  const std::size_t in_use = std::min(target, stream_count_);
  if (in_use != in_use_ || known_streams_ != stream_count_) use_streams(in_use);
}

void SendComm::use_streams(std::size_t in_use) {
  for (std::size_t index = 0; index < stream_count_; ++index) {
    if (send_streams_[index] != nullptr) send_streams_[index]->set_in_use(index < in_use);
  }
  const bool fewer = in_use < in_use_;
  in_use_ = in_use;
  known_streams_ = stream_count_;
  const auto first = static_cast<int>(first_wide_stream());
  const int end = std::max(static_cast<int>(in_use), first + 1);
  wide_chunks().set_streams(first, end, missing_streams_);
  wide_chunks().limit_flows(std::min(min_chunk_bytes(), policy_.max_chunk_bytes), flows_are_limited());
  if (!fewer && missing_streams_ == 0) return;
  // Those that are out of use now may have been the only ones that were told of a message.
  for (int index = first; index < end; ++index) kick(index);
}

std::string SendComm::stall_reason() {
  std::size_t sends = 0;
  std::size_t bytes = 0;
  for (const Request& request : requests_) {
    if (!request.in_use_ || request.is_done()) continue;
    ++sends;
    bytes += request.capacity_;
  }
  std::string text = std::to_string(bytes) + " bytes in " + std::to_string(sends) +
                     (sends == 1 ? " send that is unfinished" : " sends that are unfinished");
  if (missing_streams_ != 0) {
    return text + ", and " + std::to_string(__builtin_popcountll(missing_streams_)) +
           " lost connections are not replaced yet";
  }
  std::size_t undelivered = 0;
  PeerLiveness worst;
  for (const SendStream* stream : send_streams_) {
    if (stream == nullptr) continue;
    undelivered += stream->undelivered_bytes();
    PeerLiveness liveness;
    if (stream->peer_liveness(&liveness) && liveness.transmissions > worst.transmissions) worst = liveness;
  }
  if (worst.transmissions >= kUnansweredTransmissions) {
    return text + ", and its host has not answered for " + std::to_string(worst.ms / 1000) +
           " s, though data was sent again " + std::to_string(worst.transmissions) +
           " times: the host or the network is down";
  }
  if (undelivered > 0) {
    return text + ", of which " + std::to_string(undelivered) +
           " are unacknowledged: the other host answers, but its process does not read";
  }
  return text + ": the other host has the data, but its process has not read it";
}

bool SendComm::has_own_work(const Request& request) const { return !request.striped_; }

std::size_t SendComm::message_bytes(const Request& request) const { return request.capacity_; }

// [Note: hosts that vanish] The kernel sends keepalive probes only while nothing waits to be acknowledged or sent, so
// they tell a receiver that its peer's host is gone, and not a sender: that repeats its data for a quarter of an hour.
// TCP_USER_TIMEOUT would end that, and also every connection to a rank that lives and does not read for a while, as in
// a long checkpoint. So the sender looks itself: that rank's kernel answers probes of its closed window, a host that is
// gone or behind a network that drops our packets answers nothing.
//
// With recovery a stream that does not answer is replaced first. A host that is gone answers no new connection either.
Status SendComm::check_progress_possible() {
  check_liveness();
  return has_failed() ? give_up() : Status::ok();
}

void SendComm::check_liveness() {
  if (policy_.max_silence_s == 0) return;
  const std::int64_t now_ms = coarse_monotonic_ms();
  if (now_ms < check_liveness_ms_) return;
  // What was seen before a pause, in which nothing was sent, says nothing about what is sent now.
  if (now_ms - check_liveness_ms_ > kForgetLivenessMs) answered_ms_.fill(now_ms);
  check_liveness_ms_ = now_ms + kLivenessCheckMs;
  const std::int64_t max_silence_ms = std::int64_t{policy_.max_silence_s} * 1000;

  std::array<std::int64_t, kMaxStreams> silent_ms{};
  std::array<PeerLiveness, kMaxStreams> liveness;
  std::int64_t last_answer_ms = max_silence_ms;
  for (std::size_t index = 0; index < stream_count_; ++index) {
    SendStream* stream = send_streams_[index];
    if (stream == nullptr) continue;
    stream->sample_delivery();
    if (stream->was_acknowledged()) silent_since_ms_ = 0;
    if (!stream->peer_liveness(&liveness[index])) continue;
    last_answer_ms = std::min(last_answer_ms, liveness[index].ms);
    if (liveness[index].transmissions == 0) {
      answered_ms_[index] = now_ms;
    } else if (liveness[index].transmissions >= kUnansweredTransmissions) {
      // The last answer may be old because the stream had nothing to send.
      silent_ms[index] = std::min(liveness[index].ms, now_ms - answered_ms_[index]);
    }
  }
  std::int64_t stream_ms = max_silence_ms / kSilentShare;
  if (last_answer_ms <= kRecentAnswerMs) stream_ms = std::min<std::int64_t>(kSilentStreamMs, stream_ms);
  for (std::size_t index = 0; index < stream_count_; ++index) {
    if (silent_ms[index] == 0) continue;
    const std::int64_t since_ms = silent_since_ms_ != 0 ? silent_since_ms_ : now_ms - silent_ms[index];
    if (!recovers_ || now_ms - since_ms >= max_silence_ms) {
      if (now_ms - since_ms < max_silence_ms) continue;
      fail(Status::remote_error("that host has not answered for " + std::to_string((now_ms - since_ms) / 1000) +
                                " s, though data was sent again " + std::to_string(liveness[index].transmissions) +
                                " times: it or the network is down, or the network drops packets of " +
                                std::to_string(liveness[index].packet_bytes) +
                                " bytes (compare the MTU of hosts and switches). BAGUA_NET_KEEPALIVE_S=" +
                                std::to_string(policy_.max_silence_s) + " sets how long to wait" + outstanding()));
      stop_driving();
      // An orderly end would wait behind the data that does not get through; a reset may, and tells the peer.
      for (SendStream* stream : send_streams_) {
        if (stream != nullptr) stream->reset();
      }
      return;
    }
    if (silent_ms[index] < stream_ms) continue;
    silent_since_ms_ = since_ms;
    detach(places_[index]);
    send_streams_[index]->give_up(
        Status::remote_error("no answer for " + std::to_string(silent_ms[index] / 1000) + " s on this connection"));
  }
  if (ask_replacements_ms_ != 0 && now_ms >= ask_replacements_ms_) {
    ask_replacements_ms_ = 0;
    for (std::uint64_t missing = missing_streams_; missing != 0; missing &= missing - 1) {
      ask_for_replacement(__builtin_ctzll(missing));
    }
  }
}

void SendComm::tick() {
  // The recovery thread is told of an end once.
  for (DataStream* stream : own_streams_) static_cast<SendStream*>(stream)->listen(true);
  check_liveness();
}

void SendComm::ask_for_replacement(int index) {
  policy_.replace_stream(index == 0 ? Joining::kReplacesFirst : Joining::kReplaces);
}

void SendComm::on_lost(DataStream& stream) {
  auto& lost = static_cast<SendStream&>(stream);
  const int index = lost.index();
  lost.reset();
  std::vector<Chunk> chunks = lost.take_unfinished();
  ++losses_;
  lost_ms_ = monotonic_ms();
  last_loss_ = "data stream " + std::to_string(index) + ": " + lost.loss().message();
  if (lost_ms_ >= next_log_ms_) {
    next_log_ms_ = lost_ms_ + kLogMs;
    log("Bagua-Net: a connection to " + peer_ + " was lost (" + last_loss_ + "): opening another one and sending " +
        std::to_string(chunks.size()) + " chunks again; " + std::to_string(losses_) + " lost on this communicator");
  }
  send_streams_[static_cast<std::size_t>(index)] = nullptr;
  missing_streams_ |= std::uint64_t{1} << index;
  replay_of(index).put(std::move(chunks));
  use_streams(in_use_);
  // Those that were opened for others may take these chunks.
  for (std::size_t other = 0; other < stream_count_; ++other) {
    if (send_streams_[other] != nullptr && send_streams_[other]->replays()) kick(static_cast<int>(other));
  }
  ask_for_replacement(index);
}

int SendComm::place_of(Joining joining) {
  if (joining == Joining::kMore) return stream_count_ < kMaxStreams ? static_cast<int>(stream_count_) : -1;
  const std::uint64_t first = 1;
  const std::uint64_t places = missing_streams_ & (joining == Joining::kReplacesFirst ? first : ~first);
  return places == 0 ? -1 : __builtin_ctzll(places);
}

void SendComm::on_joined(int index) {
  const std::uint64_t bit = std::uint64_t{1} << index;
  const bool replaces = (missing_streams_ & bit) != 0;
  missing_streams_ &= ~bit;
  if (replaces) use_streams(in_use_);
}

bool SendComm::may_take_over(const DataStream& stream) const {
  // All that was to be sent again has been written, and the caller waits for what comes behind it.
  return !static_cast<const SendStream&>(stream).replays();
}

bool SendComm::has_live_stream() const {
  for (const SendStream* stream : send_streams_) {
    if (stream != nullptr && !stream->is_over()) return true;
  }
  return false;
}

std::string SendComm::outstanding() {
  std::string text;
  const auto describe = [&](ReplayQueue& queue) {
    const ReplayQueue::Backlog backlog = queue.backlog();
    if (backlog.chunks == 0) return;
    text += "; " + std::to_string(backlog.bytes) + " bytes in " + std::to_string(backlog.chunks) +
            " chunks wait to be sent again, from message " + std::to_string(backlog.first_message) + " on";
  };
  describe(own_replay_);
  describe(striped_replay_);
  std::size_t unfinished = 0;
  std::uint64_t first = ~std::uint64_t{0};
  for (const Request& request : requests_) {
    if (!request.in_use_ || request.is_done()) continue;
    ++unfinished;
    first = std::min(first, request.number_);
  }
  if (unfinished > 0) {
    text += "; " + std::to_string(unfinished) + " sends are unfinished, from message " + std::to_string(first) + " on";
  }
  if (lost_ms_ != 0) text += "; the last connection was lost " + std::to_string(monotonic_ms() - lost_ms_) + " ms ago";
  return text;
}

void SendComm::on_join_failure(const StreamArrivals::Failure& failed) {
  if (missing_streams_ == 0) return;
  if (has_live_stream() && !own_replay_.any() && !striped_replay_.any()) {
    // Nothing depends on it, until the next loss.
    if (!failed.is_final) ask_replacements_ms_ = coarse_monotonic_ms() + kReplaceAgainMs;
    return;
  }
  fail(Status::remote_error("a lost connection (" + last_loss_ + ") could not be opened again: " + failed.why +
                            outstanding()));
}

void SendComm::linger() {
  if (!recovers_ || has_failed() || has_unfinished_requests()) return;
  drive_alone();
  const std::int64_t end_ms = monotonic_ms() + kLingerMs;
  std::int64_t delivered_ms = 0;
  for (;;) {
    adopt_changes();
    if (has_failed()) return;
    drive_own_streams();
    bool is_delivered = !own_replay_.any() && !striped_replay_.any();
    bool is_acknowledged = is_delivered;
    for (SendStream* stream : send_streams_) {
      if (stream == nullptr) continue;
      stream->ask_for_acknowledgement();
      is_delivered &= stream->is_delivered();
      is_acknowledged &= stream->is_acknowledged();
    }
    const std::int64_t now_ms = monotonic_ms();
    if (is_acknowledged || (is_delivered && !policy_.checksums) || now_ms >= end_ms) return;
    if (!is_delivered) delivered_ms = 0;
    if (is_delivered && delivered_ms == 0) delivered_ms = now_ms;
    if (is_delivered && now_ms - delivered_ms >= kDamageMs) return;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

void SendComm::on_finished(const Request& request) {
  if (request.striped_) --striped_under_way_;
  if (policy_.growth == nullptr || !is_large(request.capacity_)) return;
  const std::int64_t now_ns = monotonic_ns();
  policy_.growth->add_sent(request.capacity_, now_ns);
  if (--large_under_way_ == 0) policy_.growth->end_busy(now_ns);
}

}  // namespace bagua_net
