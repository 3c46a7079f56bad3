// UnacknowledgedChunks: the chunks that one stream has written and the peer has not acknowledged, in the order in which
// they went out. One driver.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/status.h"
#include "transport/chunks/chunk.h"
#include "wire/frames.h"

namespace bagua_net {

class UnacknowledgedChunks {
 public:
  // most: a power of two.
  explicit UnacknowledgedChunks(std::size_t most = 64, bool checksums = false)
      : most_(most), checksums_(checksums), entries_(64) {}

  bool is_empty() const { return first_ == end_; }
  // More would wait for acknowledgements that a receiver may not have room to write.
  bool is_full() const { return size() == most_; }
  std::size_t size() const { return static_cast<std::size_t>(end_ - first_); }
  // A request depends on one of them.
  bool has_requests() const { return requests_ > 0; }
  // Some may be read by the kernel or the peer yet.
  bool has_references() const { return references_ > 0; }
  std::size_t copied_bytes() const { return copied_bytes_; }
  // The first message that a request waits for, or the first at all.
  std::uint64_t first_message() const;
  // The last that was written; not if it is empty.
  const Chunk& last() const { return entry(end_ - 1).chunk; }
  // The peer has closed its comm, and acknowledges nothing more.
  bool peer_has_closed() const { return peer_has_closed_; }
  // The port whose address the peer has lost, once; 0: none.
  std::uint16_t take_lost_port() { return static_cast<std::uint16_t>(std::exchange(lost_ports_, lost_ports_ >> 16)); }

  // The next chunk of the stream was written whole.
  void add(Chunk chunk);
  void add_done() { ++written_; }  // one that nobody waits for
  // Bytes of the reverse direction, cut anywhere. Copies go back to the pool.
  Status take(const std::uint8_t* bytes, std::size_t count, BlockPool* pool);
  // All of them, as if they had never been written.
  std::vector<Chunk> take_all();

 private:
  struct Entry {
    std::uint64_t ordinal = 0;  // of the chunk in its stream, from 1 on
    Chunk chunk;
  };

  Entry& entry(std::uint64_t position) { return entries_[position % entries_.size()]; }
  const Entry& entry(std::uint64_t position) const { return entries_[position % entries_.size()]; }
  void count(const Chunk& chunk, int sign);
  Status take_acknowledgement(const Acknowledgement& acknowledgement, BlockPool* pool);

  const std::size_t most_;
  const bool checksums_;        // of acknowledgements
  std::vector<Entry> entries_;  // a ring; grows up to most_
  std::uint64_t first_ = 0;
  std::uint64_t end_ = 0;
  std::uint64_t written_ = 0;       // chunks of the stream
  std::uint64_t acknowledged_ = 0;  // of them
  std::size_t requests_ = 0;
  std::size_t references_ = 0;
  std::size_t copied_bytes_ = 0;
  bool peer_has_closed_ = false;
  std::uint64_t lost_ports_ = 0;
  std::array<std::uint8_t, kAcknowledgementBytes> partial_{};
  std::size_t partial_bytes_ = 0;
};

}  // namespace bagua_net
