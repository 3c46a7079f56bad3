// A ByteStream pair in memory that behaves as badly as the contract allows: it moves at most a few bytes at a time,
// and fails with EINTR or EAGAIN between any two of them, driven by a seed. Bytes go one way. As with TCP, a writer
// whose reader has closed may still write until there is no room, and finds the end only when it reads.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <utility>

#include "transport/stream/byte_stream.h"

namespace bagua_net {

struct PipeState {
  std::deque<std::uint8_t> bytes;
  bool closed = false;         // the writing end is gone
  bool reader_closed = false;  // the reading end
  std::size_t capacity = 64;
};

struct PipeBehaviour {
  std::size_t most_bytes = 1;  // per call
  int eintr_percent = 20;
  int eagain_percent = 30;
};

enum class PipeRole { kWriter, kReader };

class BytePipeEnd final : public ByteStream {
 public:
  BytePipeEnd(std::shared_ptr<PipeState> state, PipeRole role, PipeBehaviour behaviour, unsigned seed)
      : state_(std::move(state)), role_(role), behaviour_(behaviour), random_(seed) {}
  ~BytePipeEnd() override { BytePipeEnd::shutdown(); }
  BytePipeEnd(const BytePipeEnd&) = delete;
  BytePipeEnd& operator=(const BytePipeEnd&) = delete;

  ssize_t read(const iovec* pieces, std::size_t count) override {
    if (disturbed()) return -1;
    if (role_ == PipeRole::kWriter || state_->bytes.empty()) {
      if (role_ == PipeRole::kWriter ? state_->reader_closed : state_->closed) return 0;
      errno = EAGAIN;
      return -1;
    }
    std::size_t left = allowance();
    ssize_t moved = 0;
    for (std::size_t i = 0; i < count; ++i) {
      auto* out = static_cast<std::uint8_t*>(pieces[i].iov_base);
      for (std::size_t j = 0; j < pieces[i].iov_len && left > 0 && !state_->bytes.empty(); ++j, --left, ++moved) {
        out[j] = state_->bytes.front();
        state_->bytes.pop_front();
      }
    }
    return moved;
  }

  ssize_t write(const iovec* pieces, std::size_t count) override {
    if (disturbed()) return -1;
    if (state_->closed || role_ == PipeRole::kReader) {
      errno = EPIPE;
      return -1;
    }
    std::size_t left = std::min(allowance(), state_->capacity - state_->bytes.size());
    if (left == 0) {
      errno = EAGAIN;
      return -1;
    }
    ssize_t moved = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const auto* in = static_cast<const std::uint8_t*>(pieces[i].iov_base);
      for (std::size_t j = 0; j < pieces[i].iov_len && left > 0; ++j, --left, ++moved) state_->bytes.push_back(in[j]);
    }
    return moved;
  }

  int fd() const override { return -1; }
  void shutdown() override { (role_ == PipeRole::kWriter ? state_->closed : state_->reader_closed) = true; }

 private:
  bool disturbed() {
    const int roll = static_cast<int>(random_() % 100);
    if (roll >= behaviour_.eintr_percent + behaviour_.eagain_percent) return false;
    errno = roll < behaviour_.eintr_percent ? EINTR : EAGAIN;
    return true;
  }
  std::size_t allowance() { return 1 + random_() % behaviour_.most_bytes; }

  std::shared_ptr<PipeState> state_;
  const PipeRole role_;
  const PipeBehaviour behaviour_;
  std::mt19937 random_;
};

}  // namespace bagua_net
