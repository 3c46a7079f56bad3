// Two ByteStream ends in memory, for both directions of a data stream, that behave as badly as the contract allows:
// they move few bytes at a time, interrupt and refuse, driven by a seed. What is written by reference is read from the
// sender's memory only when the receiver reads it, so whoever overwrites it too early is found out.
//
// Each end tells of events as an edge-triggered poller does: once for every change, whatever the number of changes
// since it was asked last. A stream that nobody wakes hangs here as it would there.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "transport/stream/byte_stream.h"

namespace bagua_net {

constexpr std::size_t kAllBytes = std::numeric_limits<std::size_t>::max();

struct TwoWayBehaviour {
  // Per call; if not all, one call in four moves no more than three.
  std::size_t most_read = kAllBytes;
  std::size_t most_written = kAllBytes;
  int eintr_percent = 0;
  int eagain_percent = 0;
  std::size_t capacity = kAllBytes;  // of the direction that this end writes
  // The bytes, headers included, that go out by reference before EOPNOTSUPP.
  std::size_t zero_copy_bytes = kAllBytes;
};

class TwoWayEnd final : public ByteStream {
 public:
  struct Event {
    bool ready = false;
    bool peer_ended = false;  // the peer closed its end
    bool reset = false;
  };

  static std::pair<std::unique_ptr<TwoWayEnd>, std::unique_ptr<TwoWayEnd>> make(TwoWayBehaviour first,
                                                                                TwoWayBehaviour second, unsigned seed) {
    auto forth = std::make_shared<Direction>();
    auto back = std::make_shared<Direction>();
    return {std::unique_ptr<TwoWayEnd>(new TwoWayEnd(forth, back, first, seed)),
            std::unique_ptr<TwoWayEnd>(new TwoWayEnd(back, forth, second, seed + 1))};
  }
  ~TwoWayEnd() override { TwoWayEnd::shutdown(); }
  TwoWayEnd(const TwoWayEnd&) = delete;
  TwoWayEnd& operator=(const TwoWayEnd&) = delete;

  ssize_t read(const iovec* pieces, std::size_t count) override {
    if (is_disturbed(&in_->reader_event)) return -1;
    if (in_->bytes == 0) {
      if (in_->reader_told) return refuse(ECONNRESET);
      if (in_->reset && !std::exchange(in_->reset_told, true)) return refuse(ECONNRESET);
      return in_->ended ? 0 : refuse(EAGAIN);
    }
    const std::size_t allowed = allowance(behaviour_.most_read);
    std::size_t moved = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t wanted = std::min(pieces[i].iov_len, allowed - moved);
      moved += in_->take(static_cast<std::uint8_t*>(pieces[i].iov_base), wanted);
    }
    // As if the rest had come just after this call.
    if (in_->bytes > 0 && moved == allowed) in_->reader_event = true;
    if (std::exchange(in_->writer_waits, false)) in_->writer_event = true;
    return static_cast<ssize_t>(moved);
  }

  ssize_t write(const iovec* pieces, std::size_t count) override {
    const ssize_t moved = move_out(pieces, count, false, kAllBytes);
    // As if the room had run out, and come back just after this call.
    if (moved >= 0 && static_cast<std::size_t>(moved) < bytes_of(pieces, count)) wait_for_room();
    return moved;
  }

  // Here a short move means nothing, as with TCP: only EAGAIN does.
  ssize_t write_by_reference(const iovec& copied, const iovec& referred) override {
    if (behaviour_.zero_copy_bytes == 0) return refuse(EOPNOTSUPP);
    const iovec pieces[2] = {copied, referred};
    const ssize_t moved = move_out(pieces, 2, true, behaviour_.zero_copy_bytes);
    if (moved > 0) behaviour_.zero_copy_bytes -= static_cast<std::size_t>(moved);
    return moved;
  }

  int fd() const override { return -1; }
  // As of a socket: what was written can still be read, at both ends.
  void shutdown() override {
    end(*out_);
    end(*in_);
  }
  // What this end wrote can still be read, and then the peer finds an end; it may go on writing.
  void end_output() { end(*out_); }
  // The peer finds a connection reset, once it has read what there is.
  void reset() override {
    shutdown();
    out_->reset = true;
  }
  bool is_broken() const override { return in_->reset || in_->reader_told; }

  // The connection breaks: of what is under way, so many bytes arrive in each direction and no more. What is written
  // from now on is lost. Neither end knows, until it is told.
  void sever(std::size_t kept_in, std::size_t kept_out) {
    in_->cut_off(kept_in);
    out_->cut_off(kept_out);
  }
  // In a call of the test's own: nothing disturbs it.
  void write_all(const std::vector<std::uint8_t>& bytes) {
    out_->put({const_cast<std::uint8_t*>(bytes.data()), bytes.size()}, bytes.size(), false);
    out_->reader_event = true;
  }
  std::vector<std::uint8_t> read_all(std::size_t most = kAllBytes) {
    std::vector<std::uint8_t> bytes(std::min(in_->bytes, most));
    in_->take(bytes.data(), bytes.size());
    if (!bytes.empty() && std::exchange(in_->writer_waits, false)) in_->writer_event = true;
    return bytes;
  }
  void tell() {
    in_->reader_told = out_->writer_told = true;
    in_->reader_event = out_->writer_event = true;
  }
  std::size_t unwritten_bytes() const { return out_->bytes; }

