// CommTrace and StreamTrace: what a comm and a data stream record. Owned by their statistics, which tell them what
// happens; there are none where nothing is traced.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/monotonic_clock.h"
#include "trace/trace.h"

namespace bagua_net {

// Lanes: things that overlap are shown on tracks of their own. Each takes the first that is free. Any thread.
class Lanes {
 public:
  static constexpr int kMax = 64;

  // -1: all are taken.
  int take() {
    std::uint64_t taken = taken_.load(std::memory_order_relaxed);
    for (;;) {
      if (~taken == 0) return -1;
      const int lane = __builtin_ctzll(~taken);
      if (taken_.compare_exchange_weak(taken, taken | bit(lane), std::memory_order_acquire)) return lane;
    }
  }
  void give_back(int lane) { taken_.fetch_and(~bit(lane), std::memory_order_release); }

 private:
  static std::uint64_t bit(int lane) { return std::uint64_t{1} << lane; }

  std::atomic<std::uint64_t> taken_{0};
};

// What a message belongs to, where NCCL's profiler interface tells.
struct MessageOrigin {
  char operation[TraceEvent::kTextBytes] = "";  // "AllReduce"; "": not known
  std::uint64_t sequence_number = 0;            // of the collective, in its communicator
  int channel = -1;
};

// A chunk: one frame on one data stream.
struct TracedChunk {
  std::uint64_t message_number;
  std::uint64_t offset;
  std::uint64_t bytes;
  int attempt;  // 0: it was sent for the first time
};

class StreamTrace {
 public:
  StreamTrace(std::shared_ptr<Trace> trace, std::uint32_t track) : trace_(std::move(trace)), track_(track) {}

  // By the stream's driver.
  void begin_chunk() { began_ns_ = monotonic_ns(); }
  void end_chunk(const TracedChunk& chunk) {
    TraceEvent event(track_, "chunk", "chunk", began_ns_);
    event.set_end(monotonic_ns());
    event.add("bytes", chunk.bytes);
    event.add("message", chunk.message_number);
    event.add("offset", chunk.offset);
    if (chunk.attempt > 0) event.add("attempt", static_cast<std::uint64_t>(chunk.attempt));
    trace_->record(event);
  }
  // A chunk came before its receive was posted.
  void parked(std::int64_t from_ns, std::int64_t to_ns) {
    TraceEvent event(track_, "stall", "waits for a receive", from_ns);
    event.set_end(to_ns);
    trace_->record(event);
  }
  void note(const std::string& name, const std::string& detail) { trace_->note(track_, name, detail); }

 private:
  const std::shared_ptr<Trace> trace_;
  const std::uint32_t track_;
  std::int64_t began_ns_ = 0;
};

class CommTrace : public Watched {
 public:
  enum class MessagePath { kNotKnown, kInline, kStriped };
  static constexpr std::size_t kMaxMessages = 64;  // under way at a time
  static_assert(kMaxMessages <= Lanes::kMax);

  // is_send: it sends, and otherwise it receives.
  CommTrace(std::shared_ptr<Trace> trace, bool is_send, const std::string& interface, const std::string& peer);
  ~CommTrace() override;  // records what was not finished
  CommTrace(const CommTrace&) = delete;
  CommTrace& operator=(const CommTrace&) = delete;

  // Of the message with this number. By the thread that calls the comm.
  void posted(std::uint64_t number, MessagePath path);
  void set_origin(std::uint64_t number, const MessageOrigin& origin);
  void finished(std::uint64_t number, std::uint64_t bytes);
  void set_streams_target(int target, std::uint32_t trials, std::uint32_t gains);

  // nic: over which it goes; "": none.
  std::unique_ptr<StreamTrace> open_stream(int index, const std::string& nic);
  void tell_of_waiting(std::int64_t now_ns) override;
  void failed(const std::string& why) { trace_->note(messages_, "failed", why); }

 private:
  struct Message {
    // The first three are written by the calling thread, and read by the one that looks for messages that wait.
    // Relaxed: that one may see parts of two messages only where one of them was just finished.
    std::atomic<std::uint64_t> number{0};
    std::atomic<std::int64_t> posted_ns{0};  // 0: none
    std::atomic<int> lane{-1};
    std::int64_t tell_after_ns = 0;  // by the thread that looks: how long it is under way when that is told
    std::int64_t told_of_ns = 0;     // posted_ns of the message that this is about
    MessagePath path = MessagePath::kNotKnown;
    MessageOrigin origin;
  };

  Message& message(std::uint64_t number) { return under_way_[number % kMaxMessages]; }
  static bool is_under_way(const Message& message, std::uint64_t number);
  TraceEvent event_of(const Message& message, const char* name, std::int64_t begin_ns) const;
  void record(Message* message, std::uint64_t bytes, bool is_finished);

  const std::shared_ptr<Trace> trace_;
  const bool is_send_;
  const std::string name_;
  const std::uint32_t messages_;  // the first of their tracks
  Lanes lanes_;
  std::array<Message, kMaxMessages> under_way_;
  std::vector<std::uint32_t> stream_tracks_;  // by index; a stream that replaces another is on its track
  int streams_target_ = 0;
};

}  // namespace bagua_net
