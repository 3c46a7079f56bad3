#include "transport/comm/send_comm.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <thread>
#include <utility>

#include "base/monotonic_clock.h"
#include "transport/recovery/recovery_timing.h"
#include "transport/tuning/thread_load.h"

namespace bagua_net {
namespace {

// The largest message for which sleeping workers are not woken, in units of BAGUA_NET_INLINE_BYTES. Waking a worker
// takes as long as copying about 256 KiB.
constexpr std::size_t kAsleepMultiple = 4;

// The largest chunk of a comm with one stream. Chunks gain nothing there, except that a loss resends less.
constexpr std::size_t kMaxAloneBytes = 1u << 20;

ChunkPolicy chunk_policy(const SendPolicy& policy) {
  ChunkPolicy chunks{1, std::min(policy.min_chunk_bytes, policy.max_chunk_bytes), policy.max_chunk_bytes};
  if (policy.measures_rates) chunks.uncut_bytes = chunks.max_bytes;
  if (policy.replace_stream) chunks.max_alone_bytes = std::max(kMaxAloneBytes, chunks.max_bytes);
  return chunks;
}

// The pause before a replacement that failed is requested again, while the comm has other connections.
constexpr int kReplaceAgainMs = 10000;
// The time limit for closing a comm. NCCL aborts within a second.
constexpr int kLingerMs = 700;
// The part of it that is spent waiting for the peer to check the data in its kernel for damage. The peer may not call
// its comm any more, and a comm is closed for each channel and peer.
constexpr int kDamageMs = 300;

}  // namespace

SendComm::SendComm(std::string peer, std::shared_ptr<StreamArrivals> arrivals, SendPolicy policy, WorkerPool* pool,
                   std::size_t streams, CommStats stats)
    : Comm(std::move(peer), Direction::kSend,
           policy.measures_rates ? PeerLocation::kBetweenHosts : PeerLocation::kWithinHost, policy.turn, pool,
           std::move(arrivals), static_cast<bool>(policy.replace_stream), policy.faults, policy.stalls,
           std::move(stats)),
      policy_(std::move(policy)),
      first_streams_(streams),
      workers_own_stripes_(pool->size() > 0 && streams > 1),
      own_chunks_(chunk_policy(policy_), policy_.path_loads),
      striped_chunks_(chunk_policy(policy_), policy_.path_loads),
      growth_(policy_, streams),
      paths_(policy_, recovers_) {}

SendComm::~SendComm() {
  stop_recovering();
  growth_.stop(monotonic_ns());
  while (!is_closed(monotonic_ms())) std::this_thread::sleep_for(std::chrono::microseconds(100));
  const MutexLock lock(mutex_);
  stop();
}

Status SendComm::create(EstablishedConnection connection, SendPolicy policy, WorkerPool* pool,
                        std::unique_ptr<SendComm>* comm, CommStats stats) {
  std::vector<std::unique_ptr<ByteStream>> streams;
  for (KeyedSocket& socket : connection.sockets) streams.push_back(make_byte_stream(std::move(socket), policy.faults));
  policy.turn = connection.turn;
  policy.max_chunk_bytes = connection.max_chunk_bytes;
  policy.checksums = connection.checksums;
  policy.paths = connection.ticket.paths;
  policy.first_paths = connection.paths;
  policy.own_paths = connection.own_paths;
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
    const MutexLock lock(created->mutex_);
    created->first_is_nearest_ = created->paths_.has_choice();
    created->use_streams(count);
  }
  created->publish();
  *comm = std::move(created);
  return Status::ok();
}

