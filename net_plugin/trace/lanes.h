// Lanes: things that overlap are shown on tracks of their own. Each takes the first that is free. Any thread.
#pragma once

#include <atomic>
#include <cstdint>

namespace bagua_net {

class Lanes {
 public:
  static constexpr int kMax = 64;

  // -1: all are taken.
  int take() {
    std::uint64_t taken = taken_.load(std::memory_order_relaxed);
    for (;;) {
      if (~taken == 0) return -1;
      const int lane = __builtin_ctzll(~taken);
      if (taken_.compare_exchange_weak(taken, taken | bit(lane), std::memory_order_acquire)) return lane;
    }
  }
  void give_back(int lane) { taken_.fetch_and(~bit(lane), std::memory_order_release); }

 private:
  static std::uint64_t bit(int lane) { return std::uint64_t{1} << lane; }

  std::atomic<std::uint64_t> taken_{0};
};

}  // namespace bagua_net
