// StreamArrivals: connections that join a comm after it began. The connection thread hands them in, and the comm takes
// them and makes streams of them. Shared by both, because the comm may be closed during a handshake. Connections that
// nobody takes are closed with it.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "crypto/cipher_state.h"
#include "os/socket_address.h"

namespace bagua_net {

// What a connection joins for.
enum class Joining {
  kMore,           // one more stream
  kReplaces,       // a stream that was lost
  kReplacesFirst,  // stream 0, which was lost
};
// Of a replacement for the stream at this place.
constexpr Joining joining_at(std::size_t place) { return place == 0 ? Joining::kReplacesFirst : Joining::kReplaces; }

// How far a connection is that is opened before the stream has ended whose place it is to take.
enum class Prepared {
  kWaiting,
  kReady,   // the peer's process has answered: it only lacks the proof
  kFailed,  // the next question begins anew
};

class StreamArrivals {
 public:
  struct Arrival {
    KeyedSocket socket;
    Joining joining = Joining::kMore;
    std::size_t path = 0;   // the connecting side: of its ticket
    SocketAddress contact;  // the listening side: from where it comes, with the port of the peer's process; 0: none
  };
  // A connection that the comm asked for will not come.
  struct Failure {
    Joining joining = Joining::kReplaces;
    std::string why;
  };

  // A connection will be handed in for certain. From now on the peer may use it.
  void announce() {
    const MutexLock lock(mutex_);
    ++announced_;
    any_.store(true, std::memory_order_release);
  }
  void hand_in_announced(KeyedSocket socket, Joining joining = Joining::kMore, std::size_t path = 0,
                         const SocketAddress& contact = {}) {
    const MutexLock lock(mutex_);
    --announced_;
    if (closed_.load()) return;  // the socket closes
    arrivals_.push_back({std::move(socket), joining, path, contact});
    if (joining != Joining::kMore && on_change_) on_change_();
  }
  void hand_in(KeyedSocket socket, Joining joining = Joining::kMore, std::size_t path = 0) {
    announce();
    hand_in_announced(std::move(socket), joining, path);
  }
  void report(Failure failure) {
    const MutexLock lock(mutex_);
    failures_.push_back(std::move(failure));
    any_.store(true, std::memory_order_release);
    if (on_change_) on_change_();
  }

  // A connection that the comm has prepared is ready.
  void tell_of_prepared() {
    const MutexLock lock(mutex_);
    if (on_change_) on_change_();
  }

  // Cheap, because every call of a comm asks. True also while a connection is announced.
  bool any() const { return any_.load(std::memory_order_acquire); }

  std::vector<Arrival> take() {
    const MutexLock lock(mutex_);
    any_.store(announced_ > 0 || !failures_.empty(), std::memory_order_relaxed);
    return std::exchange(arrivals_, {});
  }
  std::vector<Failure> take_failures() {
    const MutexLock lock(mutex_);
    any_.store(announced_ > 0 || !arrivals_.empty(), std::memory_order_relaxed);
    return std::exchange(failures_, {});
  }

  // The number of streams of the comm, after every change.
  void set_streams(int streams) {
    const MutexLock lock(mutex_);
    streams_ = streams;
  }
  // The comm has fewer streams than that, including those that it has not taken yet.
  bool has_room(int most) {
    const MutexLock lock(mutex_);
    return streams_ + announced_ + static_cast<int>(arrivals_.size()) < most;
  }
  // The comm has failed, and takes no connection any more.
  void close() {
    const MutexLock lock(mutex_);
    closed_.store(true);
    arrivals_.clear();
  }
  bool is_closed() const { return closed_.load(); }
  // Called with mutex_ held, when a replacement or a failure has arrived, or a prepared connection is ready. Empty: the
  // comm is being closed.
  void set_on_change(std::function<void()> on_change) {
    const MutexLock lock(mutex_);
    on_change_ = std::move(on_change);
  }

 private:
  Mutex mutex_;
  std::vector<Arrival> arrivals_ GUARDED_BY(mutex_);
  std::vector<Failure> failures_ GUARDED_BY(mutex_);
  int announced_ GUARDED_BY(mutex_) = 0;
  int streams_ GUARDED_BY(mutex_) = 0;
  std::function<void()> on_change_ GUARDED_BY(mutex_);
  std::atomic<bool> any_{false};
  std::atomic<bool> closed_{false};
};

}  // namespace bagua_net
