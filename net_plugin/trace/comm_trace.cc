#include "trace/comm_trace.h"

#include <atomic>
#include <utility>

namespace bagua_net {
namespace {

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
                                   kMaxMessages)) {}

CommTrace::~CommTrace() {
  for (Message& message : under_way_) {
    if (message.posted_ns != 0) record(&message, 0, false);
  }
}

void CommTrace::posted(std::uint64_t number, Path path) {
  Message& posted = message(number);
  posted.number = number;
  posted.posted_ns = monotonic_ns();
  posted.lane = lanes_.take();
  posted.path = path;
  posted.origin = {};
}

void CommTrace::set_origin(std::uint64_t number, const MessageOrigin& origin) {
  Message& posted = message(number);
  if (posted.posted_ns != 0 && posted.number == number) posted.origin = origin;
}

void CommTrace::finished(std::uint64_t number, std::uint64_t bytes) {
  Message& finished = message(number);
  if (finished.posted_ns != 0 && finished.number == number) record(&finished, bytes, true);
}

void CommTrace::record(Message* message, std::uint64_t bytes, bool is_finished) {
  TraceEvent event(messages_ + static_cast<std::uint32_t>(message->lane), "message", is_send_ ? "isend" : "irecv",
                   message->posted_ns);
  event.set_end(monotonic_ns());
  event.add("message", message->number);
  if (is_finished) {
    event.add("bytes", bytes);
  } else {
    event.append_to_name(", unfinished");
  }
  if (message->path != Path::kNotKnown) event.add("path", message->path == Path::kStriped ? "striped" : "inline");
  if (message->origin.operation[0] != '\0') {
    event.add("operation", message->origin.operation);
    event.add("seq", message->origin.sequence_number);
    event.add("channel", static_cast<std::uint64_t>(message->origin.channel));
  }
  trace_->record(event);
  lanes_.give_back(message->lane);
  message->posted_ns = 0;
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

std::unique_ptr<StreamTrace> CommTrace::open_stream(int index) {
  const std::uint32_t track =
      trace_->add_tracks(Trace::TrackKind::kNetwork, name_ + ", data stream " + std::to_string(index));
  auto stream = std::make_unique<StreamTrace>(trace_, track);
  stream->note("connected", "data stream " + std::to_string(index));
  return stream;
}

}  // namespace bagua_net