  // What the poller would say now; the same change is told once.
  Event take_event() {
    const bool readable = std::exchange(in_->reader_event, false);
    const bool writable = std::exchange(out_->writer_event, false);
    return {readable || writable, in_->ended, in_->reset || in_->reader_told};
  }
  bool has_event() const { return in_->reader_event || out_->writer_event; }
  // Written by the other end, and not read yet.
  std::size_t unread_bytes() const { return in_->bytes; }

 private:
  struct Piece {
    std::vector<std::uint8_t> copied;
    const std::uint8_t* data;  // of `copied`, or the sender's
    std::size_t bytes;
  };
  struct Direction {
    std::deque<Piece> pieces;
    std::size_t bytes = 0;  // of them all
    bool ended = false;
    bool reset = false;
    bool reset_told = false;
    bool severed = false;
    bool reader_told = false;  // of that
    bool writer_told = false;
    bool writer_waits = false;  // it was refused for want of room
    bool reader_event = false;
    bool writer_event = false;

    void cut_off(std::size_t kept) {
      severed = true;
      while (bytes > kept) {
        const std::size_t lost = std::min(pieces.back().bytes, bytes - kept);
        pieces.back().bytes -= lost;
        bytes -= lost;
        if (pieces.back().bytes == 0) pieces.pop_back();
      }
    }
    void put(const iovec& piece, std::size_t most, bool zero_copy) {
      const auto* data = static_cast<const std::uint8_t*>(piece.iov_base);
      if (most == 0 || severed) return;
      pieces.push_back({{}, data, most});
      if (!zero_copy) {
        pieces.back().copied.assign(data, data + most);
        pieces.back().data = pieces.back().copied.data();
      }
      bytes += most;
    }
    std::size_t take(std::uint8_t* out, std::size_t most) {
      std::size_t taken = 0;
      while (taken < most && !pieces.empty()) {
        Piece& first = pieces.front();
        const std::size_t part = std::min(first.bytes, most - taken);
        std::copy(first.data, first.data + part, out + taken);
        taken += part;
        first.data += part;
        first.bytes -= part;
        if (first.bytes == 0) pieces.pop_front();
      }
      bytes -= taken;
      return taken;
    }
  };

  TwoWayEnd(std::shared_ptr<Direction> out, std::shared_ptr<Direction> in, TwoWayBehaviour behaviour, unsigned seed)
      : out_(std::move(out)), in_(std::move(in)), behaviour_(behaviour), random_(seed) {}

  static ssize_t refuse(int error_number) {
    errno = error_number;
    return -1;
  }
  static std::size_t bytes_of(const iovec* pieces, std::size_t count) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) bytes += pieces[i].iov_len;
    return bytes;
  }
  static void end(Direction& direction) {
    if (direction.severed) return;
    if (std::exchange(direction.ended, true)) return;
    direction.reader_event = direction.writer_event = true;
  }

  bool is_disturbed(bool* event) {
    const int roll = static_cast<int>(random_() % 100);
    if (roll >= behaviour_.eintr_percent + behaviour_.eagain_percent) return false;
    errno = roll < behaviour_.eintr_percent ? EINTR : EAGAIN;
    if (errno == EAGAIN) *event = true;
    return true;
  }
  std::size_t allowance(std::size_t most) {
    if (most == kAllBytes) return kAllBytes;
    return 1 + random_() % (random_() % 4 == 0 ? 3 : most);
  }
  std::size_t room() const { return behaviour_.capacity - std::min(behaviour_.capacity, out_->bytes); }
  void wait_for_room() { room() == 0 ? out_->writer_waits = true : out_->writer_event = true; }

  // zero_copy: the second piece is not copied.
  ssize_t move_out(const iovec* pieces, std::size_t count, bool zero_copy, std::size_t most) {
    if (is_disturbed(&out_->writer_event)) return -1;
    if (out_->ended || out_->writer_told) return refuse(EPIPE);
    const std::size_t allowed = std::min({allowance(behaviour_.most_written), room(), most});
    if (allowed == 0) {
      wait_for_room();
      return refuse(EAGAIN);
    }
    std::size_t moved = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t bytes = std::min(pieces[i].iov_len, allowed - moved);
      out_->put(pieces[i], bytes, zero_copy && i == 1);
      moved += bytes;
    }
    out_->reader_event = true;
    return static_cast<ssize_t>(moved);
  }

  const std::shared_ptr<Direction> out_;
  const std::shared_ptr<Direction> in_;
  TwoWayBehaviour behaviour_;
  std::mt19937 random_;
};

}  // namespace bagua_net
