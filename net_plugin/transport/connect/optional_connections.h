// OptionalConnections: the number of connections that this process could do without, because they only make it faster.
// The limits are in os/process_room.h. Shared by all comms that connect; any thread.
#pragma once

#include <algorithm>

#include "base/mutex.h"
#include "os/process_room.h"

namespace bagua_net {

class OptionalConnections {
 public:
  // The optional connections of one comm, which are given back when it is destroyed.
  class Share {
   public:
    explicit Share(OptionalConnections* all) : all_(all) {}
    ~Share() { keep(0); }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

    // Returns for how many of them there is room.
    int take(int count) {
      const int taken = all_->take(count);
      taken_ += taken;
      return taken;
    }
    // The comm has this many now. The others have been closed or never joined, and are given back.
    void keep(int count) {
      all_->give_back(std::max(taken_ - count, 0));
      taken_ = std::min(taken_, count);
    }
    int taken() const { return taken_; }

   private:
    OptionalConnections* const all_;
    int taken_ = 0;
  };

 private:
  int take(int count) {
    if (count <= 0) return 0;
    const MutexLock lock(mutex_);
    const int room = std::min(optional_descriptors(), optional_ports() - taken_);
    const int taken = std::clamp(room, 0, count);
    taken_ += taken;
    return taken;
  }
  void give_back(int count) {
    const MutexLock lock(mutex_);
    taken_ -= count;
  }

  Mutex mutex_;
  int taken_ GUARDED_BY(mutex_) = 0;
};

}  // namespace bagua_net