std::unique_ptr<DataStream> SendComm::make_stream(std::unique_ptr<ByteStream> bytes, int index) {
  const auto place = static_cast<std::size_t>(index);
  ChunkScheduler* scheduler = is_striped(place) ? &striped_chunks_ : &own_chunks_;
  std::function<void(int)> kick_stream;
  if (policy_.measures_rates) kick_stream = [this](int other) { kick(other); };
  const bool zero_copy = policy_.zero_copy && scheduler == &striped_chunks_;
  paths_.on_opened(place, coarse_monotonic_ms());
  auto stream =
      std::make_unique<SendStream>(std::move(bytes), this, index, scheduler, zero_copy, std::move(kick_stream),
                                   recovers_ ? &replay_of(place) : nullptr, policy_.checksums);
  if (paths_.has_choice()) stream->set_shares_paths();
  // Only new connections send chunks again: the fault that broke one connection may have broken idle ones, too.
  if (streams_[place].phase() == StreamPhase::kAsked) stream->begin_with_replay();
  return stream;
}

bool SendComm::should_stripe(std::size_t bytes) const {
  if (!workers_own_stripes_ || bytes <= policy_.inline_bytes / kAwakeShare) return false;
  if (has_awake_worker() || flows_are_limited()) return true;
  // Between hosts each connection may be limited, and a large message takes longer than waking a worker.
  return bytes > policy_.inline_bytes * (policy_.measures_rates ? 1 : kAsleepMultiple);
}

bool SendComm::wants_workers(std::size_t bytes) const {
  if (!workers_own_stripes_ || bytes <= policy_.inline_bytes / kAwakeShare) return false;
  return bytes > policy_.inline_bytes || ThreadLoad::of_this_thread().is_busy();
}

Status SendComm::isend(const void* data, std::size_t bytes, MemoryRegistration* registration, Request** request) {
  *request = nullptr;
  const MutexLock lock(mutex_);
  if (has_failed()) return stop_failed();
  Request* posted = free_request();
  if (posted == nullptr) return Status::ok();
  if (has_changes()) {
    adopt_changes();
    if (has_failed()) return stop_failed();
  }
  if (growth_.counts(bytes)) watch_growth(bytes);
  // The schedulers only read through this pointer.
  posted->start(this, next_number_++, const_cast<void*>(data), bytes, registration);
  posted->striped_ = should_stripe(bytes);
  stats_.add_sent(bytes, posted->striped_);
  stats_.posted(posted->number_, posted->striped_ ? CommTrace::MessagePath::kStriped : CommTrace::MessagePath::kInline);
  posted->handed_over_ns_ = 0;
  if (!posted->striped_) {
    own_chunks_.push(posted);
    drive_own_streams();
    if (wants_workers(bytes)) {
      rouse_workers(wide_chunks().chunks_in(bytes));
      stats_->kept_from_asleep.add(1);
    }
  } else {
    const std::int64_t now_ns = monotonic_ns();
    if (striped_under_way_++ == 0 && !all_streams_are_full()) posted->handed_over_ns_ = now_ns;
    (has_awake_worker() ? stats_->handed_to_awake : stats_->handed_to_asleep).add(1);
    const std::size_t waiting = striped_chunks_.push(posted);
    ThreadLoad::of_this_thread().add_handed_over(bytes, now_ns);
    kick_streams(waiting, now_ns);
  }
  *request = posted;
  return Status::ok();
}

std::size_t SendComm::min_chunk_bytes() const {
  return flows_are_limited() ? std::max<std::size_t>(policy_.min_chunk_bytes / kLimitedFlowShare, 1)
                             : policy_.min_chunk_bytes;
}

void SendComm::kick_streams(std::size_t waiting_bytes, std::int64_t now_ns) {
  // Kicks at most one stream per chunk. Blocked streams continue without a kick. It begins with the first streams,
  // because a few workers that stay awake are faster for medium messages than many that fall asleep. If the network
  // limits each connection, it takes turns, because medium messages would otherwise use only the first streams. Streams
  // over a path that would leave everything to another one are not woken for that.
  const std::uint64_t taking = paths_.has_choice() ? striped_chunks_.taking_paths(now_ns) : ~std::uint64_t{0};
  const std::size_t chunks = wide_chunks().chunks_in(waiting_bytes);
  if (kick_some(chunks, taking) == 0 && ~taking != 0) kick_some(chunks, ~taking);
}

