#include "trace/comm_trace.h"

#include <atomic>
#include <utility>

namespace bagua_net {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr std::int64_t kFirstTellNs = 1'000'000'000;

// In the order in which they were opened. Relaxed: a number is all there is.
std::string next_name(bool is_send) {
  static std::atomic<int> comms{0};
  return (is_send ? "send " : "receive ") + std::to_string(comms.fetch_add(1, std::memory_order_relaxed));
}

}  // namespace

CommTrace::CommTrace(std::shared_ptr<Trace> trace, bool is_send, const std::string& interface, const std::string& peer)
    : trace_(std::move(trace)),
      is_send_(is_send),
      name_(next_name(is_send)),
      messages_(trace_->add_tracks(Trace::TrackKind::kNetwork,
                                   name_ + (is_send ? " to " : " from ") + peer + ", device " + interface,
                                   kMaxMessages)) {
  trace_->watch(this);
}

CommTrace::~CommTrace() {
  trace_->unwatch(this);
  for (Message& message : under_way_) {
    if (message.posted_ns.load(kRelaxed) != 0) record(&message, 0, false);
  }
}

void CommTrace::posted(std::uint64_t number, MessagePath path) {
  Message& posted = message(number);
  posted.number.store(number, kRelaxed);
  posted.lane.store(lanes_.take(), kRelaxed);
  posted.path = path;
  posted.origin = {};
  posted.posted_ns.store(monotonic_ns(), kRelaxed);
}

bool CommTrace::is_under_way(const Message& message, std::uint64_t number) {
  return message.posted_ns.load(kRelaxed) != 0 && message.number.load(kRelaxed) == number;
}

void CommTrace::set_origin(std::uint64_t number, const MessageOrigin& origin) {
  Message& posted = message(number);
  if (is_under_way(posted, number)) posted.origin = origin;
}

void CommTrace::finished(std::uint64_t number, std::uint64_t bytes) {
  Message& finished = message(number);
  if (is_under_way(finished, number)) record(&finished, bytes, true);
}

TraceEvent CommTrace::event_of(const Message& message, const char* name, std::int64_t begin_ns) const {
  TraceEvent event(messages_ + static_cast<std::uint32_t>(message.lane.load(kRelaxed)), "message", name, begin_ns);
  event.add("message", message.number.load(kRelaxed));
  return event;
}

void CommTrace::record(Message* message, std::uint64_t bytes, bool is_finished) {
  TraceEvent event = event_of(*message, is_send_ ? "isend" : "irecv", message->posted_ns.load(kRelaxed));
  event.set_end(monotonic_ns());
  if (is_finished) {
    event.add("bytes", bytes);
  } else {
    event.append_to_name(", unfinished");
  }
  if (message->path != MessagePath::kNotKnown)
    event.add("path", message->path == MessagePath::kStriped ? "striped" : "inline");
  if (message->origin.operation[0] != '\0') {
    event.add("operation", message->origin.operation);
    event.add("seq", message->origin.sequence_number);
    event.add("channel", static_cast<std::uint64_t>(message->origin.channel));
  }
  trace_->record(event);
  lanes_.give_back(message->lane.load(kRelaxed));
  message->posted_ns.store(0, kRelaxed);
}

void CommTrace::tell_of_waiting(std::int64_t now_ns) {
  for (Message& message : under_way_) {
    const std::int64_t posted_ns = message.posted_ns.load(kRelaxed);
    if (posted_ns == 0 || now_ns - posted_ns < kFirstTellNs) continue;
    if (message.told_of_ns != posted_ns) {
      message.told_of_ns = posted_ns;
      message.tell_after_ns = kFirstTellNs;
    }
    if (now_ns - posted_ns < message.tell_after_ns) continue;
    while (message.tell_after_ns <= now_ns - posted_ns) message.tell_after_ns *= 2;
    TraceEvent event = event_of(message, is_send_ ? "isend waits" : "irecv waits", now_ns);
    event.add("posted_ms_ago", static_cast<std::uint64_t>((now_ns - posted_ns) / 1'000'000));
    if (message.posted_ns.load(kRelaxed) == posted_ns) trace_->record(event);
  }
}

void CommTrace::set_streams_target(int target, std::uint32_t trials, std::uint32_t gains) {
  if (target == streams_target_) return;
  TraceEvent event(messages_, "growth", "connections", monotonic_ns());
  event.add("from", static_cast<std::uint64_t>(streams_target_));
  event.add("to", static_cast<std::uint64_t>(target));
  event.add("trials", trials);
  event.add("gains", gains);
  streams_target_ = target;
  trace_->record(event);
}

std::unique_ptr<StreamTrace> CommTrace::open_stream(int index, const std::string& nic) {
  for (std::size_t next = stream_tracks_.size(); next <= static_cast<std::size_t>(index); ++next) {
    stream_tracks_.push_back(
        trace_->add_tracks(Trace::TrackKind::kNetwork, name_ + ", data stream " + std::to_string(next)));
  }
  auto stream = std::make_unique<StreamTrace>(trace_, stream_tracks_[static_cast<std::size_t>(index)]);
  stream->note("connected", "data stream " + std::to_string(index) + (nic.empty() ? "" : " over " + nic));
  return stream;
}

}  // namespace bagua_net
