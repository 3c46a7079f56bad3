#include "transport/stream/network_workers.h"

#include <algorithm>
#include <cstdint>

namespace bagua_net {
namespace {

constexpr int kUnknownMbps = 80'000;

// What workers are counted for at least. Those of a cipher compute between two chunks, so each more of them costs more:
// six carry 25 Gb/s each way as ten do, with 2.8 cores less at both ends.
int least_mbps(Cipher cipher) { return cipher == Cipher::kNone ? kUnknownMbps : 48'000; }

// Of a core, for a byte that is sent and one that is received.
std::int64_t picoseconds_of(Cipher cipher) {
  switch (cipher) {
    case Cipher::kNone: return 400;
    case Cipher::kAes256Gcm: return 1000;
    case Cipher::kChaCha20Poly1305: return 2000;
  }
  return 400;
}

}  // namespace

int network_workers(int fastest_mbps, Cipher cipher) {
  constexpr std::int64_t kPerMbps = 8'000'000;  // picoseconds in which 1 Mb/s moves a byte
  const int mbps = fastest_mbps == 0 ? kUnknownMbps : std::max(fastest_mbps, least_mbps(cipher));
  const std::int64_t busy = mbps * picoseconds_of(cipher);
  return static_cast<int>((busy + kPerMbps - 1) / kPerMbps);
}

}  // namespace bagua_net
