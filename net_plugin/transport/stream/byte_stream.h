// ByteStream: the one interface around the byte path. Everything above it (framing, scheduling, workers) works on any
// ordered, reliable, non-blocking stream: TCP, sealed records over TCP, a byte-wise fake in the tests.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#include "base/owned_fd.h"
#include "transport/tuning/rate_estimator.h"

namespace bagua_net {

// What the peer's kernel has answered to what was written last. A peer that is alive but does not read answers, too.
struct PeerLiveness {
  std::int64_t ms = 0;    // since the other end acknowledged anything
  int transmissions = 0;  // since then: repeated data, or probes of a closed window; 0: nothing is to be answered
  // For at least so long data has been unanswered, by the kernel's own intervals between its transmissions.
  std::int64_t unanswered_ms = std::numeric_limits<std::int64_t>::max();  // not known: probes
  // The last transmission went out. Not if the one before still waits in a queue of this host, or found it full.
  bool went_out = true;
  std::uint32_t packet_bytes = 0;  // the largest that goes out
  std::int64_t data_ms = 0;        // since the other end sent data
  std::int64_t sent_ms = 0;        // since this end did
};

class ByteStream {
 public:
  virtual ~ByteStream() = default;

  // Like readv and writev on a non-blocking socket: bytes moved, 0 at the end of input, or -1 with errno set
  // (EAGAIN: the poller tells when to go on; EBADMSG: these are not the bytes that the peer sent). Never raises
  // SIGPIPE. After a short write or EAGAIN, the next write begins with the bytes that are left.
  virtual ssize_t read(const iovec* pieces, std::size_t count) = 0;
  virtual ssize_t write(const iovec* pieces, std::size_t count) = 0;

  // Writes `copied` and then `referred`. The kernel may keep references to `referred` instead of a copy, so it must not
  // change until the peer's program has received it. `referred` continues where the last call stopped. A short write
  // does not mean that there is no room; EAGAIN does. EOPNOTSUPP: nothing was taken, and write() has to be used.
  virtual ssize_t write_by_reference(const iovec& copied, const iovec& referred);

  // False: this stream does not know.
  virtual bool delivery(Delivery*) const { return false; }
  virtual bool peer_liveness(PeerLiveness*) const { return false; }
  // From now on peer_liveness() finds out within two seconds, although nothing is under way. Any thread.
  virtual void probe_when_idle() {}

  // Written, and not acknowledged by the other end's kernel.
  virtual std::size_t undelivered_bytes() const { return 0; }

  // Bytes that went out so far beyond those that write() has reported. By the driver.
  virtual std::uint64_t overhead_bytes() const { return 0; }

  // What the poller watches.
  virtual int fd() const = 0;
  // Ends both directions: the peer sees the end of input, bytes that the kernel took are still delivered. Any thread.
  virtual void shutdown() = 0;
  // Breaks the connection at once, and discards what is in flight: for referred memory that is about to change.
  virtual void reset() { shutdown(); }
  // After a reset: until nothing outside this process reads referred memory any more. False: something still does.
  virtual bool wait_until_released(int /*limit_ms*/) { return true; }
  // The peer has reset the connection, or it was lost. Bytes that arrived before can still be read.
  virtual bool is_broken() const { return false; }
};

std::unique_ptr<ByteStream> make_tcp_byte_stream(OwnedFd socket);

}  // namespace bagua_net
