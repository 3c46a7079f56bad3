// SendComm's part in lost connections: what becomes of their chunks, when replacements are asked for, and how a comm is
// closed that still owes its peer something.
#include <algorithm>
#include <cassert>
#include <utility>

#include "base/monotonic_clock.h"
#include "transport/comm/send_comm.h"
#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

// The pause before a replacement that failed is requested again, while the comm has other connections.
constexpr int kReplaceAgainMs = 10000;
// How often it is looked whether the paths of streams that go over others work again.
constexpr int kReturnMs = 1000;
// The time limit for closing a comm. NCCL aborts within a second.
constexpr int kLingerMs = 700;
// The part of it that is spent waiting for the peer to check the data in its kernel for damage. The peer may not call
// its comm any more, and a comm is closed for each channel and peer.
constexpr int kDamageMs = 300;

}  // namespace

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
  const std::string way = paths_.has_choice() ? " over " + policy_.paths[paths_.path_of(index)].interface.name : "";
  const std::uint64_t bit = std::uint64_t{1} << index;
  const bool is_told = (told_ & bit) != 0;
  paths_.on_lost(index, is_told, lost_ms_);
  told_ &= ~bit;
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
    policy_.replace_stream(index == 0 ? Joining::kReplacesFirst : Joining::kReplaces,
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
  joined_ms_[index] = monotonic_ms();
  paths_.on_joined(index, arrival.path, arrival.joining == Joining::kMore, joined_ms_[index]);
}

void SendComm::lose_streams(std::uint64_t places, const std::string& why) {
  for (; places != 0; places &= places - 1) {
    const auto index = static_cast<std::size_t>(__builtin_ctzll(places));
    detach(index);
    stream(index)->lose(Status::remote_error(why));
  }
}

void SendComm::return_streams() {
  const std::int64_t now_ms = monotonic_ms();
  if (!paths_.has_choice() || !recovers_ || now_ms < return_ms_ || missing_streams() != 0 || close_by_ms_ != 0) return;
  return_ms_ = now_ms + kReturnMs;
  probes_ = false;
  const auto probe = [&](std::size_t path) REQUIRES(mutex_) {
    const NicPath& its = policy_.paths[path];
    if (policy_.path_states->works(its, now_ms)) return true;
    probes_ |= policy_.path_states->is_due(its);
    if (const std::size_t bytes = policy_.path_states->take_lost_packet_bytes(its); bytes != 0) {
      log("Bagua-Net: connections to " + its.address.host() + " over " + its.interface.name + " open, and packets of " +
              std::to_string(bytes) +
              " bytes are not answered: compare the MTU of hosts and switches (ip link). The other interfaces carry "
              "its "
              "share until they are",
          LogLevel::kWarn, "packets over " + its.interface.name);
    }
    return false;
  };
  const std::uint64_t moving = paths_.places_to_move(live_streams(), probe, now_ms);
  if (probes_) return_ms_ = now_ms + kCheckPathsMs;
  if (moving == 0) return;
  use_streams(in_use_);  // the others take its chunks
  for (std::uint64_t left = moving; left != 0; left &= left - 1) {
    const auto index = static_cast<std::size_t>(__builtin_ctzll(left));
    stream(index)->begin_leaving();
    kick(static_cast<int>(index));
  }
  drive_own_streams();  // the application may not call the comm
}

void SendComm::leave_gone_paths() {
  if (has_stopped() || has_failed() || !paths_.has_choice() || !recovers_) return;
  std::vector<std::string> why;
  for (const NicPath& path : policy_.paths) why.push_back(policy_.path_states->why_gone(path));
  // Without another one, it is waited for as in any outage.
  if (std::none_of(why.begin(), why.end(), [](const std::string& reason) { return reason.empty(); })) return;
  for (std::uint64_t left = live_streams(); left != 0; left &= left - 1) {
    const std::string& reason = why[paths_.path_of(static_cast<std::size_t>(__builtin_ctzll(left)))];
    if (reason.empty()) continue;
    told_ |= left & -left;
    lose_streams(left & -left, reason);
  }
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

bool SendComm::is_silent_elsewhere(std::size_t index, std::int64_t answered_ms) {
  if (!paths_.has_choice() || !recovers_ || stream(index)->is_over()) return false;
  const std::int64_t silent_ms = policy_.path_states->silent_ms(policy_.paths[paths_.path_of(index)]);
  return silent_ms != 0 && std::max(answered_ms, joined_ms_[index]) < silent_ms;
}

std::int64_t SendComm::ask_elsewhere(std::size_t path) {
  std::int64_t ago_ms = PeerSilence::kNeverAnswered;
  const std::int64_t now_ms = monotonic_ms();
  for (std::size_t other = 0; other < policy_.paths.size(); ++other) {
    if (other == path) continue;
    policy_.path_states->works(policy_.paths[other], now_ms);
    const std::int64_t answered_ms = policy_.path_states->answered_ms(policy_.paths[other]);
    if (answered_ms != 0) ago_ms = std::min(ago_ms, now_ms - answered_ms);
  }
  return ago_ms;
}

bool SendComm::looks_again() {
  const MutexLock lock(mutex_);
  return silence_.is_suspicious() || probes_;
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
  if (left != 0 && !depends_on_missing_streams()) {
    ask_lost_ms_ = coarse_monotonic_ms() + kReplaceAgainMs;
    return;
  }
  fail(Status::remote_error("a lost connection (" + last_loss_ + ") could not be opened again: " + failed.why +
                            outstanding()));
}

bool SendComm::is_closed(std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  if (!recovers_ || has_failed() || unfinished().requests > 0) return true;
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
