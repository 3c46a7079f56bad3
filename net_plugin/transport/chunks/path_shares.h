// PathShares: how much of what waits each path may take, where the streams of a comm go over several.
//
// [Note: never later than the best path alone]
// The best path is the one that would deliver the rest of a message first. It may take all of it. Another path gets
// what it certainly delivers before the best one could have delivered the remainder of all messages that wait, and
// nothing if that is too little to pay. So the end of what waits is never later than over the best path alone, if rates
// are what they were. To count only the first message would keep bursts over the other path so short that round trips
// limit its measured rate, and with it the next bursts. A path whose rate is unknown, or may have risen, counts as much
// slower than the best one: it is measured with bytes that nobody waits for. Nothing is shared until the rate of the
// best one is known, because that says how much time there is.
//
// Which of the streams over a path takes the chunk is decided as with one network interface. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "transport/chunks/limits.h"
#include "transport/chunks/path_load.h"

namespace bagua_net {

class PathShares {
 public:
  // loads: of each path, shared by the comms of the process. Below two, there is no choice.
  explicit PathShares(std::vector<std::shared_ptr<PathLoad>> loads = {})
      : loads_(std::move(loads)), streams_on_(loads_.size()) {}
  PathShares(const PathShares&) = delete;
  PathShares& operator=(const PathShares&) = delete;
  ~PathShares();

  // The streams that send, the path of every stream, and the path to begin with.
  void set_streams(const std::vector<int>& streams, const std::array<std::size_t, kMaxStreams>& path_of,
                   std::size_t first);
  // The streams go over more than one path.
  bool has_choice() const { return has_choice_; }
  std::size_t path_of(int stream) const { return streams_[static_cast<std::size_t>(stream)].path; }

  // Also while there is no choice, because another path may return.
  void look(int stream, const Delivery& delivery, const Backlog& backlog, double pace, bool at_once,
            std::int64_t now_ns);
  void take(int stream, std::size_t bytes, std::int64_t now_ns);

  // The path that would deliver so many bytes first, behind what it has to send. By what the kernel says of interfaces,
  // until the path that it says that of was measured; and the one to begin with counts as no slower than another of its
  // speed, until something was queued over it.
  std::size_t best(std::size_t bytes, std::int64_t now_ns) const;
  // Of so many bytes that wait, how many this path may take now if the best one is that. 0: none.
  std::size_t share(std::size_t path, std::size_t best, std::size_t bytes, std::int64_t now_ns) const;
  // The paths that may take some of what waits, a bit mask: `bytes` in all, `first` of them of the first message.
  std::uint64_t taking(std::size_t first, std::size_t bytes, std::int64_t now_ns) const;

 private:
  struct Stream {
    std::size_t path = 0;
    std::optional<std::size_t> connection;  // in the load of its path; nullopt: it does not send
  };
  void remove(Stream* stream);

  const std::vector<std::shared_ptr<PathLoad>> loads_;
  std::vector<std::size_t> streams_on_;  // by path, how many send
  std::array<Stream, kMaxStreams> streams_;
  std::size_t first_ = 0;
  bool has_choice_ = false;
};

}  // namespace bagua_net
