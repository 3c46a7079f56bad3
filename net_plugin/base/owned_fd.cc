#include "base/owned_fd.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace bagua_net {
namespace {

constexpr int kWordBits = 64;
constexpr int kMaxFds = 1 << 20;  // fs.nr_open, unless raised. Words that nobody touches take no memory.

// Relaxed: fork() orders the child after what its own thread did, and other threads' sockets may be missed anyway.
std::array<std::atomic<std::uint64_t>, kMaxFds / kWordBits> marked;
std::atomic<int> used_words{0};

}  // namespace

void mark_uninherited(int fd) {
  if (fd < 0 || fd >= kMaxFds) return;
  const int word = fd / kWordBits;
  marked[static_cast<std::size_t>(word)].fetch_or(std::uint64_t{1} << fd % kWordBits, std::memory_order_relaxed);
  int used = used_words.load(std::memory_order_relaxed);
  while (used <= word && !used_words.compare_exchange_weak(used, word + 1, std::memory_order_relaxed)) {
  }
}

void unmark_uninherited(int fd) {
  if (fd < 0 || fd >= kMaxFds) return;
  std::atomic<std::uint64_t>& word = marked[static_cast<std::size_t>(fd / kWordBits)];
  const std::uint64_t bit = std::uint64_t{1} << fd % kWordBits;
  if ((word.load(std::memory_order_relaxed) & bit) != 0) word.fetch_and(~bit, std::memory_order_relaxed);
}

void close_uninherited() {
  const int used = used_words.load(std::memory_order_relaxed);
  for (int word = 0; word < used; ++word) {
    std::uint64_t bits = marked[static_cast<std::size_t>(word)].exchange(0, std::memory_order_relaxed);
    for (; bits != 0; bits &= bits - 1) ::close(word * kWordBits + __builtin_ctzll(bits));
  }
}

}  // namespace bagua_net
