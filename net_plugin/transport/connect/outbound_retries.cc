// OutboundHandshakes' attempts that do not succeed at once: what is tried again, over which path, and until when.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <limits>

#include "base/monotonic_clock.h"
#include "transport/connect/outbound_handshakes.h"
#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

// Of a connection that is to go over a certain path: there is always one more, for a packet that was lost.
constexpr int kTriesOfAPath = 2;

// This host is short of something, and other paths need it as well.
bool is_shortage(int error_number) {
  switch (error_number) {
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
    case ENOSPC: return true;
    default: return false;
  }
}

}  // namespace

void OutboundHandshakes::change_path(Attempt& attempt, std::size_t index, int error_number, bool answered) {
  Stream& stream = attempt.streams[index];
  const NicPath& path = attempt.path_of(stream);
  const std::int64_t now_ms = monotonic_ms();
  // A process that is stopped or overloaded answers late over every path.
  if (!is_shortage(error_number) && !(answered && error_number == ETIMEDOUT)) {
    const RareLog::Line line = settings_.paths->on_failed(path, Status::system_error("connect", error_number), now_ms);
    if (!line.text.empty()) log_->add_if_due(line.level, line.kind, [&line] { return line.text; });
  }
  // The first stream decides whether there is a connection, and a comm waits for a replacement.
  const bool is_urgent = attempt.is_join ? attempt.ticket.joining() != Joining::kMore : index == 0;
  if (!is_urgent && stream.tries % kTriesOfAPath != 0 && !settings_.paths->is_left_out(path, now_ms)) return;
  const std::vector<std::size_t> usable = settings_.paths->usable(attempt.ticket.paths, now_ms);
  const auto next = std::upper_bound(usable.begin(), usable.end(), stream.path);
  stream.path = next == usable.end() ? usable.front() : *next;
}

bool OutboundHandshakes::may_be_answered(const Attempt& attempt, Stream& stream, std::int64_t now_ms) const {
  if (!attempt.has_choice() || tcp_undelivered_bytes(stream.socket.get()) > 0) return false;
  // The path may have failed with the answer on its way. A process that takes longer gets twice the time each time.
  const std::int64_t limit_ms = std::min<std::int64_t>(
      std::int64_t{kLongConnectAnswerMs} << std::min(stream.unanswered_hellos, 10), settings_.handshake_timeout_ms);
  stream.due_ms = std::min(now_ms + kConnectAnswerMs, stream.hello_ms + limit_ms);
  if (now_ms < stream.due_ms) return true;
  ++stream.unanswered_hellos;
  return false;
}

void OutboundHandshakes::retry_or_fail(Attempt& attempt, std::size_t index, const Status& status) {
  if (may_pass(status.error_number())) {
    retry(attempt, index, status.error_number());
  } else {
    fail(attempt, status);
  }
}

void OutboundHandshakes::retry(Attempt& attempt, std::size_t index, int error_number, std::string refusal) {
  Stream& stream = attempt.streams[index];
  const std::string address = attempt.path_of(stream).address.to_string();
  // The listener has been told, so that its log says it, too.
  if (!attempt.mismatch.empty()) {
    fail(attempt, Status::invalid_usage("connect to " + address + ": " + attempt.mismatch));
    return;
  }
  const std::int64_t now_ms = monotonic_ms();
  const bool answered = stream.state == JoinState::kHandshaking;
  // Over a path that has never worked, a firewall may refuse.
  const bool is_refused = (error_number == ECONNREFUSED || !refusal.empty()) &&
                          (!attempt.has_choice() || settings_.paths->has_worked(attempt.path_of(stream)));
  release_for_retry(stream);
  attempt.trouble = {error_number, answered, std::move(refusal)};
  attempt.trouble_path = stream.path;
  // The listening socket belongs to the process, and stays open as long as it has a listen or a comm.
  // At another address, another process may refuse.
  const bool has_answered =
      !attempt.is_join && attempt.streams[0].state == JoinState::kJoined && attempt.streams[0].path == stream.path;
  if (error_number == ECONNREFUSED && !attempt.is_join && (stream.was_closed || has_answered)) {
    fail(attempt, Status::remote_error("the listener at " + address +
                                       (has_answered ? " accepted the first data stream" : " closed the connection") +
                                       " during the handshake, and is gone: that rank has failed; see its log"));
    return;
  }
  if (!is_refused || !attempt.is_join) {
    // Another path may be silent while the host refuses over this one.
    if (stream.path == stream.refused_path) stream.refused_ms = 0;
  } else if (stream.refused_ms == 0) {
    stream.refused_ms = now_ms;
    stream.refused_path = stream.path;
  } else if (now_ms - stream.refused_ms >= kRefusedMs) {
    fail(attempt, Status::remote_error(error_number == ECONNREFUSED
                                           ? "nobody listens at " + address +
                                                 " any more: the peer's process has ended; see that rank's log"
                                           : "connect to " + address + ": " + attempt.trouble.refusal));
    return;
  }
  if (attempt.has_choice()) change_path(attempt, index, error_number, answered);
  stream.state = JoinState::kBackingOff;
  stream.due_ms = now_ms + kConnectAgainMs;
}

