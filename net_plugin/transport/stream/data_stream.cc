#include "transport/stream/data_stream.h"

#include "base/monotonic_clock.h"
#include "transport/tuning/thread_load.h"

namespace bagua_net {
namespace {

template <typename Move>
ssize_t timed(std::size_t asked, Move move) {
  if (asked < ThreadLoad::kMinBytes) return move();
  const std::int64_t begin_ns = monotonic_ns();
  const ssize_t moved = move();
  if (moved >= static_cast<ssize_t>(ThreadLoad::kMinBytes)) {
    ThreadLoad::of_this_thread().add_moved(static_cast<std::size_t>(moved), begin_ns, monotonic_ns());
  }
  return moved;
}

}  // namespace

Status not_the_peers_bytes() {
  return Status::damaged_data("encrypted data arrived that the peer did not send like this: it was damaged or changed");
}

ssize_t DataStream::read(const iovec* pieces, std::size_t count, std::size_t asked) {
  return timed(asked, [&] { return bytes_->read(pieces, count); });
}

ssize_t DataStream::write(const iovec* pieces, std::size_t count, std::size_t asked) {
  return timed(asked, [&] { return bytes_->write(pieces, count); });
}

}  // namespace bagua_net