std::size_t SendComm::kick_some(std::size_t most, std::uint64_t paths) {
  std::size_t kicked = 0;
  const std::size_t wide = in_use_ - 1;
  const std::size_t first = flows_are_limited() ? next_kicked_ : 0;
  for (std::size_t step = 0; step < wide && kicked < most; ++step) {
    const std::size_t index = 1 + (first + step) % wide;
    if (stream(index) == nullptr || stream(index)->is_blocked() || (paths_.moving() >> index & 1) != 0) continue;
    if ((paths >> paths_.path_of(index) & 1) == 0) continue;
    kick(static_cast<int>(index));
    next_kicked_ = first + step + 1;
    ++kicked;
  }
  return kicked;
}

void SendComm::watch_growth(std::size_t bytes) {
  const std::int64_t now_ns = monotonic_ns();
  // More streams might send this message sooner if an earlier one is held up, if every connection is full, or if all
  // together need longer than two round trips. The connections of workers rarely look full, because workers pull a
  // chunk only when the kernel has room for it. Any number of connections leaves a message under way for a round trip.
  ChunkScheduler& chunks = should_stripe(bytes) ? striped_chunks_ : own_chunks_;
  const bool waits = growth_.is_held_up(chunks.round_trip_ns(), now_ns) || all_streams_are_full() ||
                     chunks.outlasts_round_trips(bytes);
  growth_.add_posted(waits, now_ns);
  stats_.set_growth(policy_.growth->target(), policy_.growth->trials(), policy_.growth->gains());
  growth_.request(streams_.size(), now_ns);
  const std::size_t in_use = std::min(growth_.target(), streams_.size());
  if (in_use != in_use_) use_streams(in_use);
  if (growth_.is_give_back_due(streams_.size(), now_ns)) give_back_streams();
}

void SendComm::give_back_streams() {
  while (streams_.size() > std::max(growth_.kept(), in_use_)) {
    const std::size_t last = streams_.size() - 1;
    if (streams_[last].phase() != StreamPhase::kLive || stream(last)->is_over()) return;
    detach(last);
    stream(last)->listen();
    if (!stream(last)->is_acknowledged()) {
      stream(last)->ask_for_acknowledgement();
      const Status status = drive(last);
      if (!status.is_ok()) fail(status);
      return;
    }
    stream(last)->give_back();
    remove(last, StreamPhase::kFree);
    growth_.gave_back(streams_.size());
  }
}

bool SendComm::all_streams_are_full() const {
  for (std::size_t index = first_wide_stream(); index < in_use_; ++index) {
    if (stream(index) != nullptr && !stream(index)->is_full()) return false;
  }
  return true;
}

void SendComm::use_streams(std::size_t in_use) {
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    if (stream(index) != nullptr) stream(index)->set_in_use(index < in_use && (paths_.moving() >> index & 1) == 0);
  }
  const bool fewer = in_use < in_use_;
  in_use_ = in_use;
  const std::uint64_t missing = missing_streams() | paths_.moving();
  const auto first = static_cast<int>(first_wide_stream());
  const int end = std::max(static_cast<int>(in_use), first + 1);
  wide_chunks().set_streams(first, end, missing, paths_.by_place(), paths_.path_of(0));
  wide_chunks().limit_flows(std::min(min_chunk_bytes(), policy_.max_chunk_bytes), flows_are_limited());
  if (!fewer && missing == 0) return;
  // The streams that are not used any more may have been the only ones that were kicked for a message.
  for (int index = first; index < end; ++index) kick(index);
}

