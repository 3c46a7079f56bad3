// DataStream: one TCP connection of a comm, seen by whoever drives it: a worker, or the thread that calls the comm.
// It has exactly one driver at a time; the comm decides which.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/status.h"
#include "stats/comm_stats.h"
#include "transport/stream/byte_stream.h"

namespace bagua_net {

enum class StreamProgress {
  kMore,     // the budget ended, there is more to do at once
  kBlocked,  // the socket has no room or no bytes: its poller event continues
  kIdle,     // nothing to send, or the receive is not posted yet: a kick continues
  kEnded,    // end of input or failure: never again
};

// What has become of a stream. Written by its driver.
//
//   kLive    it may move bytes
//   kParked  receiving: the next chunk belongs to a receive that is not posted yet   --posted--> kLive
//   kEnded   the peer has closed the comm, or without recovery, the connection; nothing is missing
//   kLost    with recovery: the connection broke, or closed without that word; the comm replaces it
enum class StreamState { kLive, kParked, kEnded, kLost };

// Told of the first failure, and of streams that are over; implemented by the comm. Any thread.
class FailureSink {
 public:
  virtual ~FailureSink() = default;
  virtual void fail(Status status) = 0;
  // The stream is kEnded or kLost from now on. Called once for each stream, by its driver.
  virtual void on_stream_over(int /*index*/, StreamState /*state*/) {}
  // The peer has lost the address at which it listens at this port.
  virtual void on_peer_address_lost(std::uint16_t /*port*/) {}
};

// Of EBADMSG.
Status not_the_peers_bytes();

class DataStream {
 public:
  DataStream(std::unique_ptr<ByteStream> bytes, FailureSink* failures, int index)
      : bytes_(std::move(bytes)), failures_(failures), index_(index) {}
  virtual ~DataStream() = default;

  // Moves up to about `budget` bytes without blocking.
  virtual StreamProgress progress(std::size_t budget) = 0;
  // What the poller waits for when progress() was blocked: EPOLLIN or EPOLLOUT.
  virtual std::uint32_t poll_flags() const = 0;

  // The poller has reported the end of the peer. There is no further event, so a short read does not mean that the
  // driver may wait for one. By the driver.
  void set_peer_ended() { peer_ended_ = true; }

  // Its driver has a poller, which reports events: a worker has one, the driver of a comm's own streams has none.
  // Before it is driven.
  void set_polled() { polled_ = true; }

  // Any thread.
  bool peer_liveness(PeerLiveness* liveness) const { return bytes_->peer_liveness(liveness); }
  void probe_when_idle() { bytes_->probe_when_idle(); }
  std::size_t undelivered_bytes() const { return bytes_->undelivered_bytes(); }
  StreamState state() const { return state_.load(std::memory_order_acquire); }
  bool is_over() const { return state() == StreamState::kEnded || state() == StreamState::kLost; }

  // Before it is driven.
  void set_stats(StreamStats stats) { stats_ = std::move(stats); }

  int fd() const { return bytes_->fd(); }
  // By the driver.
  bool is_broken() const { return bytes_->is_broken(); }
  int index() const { return index_; }
  void shutdown() { bytes_->shutdown(); }
  // No driver will come again, and the memory of all requests is about to belong to the caller again.
  // True: wait_until_released() says when it does.
  virtual bool release_memory() { return false; }
  bool wait_until_released(int limit_ms) { return bytes_->wait_until_released(limit_ms); }
  // Sends the last frame. No driver will come again, and all requests are done. messages: of the comm, in all.
  virtual void say_end(std::uint64_t /*messages*/) {}

  // Fails the comm.
  StreamProgress fail(const Status& status) {
    failures_->fail(status);
    return StreamProgress::kEnded;
  }
  // Its connection broke, or is not answered. By the driver, or once no driver will come again.
  virtual StreamProgress lose(Status why) { return leave(StreamState::kLost, std::move(why)); }
  // The peer has ended this stream alone, and not the comm. Once it is over.
  virtual bool is_given_back() const { return false; }
  // Why it is over; once no driver will come again.
  const Status& loss() const { return loss_; }
  // For the statistics of its interface; once no driver will come again.
  void count_loss() { stats_.count_loss(); }

  // True while a kick is not needed, because the poller will report an event. The driver writes it before it looks for
  // work under the mutex of the scheduler or table. A thread that kicks reads it after it added work under that mutex.
  bool is_blocked() const { return blocked_.load(std::memory_order_relaxed); }

 protected:
  void tell_peer_address_lost(std::uint16_t port) { failures_->on_peer_address_lost(port); }
  // Nothing is missing. By the driver.
  StreamProgress end() { return leave(StreamState::kEnded, Status::ok()); }
  void set_parked(bool parked) {
    parked ? stats_.park() : stats_.resume();
    state_.store(parked ? StreamState::kParked : StreamState::kLive, std::memory_order_release);
  }
  // Reads or writes, and reports large moves to the driving thread's load.
  ssize_t read(const iovec* pieces, std::size_t count, std::size_t asked);
  ssize_t write(const iovec* pieces, std::size_t count, std::size_t asked);
  ssize_t write_by_reference(const iovec& copied, const iovec& referred) {
    return bytes_->write_by_reference(copied, referred);
  }
  std::uint64_t overhead_bytes() const { return bytes_->overhead_bytes(); }
  bool delivery(Delivery* delivery) const { return bytes_->delivery(delivery); }
  void reset() { bytes_->reset(); }
  bool is_polled() const { return polled_; }
  bool has_peer_ended() const { return peer_ended_; }
  void set_blocked(bool blocked) { blocked_.store(blocked, std::memory_order_relaxed); }

  StreamStats stats_;

 private:
  // The last thing that the driver does.
  StreamProgress leave(StreamState state, Status loss) {
    if (is_over()) return StreamProgress::kEnded;
    loss_ = std::move(loss);
    set_blocked(false);  // no event will come
    stats_.end(state == StreamState::kLost ? SlotState::kLost : SlotState::kEnded, loss_.message());
    state_.store(state, std::memory_order_release);
    failures_->on_stream_over(index_, state);
    return StreamProgress::kEnded;
  }

  const std::unique_ptr<ByteStream> bytes_;
  FailureSink* const failures_;  // the comm: outlives its streams
  const int index_;
  bool peer_ended_ = false;
  bool polled_ = false;
  Status loss_;
  std::atomic<StreamState> state_{StreamState::kLive};
  std::atomic<bool> blocked_{false};
};

}  // namespace bagua_net