void OutboundHandshakes::release_for_retry(Stream& stream) {
  // A reset and not a FIN, so that the listener waits for the stream to come again. SO_LINGER may fail on a broken
  // socket.
  const linger reset{1, 0};
  if (stream.socket.is_open()) ::setsockopt(stream.socket.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
  release(stream);
}

void OutboundHandshakes::release(Stream& stream) {
  if (!stream.socket.is_open()) return;
  if (stream_ids_.erase(stream.id) != 0) poller_->remove(stream.socket.get());
  stream.socket.reset();
}

void OutboundHandshakes::fail(Attempt& attempt, Status failure) {
  if (attempt.is_join && attempt.ticket.hello.stream_index != kJoiningStream) {
    if (const auto arrivals = attempt.arrivals.lock()) {
      arrivals->report({attempt.ticket.joining(), failure.message()});
    }
  }
  for (Stream& stream : attempt.streams) release(stream);
  attempt.streams.clear();
  attempt.failure = std::move(failure);
  attempt.over = true;
}

void OutboundHandshakes::fail_all(const Status& failure) {
  for (auto& [number, attempt] : attempts_) {
    if (!attempt.over) fail(attempt, failure);
  }
}

void OutboundHandshakes::expire(std::int64_t now_ms) {
  for (auto entry = attempts_.begin(); entry != attempts_.end();) {
    const auto current = entry++;
    const std::uint64_t number = current->first;
    Attempt& attempt = current->second;
    if (attempt.is_join && (attempt.over || attempt.arrivals.expired())) {
      if (attempt.over && !attempt.failure.is_ok()) {
        log_->add_if_due(LogLevel::kInfo, "join", [&attempt] {
          return "Bagua-Net: no further connection to " + attempt.ticket.paths[0].address.to_string() +
                 ", going on without: " + attempt.failure.message();
        });
      }
      for (Stream& stream : attempt.streams) release(stream);
      attempts_.erase(current);
      continue;
    }
    if (attempt.over) {
      if (now_ms >= attempt.deadline_ms + settings_.connect_timeout_ms) attempts_.erase(current);
      continue;
    }
    if (now_ms >= attempt.deadline_ms) {
      const bool is_of_connecting = attempt.ticket.timeout_ms == settings_.connect_timeout_ms;
      fail(attempt,
           deadline_error(attempt.trouble, attempt.ticket.paths[attempt.trouble_path], attempt.ticket.timeout_ms,
                          is_of_connecting ? "BAGUA_NET_CONNECT_TIMEOUT_MS" : "BAGUA_NET_KEEPALIVE_S"));
      continue;
    }
    for (std::size_t index = 0; index < attempt.streams.size() && !attempt.over; ++index) {
      Stream& stream = attempt.streams[index];
      if (stream.state == JoinState::kJoined || now_ms < stream.due_ms) continue;
      if (stream.state == JoinState::kHandshaking && may_be_answered(attempt, stream, now_ms)) continue;
      if (stream.state == JoinState::kBackingOff) {
        start(attempt, number, index);
      } else {
        retry(attempt, index, ETIMEDOUT);
      }
    }
  }
}

std::int64_t OutboundHandshakes::next_deadline_ms() const {
  std::int64_t deadline = std::numeric_limits<std::int64_t>::max();
  for (const auto& [number, attempt] : attempts_) {
    if (attempt.over) {
      deadline = std::min(deadline, attempt.deadline_ms + settings_.connect_timeout_ms);
      continue;
    }
    deadline = std::min(deadline, attempt.deadline_ms);
    for (const Stream& stream : attempt.streams) {
      if (stream.state != JoinState::kJoined) deadline = std::min(deadline, stream.due_ms);
    }
  }
  return deadline;
}

}  // namespace bagua_net