std::string SendComm::stall_reason() {
  const Unfinished sends = unfinished();
  std::string text = std::to_string(sends.capacity_bytes) + " bytes in " + std::to_string(sends.requests) +
                     (sends.requests == 1 ? " send that is unfinished" : " sends that are unfinished");
  if (const std::uint64_t missing = missing_streams(); missing != 0) {
    return text + ", and " + std::to_string(__builtin_popcountll(missing)) + " lost connections are not replaced yet";
  }
  std::size_t undelivered = 0;
  PeerLiveness worst;
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    if (stream(index) == nullptr) continue;
    undelivered += stream(index)->undelivered_bytes();
    PeerLiveness liveness;
    if (stream(index)->peer_liveness(&liveness) && liveness.transmissions > worst.transmissions) worst = liveness;
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

Status SendComm::check_progress_possible() {
  check_liveness();
  return has_failed() ? stop_failed() : Status::ok();
}

void SendComm::check_liveness() {
  if (!paths_.is_look_due(coarse_monotonic_ms())) return;
  PeerSilence::Observations observations;
  const bool is_waiting = paths_.has_choice() && recovers_ && unfinished().requests > 0;
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    SendStream* const looked_at = stream(index);
    if (looked_at == nullptr) continue;
    looked_at->sample_delivery();
    if (looked_at->was_acknowledged()) paths_.on_acknowledgement();
    PeerLiveness liveness;
    if (!looked_at->peer_liveness(&liveness)) continue;
    // What the peer acknowledged may have been lost, and with it all that its kernel would repeat: nothing is under way
    // from here, and the kernel asks after seconds only.
    if (is_waiting && liveness.transmissions == 0 && liveness.sent_ms >= kSilentPathMs) looked_at->probe_when_idle();
    observations[index] = {liveness, paths_.path_of(index), looked_at->is_over()};
  }
  const SendPaths::Verdict verdict = paths_.look(observations, monotonic_ms());
  lose_streams(verdict.lost);
  if (verdict.host.empty()) return;
  fail(Status::remote_error(verdict.host + outstanding()));
  stop();
  // A FIN would be queued behind the data that does not arrive. A reset may arrive, and then the peer knows.
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    if (stream(index) != nullptr) stream(index)->reset();
  }
}

void SendComm::tick() {
  // The recovery thread gets only one event for a connection that ended, so all input is read.
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    if (stream(index) != nullptr && is_own(index)) stream(index)->listen(true);
  }
  leave_gone_paths();
  check_liveness();
  return_streams();
}

void SendComm::on_finished(const Request& request) {
  if (request.striped_) --striped_under_way_;
  if (growth_.counts(request.capacity_)) growth_.add_sent(request.capacity_, monotonic_ns());
}

StreamPhase SendComm::on_lost(DataStream& stream) {
  auto& lost = static_cast<SendStream&>(stream);
  const auto index = static_cast<std::size_t>(lost.index());
  lost.reset();
  std::vector<Chunk> chunks = lost.take_unfinished();
  ++losses_;
  stats_->streams_lost.add(1);
  stream.count_loss();
  lost_ms_ = monotonic_ms();
  // The peer's address is that of its listener, whichever way this stream went.
  const std::string way = paths_.way_of(index);
  const bool is_told = paths_.on_lost(index, lost_ms_);
  last_loss_ = "data stream " + std::to_string(index) + way + ": " + lost.loss().message();
  // What the kernel says of an interface is a cause, which lines about its consequences are not to suppress.
  log("Bagua-Net: a connection to " + peer_ + " was lost (" + last_loss_ + "): opening another one and sending " +
          std::to_string(chunks.size()) + " chunks again; " + std::to_string(losses_) + " lost on this communicator",
      LogLevel::kWarn, is_told ? "told of" + way : "");
  replay_of(index).put(std::move(chunks));
  ask_lost_ms_ = 0;
  return StreamPhase::kLost;
}

StreamPhase SendComm::on_given_back(std::size_t index) {
  if (close_by_ms_ != 0) return StreamPhase::kFree;
  log("Bagua-Net: a connection to " + peer_ + " moves back to " +
          policy_.paths[paths_.replacement_path(index, 0)].interface.name,
      LogLevel::kInfo);
  ask_lost_ms_ = 0;
  return StreamPhase::kLost;
}

void SendComm::on_change() {
  use_streams(in_use_);
  // Replacements of other streams may also resend the chunks of a stream that was lost, until their first new chunk.
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    if (stream(index) == nullptr || !stream(index)->replays() || !replay_of(index).any()) continue;
    if (is_own(index) && streams_[index].phase() == StreamPhase::kLive) move(index, StreamPhase::kReplaying);
    kick(static_cast<int>(index));
  }
}

