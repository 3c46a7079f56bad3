// Data streams over TwoWayEnds, driven by the test in place of workers, and what else they need of a comm.
#pragma once

#include <sys/epoll.h>

#include <utility>
#include <vector>

#include "support/check.h"
#include "support/comm_pair.h"
#include "support/two_way_pipe.h"

namespace bagua_net {

constexpr std::size_t kTurnBytes = 1u << 20;

struct Failures final : FailureSink {
  std::vector<Status> all;
  void fail(Status status) override { all.push_back(std::move(status)); }
};

// One end of a stream and the thread that drives it: it looks when it is kicked, when the poller tells of an event, and
// when the stream wants to go on; never otherwise.
class Driver {
 public:
  Driver(DataStream* stream, TwoWayEnd* end) : stream_(stream), end_(end) { stream_->set_polled(); }

  void kick() { runnable_ = true; }
  bool has_work() const { return runnable_ || end_->has_event(); }
  void step(std::size_t budget) {
    if (end_->has_event()) {
      const TwoWayEnd::Event event = end_->take_event();
      // As EventLoopWorker does.
      if (event.reset || (event.peer_ended && (stream_->poll_flags() & EPOLLRDHUP) != 0)) stream_->set_peer_ended();
      runnable_ = true;
    }
    if (!std::exchange(runnable_, false)) return;
    runnable_ = stream_->progress(budget) == StreamProgress::kMore;
  }

 private:
  DataStream* const stream_;
  TwoWayEnd* const end_;
  bool runnable_ = false;
};

}  // namespace bagua_net
