// ThreadLoad: how busy a thread is with moving bytes. NCCL's progress thread serves every channel of a rank; a medium-
// sized message now and then it moves itself, because waking a worker costs more than the copy. When copying takes a
// good part of its time, workers are worth waking.
//
// One per thread, touched by that thread only. The data streams report what they move, the send comms what they hand
// over.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bagua_net {

class ThreadLoad {
 public:
  // The calling thread's own.
  static ThreadLoad& of_this_thread();

  // Moves of fewer bytes are not worth a look at the clock.
  static constexpr std::size_t kMinBytes = 16384;

  // The thread moved bytes itself, from begin_ns to end_ns.
  void add_moved(std::size_t bytes, std::int64_t begin_ns, std::int64_t end_ns);
  // The thread handed bytes to workers: they count with what it would have needed for them.
  void add_handed_over(std::size_t bytes, std::int64_t now_ns);

  // Copying takes, or would take, a good part of the thread's time.
  bool is_busy() const { return busy_; }

 private:
  void close_window(std::int64_t now_ns);

  std::int64_t window_start_ns_ = 0;
  double busy_ns_ = 0;               // in this window, handed-over bytes included
  double nanoseconds_per_byte_ = 0;  // of the thread's own copying; moving average
  bool busy_ = false;
};

}  // namespace bagua_net