void SendComm::ask_for_streams() {
  if (streams_.count(StreamPhase::kLost) == 0) return;
  if (coarse_monotonic_ms() < ask_lost_ms_ && !depends_on_missing_streams()) return;
  for (std::uint64_t lost = streams_.places_in(StreamPhase::kLost); lost != 0; lost &= lost - 1) {
    const int index = __builtin_ctzll(lost);
    move(static_cast<std::size_t>(index), StreamPhase::kAsked);
    policy_.replace_stream(joining_at(static_cast<std::size_t>(index)),
                           paths_.replacement_path(static_cast<std::size_t>(index), live_streams()));
  }
}

int SendComm::place_of(const StreamArrivals::Arrival& arrival) {
  switch (arrival.joining) {
    case Joining::kMore: return streams_.first_in(StreamPhase::kFree);
    case Joining::kReplacesFirst: return streams_[0].phase() == StreamPhase::kAsked ? 0 : -1;
    case Joining::kReplaces: break;
  }
  const std::uint64_t asked = streams_.places_in(StreamPhase::kAsked) & ~std::uint64_t{1};
  return asked == 0 ? -1 : static_cast<int>(paths_.place_for(arrival.path, asked));
}

void SendComm::on_joined(std::size_t index, const StreamArrivals::Arrival& arrival) {
  paths_.on_joined(index, arrival.path, arrival.joining == Joining::kMore, monotonic_ms());
}

void SendComm::lose_streams(const std::vector<SendPaths::Loss>& lost) {
  for (const SendPaths::Loss& loss : lost) {
    detach(loss.place);
    stream(loss.place)->lose(Status::remote_error(loss.why));
  }
}

void SendComm::return_streams() {
  if (!recovers_ || missing_streams() != 0 || close_by_ms_ != 0) return;
  std::vector<RareLog::Line> lines;
  const PlacePaths::Moves moves = paths_.to_return(
      live_streams(), [this](std::size_t place, std::size_t path) REQUIRES(mutex_) { return prepare(place, path); },
      monotonic_ms(), &lines);
  for (RareLog::Line& line : lines) log(std::move(line.text), line.level, std::move(line.kind));
  if ((moves.leave | moves.stay) != 0) use_streams(in_use_);  // the others take the chunks of those that leave
  for (std::uint64_t left = moves.leave | moves.stay; left != 0; left &= left - 1) {
    const auto index = static_cast<std::size_t>(__builtin_ctzll(left));
    (moves.leave >> index & 1) != 0 ? stream(index)->begin_leaving() : stream(index)->stay();
    kick(static_cast<int>(index));
  }
  if ((paths_.moving() | moves.stay) != 0) drive_own_streams();  // the application may not call the comm
}

Prepared SendComm::prepare(std::size_t place, std::size_t path) {
  // All streams may move at the same time, and a proof may arrive before the end of the stream that it replaces. If no
  // place were free then, the peer would take one from another stream.
  if (!policy_.prepare_stream || streams_.free_places() < kMaxStreams / 2) return Prepared::kReady;
  return policy_.prepare_stream(place, path);
}

void SendComm::leave_gone_paths() {
  if (!has_stopped() && !has_failed()) lose_streams(paths_.leave_gone(live_streams()));
}

void SendComm::on_links_changed() {
  const MutexLock lock(mutex_);
  assert(is_whole());
  leave_gone_paths();
}

void SendComm::on_peer_address_lost(std::uint16_t port) {
  for (const NicPath& path : policy_.paths) {
    if (policy_.paths.size() > 1 && path.address.port() == port) policy_.path_states->on_address_lost(path);
  }
  ask_for_recovery();
}

bool SendComm::looks_again() {
  const MutexLock lock(mutex_);
  return paths_.looks_again();
}

