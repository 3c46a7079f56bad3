// EventRing: the events that wait to be written. Of a fixed size: an event that finds no room is not taken. Any thread
// adds events, one at a time takes them; nobody waits for anybody.
//
// Each cell has a turn: the position of the event that may be put there next, or that position + 1 once it is there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "trace/trace_event.h"

namespace bagua_net {

class EventRing {
 public:
  // size: a power of two.
  explicit EventRing(std::size_t size) : mask_(size - 1), cells_(new Cell[size]) {
    for (std::size_t i = 0; i < size; ++i) cells_[i].turn.store(i, std::memory_order_relaxed);
  }

  // False: it is full.
  bool add(const TraceEvent& event) {
    std::uint64_t position = next_in_.load(std::memory_order_relaxed);
    for (;;) {
      Cell& cell = cells_[position & mask_];
      // Acquire: whoever took the former event has read it.
      const auto ahead = static_cast<std::int64_t>(cell.turn.load(std::memory_order_acquire) - position);
      if (ahead < 0) return false;
      if (ahead > 0) {
        position = next_in_.load(std::memory_order_relaxed);
      } else if (next_in_.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
        event.copy_to(&cell.event);
        cell.turn.store(position + 1, std::memory_order_release);  // with the event
        return true;
      }
    }
  }

  // The next event, until done(); nullptr: none, or it is still being put there. By one thread at a time.
  const TraceEvent* next() const {
    const Cell& cell = cells_[next_out_ & mask_];
    return cell.turn.load(std::memory_order_acquire) == next_out_ + 1 ? &cell.event : nullptr;
  }
  void done() {
    cells_[next_out_ & mask_].turn.store(next_out_ + mask_ + 1, std::memory_order_release);
    ++next_out_;
  }

 private:
  struct Cell {
    std::atomic<std::uint64_t> turn;
    TraceEvent event;
  };

  const std::uint64_t mask_;
  const std::unique_ptr<Cell[]> cells_;
  alignas(64) std::atomic<std::uint64_t> next_in_{0};
  alignas(64) std::uint64_t next_out_ = 0;
};

}  // namespace bagua_net
