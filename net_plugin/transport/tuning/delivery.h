// Delivery: what the kernel reports about a connection. All estimates of speed are made from it.
#pragma once

#include <cstdint>

namespace bagua_net {

// Bytes and times since the connection began, and the current state of the path.
struct Delivery {
  std::uint64_t bytes = 0;
  std::int64_t busy_us = 0;        // while something was on its way or waited to go out
  std::uint64_t unsent_bytes = 0;  // written, and not gone out yet
  std::int64_t round_trip_us = 0;  // smoothed
  std::int64_t least_round_trip_us = 0;
  double permitted_bytes_per_ns = 0;  // the limit of TCP's pacing and window; 0: unknown
  std::uint64_t retransmits = 0;      // segments, ever
  std::int64_t peer_window_us = 0;    // of busy_us: the peer did not read,
  std::int64_t socket_buffer_us = 0;  // or the buffer was too small
};

// From this round trip on, a path is long. Within a data centre it takes less.
constexpr double kLongPathNs = 1e6;

// A message that is under way for longer waits for the rate of its connections, and not only for the path.
constexpr double kMaxRoundTrips = 2;

inline bool is_long(const Delivery& delivery) {
  return 1e3 * static_cast<double>(delivery.least_round_trip_us) >= kLongPathNs;
}

// Data is queued: in the socket, or in the network, where it makes the round trip longer than its minimum.
inline bool is_queued(const Delivery& delivery) {
  constexpr std::int64_t kJitterUs = 1000;
  return delivery.unsent_bytes > 0 ||
         delivery.round_trip_us > delivery.least_round_trip_us + delivery.least_round_trip_us / 4 + kJitterUs;
}

}  // namespace bagua_net
