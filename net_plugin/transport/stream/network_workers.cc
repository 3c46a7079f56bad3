#include "transport/stream/network_workers.h"

#include <algorithm>
#include <cstdint>

namespace bagua_net {
namespace {

struct Cost {
  std::int64_t picoseconds;  // of a core, for a byte that is sent and one that is received
  int unknown_mbps;          // what an interface of unknown speed is taken for
  // What workers are counted for at least. Those of a cipher compute between two chunks, so each more of them costs
  // more: six carry 25 Gb/s each way as ten do, with 2.8 cores less at both ends.
  int least_mbps;
};

// Without a cipher they wait more than they work, and leave half of the CPUs to the application, but four are few.
constexpr int kFew = 4;

Cost cost_of(Cipher cipher) {
  switch (cipher) {
    case Cipher::kNone: break;
    case Cipher::kAes256Gcm: return {1000, 80'000, 48'000};
    case Cipher::kChaCha20Poly1305: return {2000, 80'000, 48'000};
  }
  return {640, 100'000, 50'000};
}

}  // namespace

int network_workers(int fastest_mbps, Cipher cipher, int cpus) {
  constexpr std::int64_t kPerMbps = 8'000'000;  // picoseconds in which 1 Mb/s moves a byte
  const Cost cost = cost_of(cipher);
  const int mbps = fastest_mbps == 0 ? cost.unknown_mbps : std::max(fastest_mbps, cost.least_mbps);
  const std::int64_t busy = mbps * cost.picoseconds;
  const auto workers = static_cast<int>((busy + kPerMbps - 1) / kPerMbps);
  return cipher == Cipher::kNone ? std::min(workers, std::max(kFew, cpus / 2)) : workers;
}

}  // namespace bagua_net
