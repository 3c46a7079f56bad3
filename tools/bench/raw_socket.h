// What a connection of raw mode is made of: its first bytes, blocking reads and writes that give up when nothing moves,
// and failures that name the stream.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace bagua_net::bench {

// The first bytes of every connection, client to server.
//   0  8  "BAGUARAW"
//   8  2  index of this connection, big-endian
//  10  2  number of connections, big-endian
struct RawHello {
  using Bytes = std::array<std::uint8_t, 12>;

  std::size_t stream = 0;
  std::size_t streams = 0;

  Bytes encode() const;
  static bool decode(const Bytes& bytes, RawHello* hello);  // false: not a raw client
};

// Single bytes that the server sends on connection 0.
constexpr std::uint8_t kAllConnected = 'C';
constexpr std::uint8_t kRunReceived = 'R';

// A send or recv (SO_SNDTIMEO, SO_RCVTIMEO) that moves nothing for that long fails. 0: no limit.
void set_call_deadline(int socket, int option, std::int64_t timeout_ms);

// `result` and `error` (errno) of a send or recv; timeout_ms is the call deadline.
Status stream_failure(const std::string& operation, std::size_t stream, ssize_t result, int error,
                      std::int64_t timeout_ms);

// Every byte, or the failure. For blocking sockets with a call deadline.
Status receive_exactly(int socket, std::size_t stream, std::int64_t timeout_ms, std::uint8_t* data, std::size_t bytes);
Status send_exactly(int socket, std::size_t stream, std::int64_t timeout_ms, const std::uint8_t* data,
                    std::size_t bytes);

}  // namespace bagua_net::bench
