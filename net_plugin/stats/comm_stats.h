// CommStats and StreamStats: where a comm and a data stream count what they do. Owned by what they count for. A count
// is one addition to memory that nobody else writes. Without a page, or without a free slot in it, they count in memory
// of their own; that of a comm is added to the page's totals when it is closed. What they are told goes into the trace,
// too, where there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/monotonic_clock.h"
#include "stats/page_layout.h"
#include "stats/stats_page.h"
#include "trace/comm_trace.h"

namespace bagua_net {

class StreamStats {
 public:
  StreamStats() : own_(std::make_unique<StreamSlot>()), slot_(own_.get()) {}

  StreamCounters* operator->() const { return &slot_->counters; }
  StreamSlot& slot() const { return *slot_; }
  // Of the kernel, of this connection alone: those that it replaces in the slot are added.
  struct Kernel {
    std::uint64_t retransmits = 0;
    std::uint64_t busy_us = 0;
    std::uint64_t peer_not_reading_us = 0;
    std::uint64_t socket_buffer_us = 0;
  };
  void set_kernel(const Kernel& now) const {
    slot_->counters.retransmits.set(before_.retransmits + now.retransmits);
    slot_->counters.busy_us.set(before_.busy_us + now.busy_us);
    slot_->counters.peer_not_reading_us.set(before_.peer_not_reading_us + now.peer_not_reading_us);
    slot_->counters.socket_buffer_us.set(before_.socket_buffer_us + now.socket_buffer_us);
  }
  void set_state(SlotState state) { slot_->state.store(static_cast<std::uint32_t>(state), std::memory_order_relaxed); }

  // A chunk came before its receive was posted; its receive was.
  void park() {
    if (parked_ns_ != 0) return;
    parked_ns_ = monotonic_ns();
    slot_->counters.parked.add(1);
    set_state(SlotState::kParked);
  }
  void resume() {
    if (parked_ns_ == 0) return;
    const std::int64_t now_ns = monotonic_ns();
    slot_->counters.parked_ns.add(static_cast<std::uint64_t>(now_ns - parked_ns_));
    if (trace_ != nullptr) trace_->parked(parked_ns_, now_ns);
    parked_ns_ = 0;
    set_state(SlotState::kLive);
  }

  // A chunk begins to be moved; all of it has been.
  void begin_chunk() {
    resume();
    if (trace_ != nullptr) trace_->begin_chunk();
  }
  void end_chunk(const TracedChunk& chunk) {
    slot_->counters.chunks.add(1);
    if (trace_ != nullptr) trace_->end_chunk(chunk);
  }
  // It is over. why: empty where nothing is missing.
  void end(SlotState state, const std::string& why) {
    set_state(state);
    if (trace_ != nullptr) trace_->note(state == SlotState::kLost ? "lost" : "ended", why);
  }
  // It was lost, and it was needed.
  void count_loss() {
    if (nic_ != nullptr) nic_->streams_lost.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  friend class CommStats;
  StreamStats(StreamSlot* slot, NicSlot* nic, std::unique_ptr<StreamTrace> trace)
      : slot_(slot),
        nic_(nic),
        trace_(std::move(trace)),
        before_{slot->counters.retransmits.get(), slot->counters.busy_us.get(),
                slot->counters.peer_not_reading_us.get(), slot->counters.socket_buffer_us.get()} {
    set_state(SlotState::kLive);
  }

  std::unique_ptr<StreamSlot> own_;
  StreamSlot* slot_;
  NicSlot* nic_ = nullptr;              // nullptr: none
  std::unique_ptr<StreamTrace> trace_;  // nullptr: none
  Kernel before_;
  std::int64_t parked_ns_ = 0;  // 0: it is not
};

class CommStats {
 public:
  CommStats() : own_(std::make_unique<CommSlot>()), slot_(own_.get()) {}
  // trace: nullptr: none.
  CommStats(std::shared_ptr<StatsPage> page, const StatsPage::CommNames& names,
            const std::shared_ptr<Trace>& trace = nullptr);
  CommStats(CommStats&&) = default;
  CommStats& operator=(CommStats&&) = delete;
  ~CommStats();  // no driver of a stream of it may count any more

  CommCounters* operator->() const { return &slot_->counters; }
  const CommSlot& slot() const { return *slot_; }

  void add_sent(std::size_t bytes, bool striped) {
    CommCounters& counters = slot_->counters;
    (striped ? counters.striped_messages : counters.inline_messages).add(1);
    (striped ? counters.striped_bytes : counters.inline_bytes).add(bytes);
    counters.message_sizes[size_class(bytes)].add(1);
  }
  void add_received(std::size_t bytes) {
    slot_->counters.received_messages.add(1);
    slot_->counters.received_bytes.add(bytes);
    slot_->counters.message_sizes[size_class(bytes)].add(1);
  }
  // Of the request with this number, in the ring of kRequestSlots.
  void posted(std::uint64_t number, CommTrace::MessagePath path) {
    if (trace_ != nullptr) trace_->posted(number, path);
    const auto now_ms = static_cast<std::uint32_t>(coarse_monotonic_ms());
    slot_->posted_ms[number % kRequestSlots].store(now_ms == 0 ? 1 : now_ms, std::memory_order_relaxed);
  }
  void finished(std::uint64_t number, std::size_t bytes) {
    if (trace_ != nullptr) trace_->finished(number, bytes);
    slot_->posted_ms[number % kRequestSlots].store(0, std::memory_order_relaxed);
  }
  CommTrace* trace() const { return trace_.get(); }
  // How long the oldest request is outstanding, in milliseconds; 0: none is.
  std::int64_t oldest_request_ms() const;
  void set_growth(int target, std::uint32_t trials, std::uint32_t gains) {
    slot_->streams_target.store(static_cast<std::uint32_t>(target), std::memory_order_relaxed);
    slot_->growth_trials.store(trials, std::memory_order_relaxed);
    slot_->growth_gains.store(gains, std::memory_order_relaxed);
    if (trace_ != nullptr) trace_->set_streams_target(target, trials, gains);
  }

  // Off the hot path. By any thread but for open_stream(), which is the comm's. A stream that replaces another goes on
  // counting where that one ended; nobody may drive that any more. local: the connection's address on this host.
  StreamStats open_stream(int index, const SocketAddress& local = {});
  void fail(const std::string& why);

 private:
  static std::size_t size_class(std::size_t bytes) {
    if (bytes <= 256) return 0;
    const int bits = 64 - __builtin_clzll(static_cast<unsigned long long>(bytes) - 1);
    const auto found = static_cast<std::size_t>((bits - 7) / 2);
    return found < kSizeClasses ? found : kSizeClasses - 1;
  }

  std::shared_ptr<StatsPage> page_;   // nullptr: none
  std::unique_ptr<CommTrace> trace_;  // nullptr: none
  std::unique_ptr<CommSlot> own_;
  CommSlot* slot_;
  std::vector<StreamSlot*> streams_;                      // by index, as far as there are any
  std::vector<std::unique_ptr<StreamSlot>> own_streams_;  // that the page has no room for
};

}  // namespace bagua_net