bool SendComm::has_replayed(const DataStream& stream) const {
  const auto& replaying = static_cast<const SendStream&>(stream);
  if (replaying.is_resending()) return false;
  return !replaying.replays() || !replay_of(static_cast<std::size_t>(stream.index())).any();
}

bool SendComm::depends_on_missing_streams() {
  const auto depends = [this](ChunkScheduler& chunks, ReplayQueue& replay) REQUIRES(mutex_) {
    const ReplayQueue::Summary lost = replay.summary();
    bool takes_new = false;
    bool takes_lost = lost.chunks == 0;
    for (std::size_t index = 0; index < streams_.size(); ++index) {
      const SendStream* const left = stream(index);
      if (left == nullptr || left->is_over() || &replay_of(index) != &replay) continue;
      takes_new |= index < in_use_;
      takes_lost |= left->may_resend(lost.first_message);
    }
    return !takes_lost || (!takes_new && chunks.has_chunks());
  };
  return depends(own_chunks_, own_replay_) || depends(striped_chunks_, striped_replay_);
}

std::string SendComm::outstanding() {
  std::string text;
  const auto describe = [&](ReplayQueue& queue) {
    const ReplayQueue::Summary waiting = queue.summary();
    if (waiting.chunks == 0) return;
    text += "; " + std::to_string(waiting.bytes) + " bytes in " + std::to_string(waiting.chunks) +
            " chunks wait to be sent again, from message " + std::to_string(waiting.first_message) + " on";
  };
  describe(own_replay_);
  describe(striped_replay_);
  const Unfinished sends = unfinished();
  if (sends.requests > 0) {
    text += "; " + std::to_string(sends.requests) + " sends are unfinished, from message " +
            std::to_string(sends.first_message) + " on";
  }
  if (lost_ms_ != 0) text += "; the last connection was lost " + std::to_string(monotonic_ms() - lost_ms_) + " ms ago";
  return text;
}

void SendComm::on_join_failure(const StreamArrivals::Failure& failed) {
  StreamArrivals::Arrival failed_arrival;
  failed_arrival.joining = failed.joining;
  const int index = place_of(failed_arrival);  // it was tried over all paths
  if (index < 0) return;
  move(static_cast<std::size_t>(index), StreamPhase::kLost);
  const std::uint64_t left = streams_.places_in(StreamPhase::kLive) | streams_.places_in(StreamPhase::kReplaying);
  // One on its way back to its path is asked for again: while other connections are there, the peer has not ended.
  const bool has_moved = (paths_.moving() >> index & 1) != 0;
  if (left != 0 && (has_moved || !depends_on_missing_streams())) {
    ask_lost_ms_ = coarse_monotonic_ms() + kReplaceAgainMs;
    return;
  }
  fail(Status::remote_error("a lost connection (" + last_loss_ + ") could not be opened again: " + failed.why +
                            outstanding()));
}

bool SendComm::is_closed(std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  if (!recovers_ || has_failed() || unfinished().requests > 0) return true;
  now_ms = closing_clock_.look(now_ms);
  if (close_by_ms_ == 0) {
    close_by_ms_ = now_ms + kLingerMs;
    drive_alone();
  }
  adopt_changes();
  if (has_failed()) return true;
  drive_own_streams();
  bool is_delivered = !own_replay_.any() && !striped_replay_.any();
  bool is_acknowledged = is_delivered;
  for (std::size_t index = 0; index < streams_.size(); ++index) {
    if (stream(index) == nullptr) continue;
    if (policy_.checksums) stream(index)->ask_for_acknowledgement();
    is_delivered &= stream(index)->is_delivered();
    is_acknowledged &= stream(index)->is_acknowledged();
  }
  if (is_acknowledged || (is_delivered && !policy_.checksums) || now_ms >= close_by_ms_) return true;
  if (!is_delivered) delivered_ms_ = 0;
  if (is_delivered && delivered_ms_ == 0) delivered_ms_ = now_ms;
  return is_delivered && now_ms - delivered_ms_ >= kDamageMs;
}

}  // namespace bagua_net
