// HandshakeSettings: what both sides of a handshake need to know of this process. HandshakeLoop: what they share of the
// connection service.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/log_sink.h"
#include "base/monotonic_clock.h"
#include "config/plugin_config.h"
#include "crypto/cipher_state.h"
#include "crypto/job_secret.h"
#include "os/epoll_poller.h"
#include "os/tcp_socket.h"
#include "stats/stall_report.h"
#include "transport/chunks/limits.h"
#include "transport/connect/optional_connections.h"
#include "transport/connect/path_states.h"
#include "wire/connect_handle.h"

namespace bagua_net {

// The number of streams with which "auto" begins: one for small messages, and three for workers. Without workers one
// thread does all I/O, and further streams only help if the network limits each connection. With several paths, each
// has equally many of those that large messages use.
//
// On a long path one for large messages: each has to find out what the path carries, and those that do not know it yet
// delay a message by round trips. All-reduce at 10 Gb/s with 1 ms one way: 2,780 us instead of 2,970 for 1 MiB, 13.8 ms
// instead of 15.8 for 16; with 5 ms, 10.6 and 18.0 instead of 10.9 and 18.7.
constexpr int first_auto_streams(bool has_workers, std::size_t paths = 1, bool is_long = false) {
  const int each = static_cast<int>(paths);
  const int large = is_long ? each : (3 + each - 1) / each * each;
  return has_workers ? 1 + large : each;
}
// What it may grow to between hosts.
constexpr int kMaxAutoStreams = 16;

struct HandshakeSettings {
  TcpOptions tcp;
  std::optional<int> streams;           // empty: auto, as many as improve throughput
  Recovery recovery = Recovery::kAuto;  // of lost connections, if the peer also has it
  bool checksums = false;               // asks for them; the peer may do so, too
  bool has_workers = false;             // auto asks for more streams where workers can drive them
  std::uint32_t max_chunk_bytes = 524288;
  int connect_timeout_ms = 60000;
  int handshake_timeout_ms = 10000;
  std::string host_name;
  std::uint64_t process_id = 0;
  std::shared_ptr<const JobSecret> secret;                             // nullptr: the job has none
  bool encrypts = false;                                               // needs the secret
  bool uses_aes = cpu_has_aes();                                       // if the peer does, too
  std::shared_ptr<PathStates> paths = std::make_shared<PathStates>();  // of the process
  StallReport* stalls = nullptr;            // outlives whoever has the settings; nullptr: nothing is reported
  OptionalConnections* optional = nullptr;  // outlives whoever has the settings; nullptr: without limits

  // That a listener grants to a comm.
  int most_streams() const { return streams.value_or(kMaxStreams); }
  Protection protection() const {
    Protection protection;
    if (secret != nullptr) protection.key_id = secret->id();
    protection.encrypts = encrypts;
    return protection;
  }
};

// The service's mutex guards it.
struct HandshakeLoop {
  EpollPoller* poller;
  std::uint64_t next_id = 0;  // of the poller
  RareLog log = {};           // written once the mutex is free
  ActiveClock clock{300};
  // Of the clock: when the sockets were asked last. What had come by then was taken in, so earlier deadlines count.
  std::int64_t asked_ms = 0;

  std::int64_t look() { return clock.look(monotonic_ms()); }
  std::int64_t now_ms() const { return clock.at(monotonic_ms()); }
};

}  // namespace bagua_net
