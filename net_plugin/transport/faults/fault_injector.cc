#include "transport/faults/fault_injector.h"

#include <linux/filter.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/log_sink.h"
#include "base/monotonic_clock.h"
#include "transport/stream/sealed_byte_stream.h"

namespace bagua_net {
namespace {

// A fault that is due during a longer time without traffic is skipped. Otherwise, after a drop has stopped the job, the
// next drop would hit the first bytes of the replacement, and so on.
constexpr std::int64_t kMaxDelayNs = 1'000'000'000;

std::mt19937_64 generator(std::uint64_t seed, std::uint64_t stream, unsigned use) {
  std::seed_seq mixed{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                      static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32), use};
  return std::mt19937_64(mixed);
}

std::size_t bytes_of(const iovec* pieces, std::size_t count) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < count; ++i) bytes += pieces[i].iov_len;
  return bytes;
}

// `bytes` of the pieces, from byte `begin` on.
void slice(const iovec* pieces, std::size_t count, std::size_t begin, std::size_t bytes, std::vector<iovec>* part) {
  part->clear();
  for (std::size_t i = 0; i < count && bytes > 0; ++i) {
    const std::size_t skipped = std::min(pieces[i].iov_len, begin);
    begin -= skipped;
    if (skipped == pieces[i].iov_len) continue;
    part->push_back(
        {static_cast<std::uint8_t*>(pieces[i].iov_base) + skipped, std::min(pieces[i].iov_len - skipped, bytes)});
    bytes -= part->back().iov_len;
  }
}

std::uint8_t byte_at(const iovec* pieces, std::size_t position) {
  for (; position >= pieces->iov_len; ++pieces) position -= pieces->iov_len;
  return static_cast<const std::uint8_t*>(pieces->iov_base)[position];
}

// FaultyByteStream: a connection with the faults of a plan.
//
//   cut    a read or write ends at a random byte, and then the connection is closed or reset
//   drop   nothing that the other end sends arrives any more, acknowledgements of its kernel included; nobody is told
//   delay  the calling thread sleeps after it has moved bytes, as on a host that is too busy
//   flip   a bit of what is read or written is inverted, anywhere in the stream
//
// Where faults fall depends on the seed, on the number of the stream and on what it moves.
class FaultyByteStream final : public ByteStream {
 public:
  FaultyByteStream(std::unique_ptr<ByteStream> bytes, FaultInjector* faults, std::uint64_t number);

  ssize_t read(const iovec* pieces, std::size_t count) override;
  ssize_t write(const iovec* pieces, std::size_t count) override;
  ssize_t write_by_reference(const iovec& copied, const iovec& referred) override;

  bool delivery(Delivery* delivery) const override { return bytes_->delivery(delivery); }
  bool peer_liveness(PeerLiveness* liveness) const override { return bytes_->peer_liveness(liveness); }
  void probe_when_idle() override { bytes_->probe_when_idle(); }
  std::size_t undelivered_bytes() const override { return bytes_->undelivered_bytes(); }
  int fd() const override { return bytes_->fd(); }
  void shutdown() override { bytes_->shutdown(); }
  void reset() override { bytes_->reset(); }
  bool wait_until_released(int limit_ms) override { return bytes_->wait_until_released(limit_ms); }
  bool is_broken() const override { return bytes_->is_broken(); }

 private:
  // The bytes of one direction to be flipped: the next one, counted from the last that was moved.
  struct Flips {
    std::mt19937_64 random;
    std::uint64_t distance = 0;
    unsigned bit = 0;

    std::uint8_t flipped(std::uint8_t byte) const { return static_cast<std::uint8_t>(byte ^ 1u << bit); }
  };

  void draw_flip(Flips* flips);
  // A place in an operation on so many bytes; often within the first, where headers are.
  std::size_t random_place(std::size_t bytes);
  // What the operation returns that has moved so many bytes.
  ssize_t cut(ssize_t moved);
  void maybe_drop();
  void maybe_delay(ssize_t moved);
  ssize_t write_flipped(const iovec* pieces, std::size_t count, std::size_t bytes);

  const std::unique_ptr<ByteStream> bytes_;
  FaultInjector* const faults_;  // outlives the comm that has this stream
  std::mt19937_64 random_;
  Flips flips_in_;
  Flips flips_out_;
  bool has_gap_ = false;       // bytes were lost that came before a cut
  std::vector<iovec> pieces_;  // of one call
};

FaultyByteStream::FaultyByteStream(std::unique_ptr<ByteStream> bytes, FaultInjector* faults, std::uint64_t number)
    : bytes_(std::move(bytes)),
      faults_(faults),
      random_(generator(faults->plan().seed, number, 0)),
      flips_in_{generator(faults->plan().seed, number, 1)},
      flips_out_{generator(faults->plan().seed, number, 2)} {
  draw_flip(&flips_in_);
  draw_flip(&flips_out_);
}

void FaultyByteStream::draw_flip(Flips* flips) {
  const double probability = faults_->plan().flip_probability;
  flips->distance = std::numeric_limits<std::uint64_t>::max();
  if (probability <= 0) return;
  flips->distance = 0;
  if (probability < 1) flips->distance = std::geometric_distribution<std::uint64_t>(probability)(flips->random);
  flips->bit = static_cast<unsigned>(flips->random() % 8);
}

std::size_t FaultyByteStream::random_place(std::size_t bytes) {
  constexpr std::size_t kHeader = 48;
  return random_() % (1 + (random_() % 2 == 0 ? std::min(bytes, kHeader) : bytes));
}

ssize_t FaultyByteStream::cut(ssize_t moved) {
  faults_->counts().cuts.fetch_add(1);
  const sockaddr nowhere{AF_UNSPEC, {}};
  // Disconnecting resets the connection. This is the system call itself, because ThreadSanitizer regards connect() as
  // the creation of the descriptor, which would race with another thread that removes it from a poller.
  const bool was_reset = random_() % 2 == 0 && ::syscall(SYS_connect, fd(), &nowhere, sizeof nowhere) == 0;
  if (!was_reset) bytes_->shutdown();
  if (moved > 0) return moved;
  errno = ECONNRESET;
  return -1;
}

void FaultyByteStream::maybe_drop() {
  if (!faults_->take_drop()) return;
  sock_filter program[] = {{BPF_RET | BPF_K, 0, 0, 0}};  // keeps nothing of any packet
  const sock_fprog filter{1, program};
  if (::setsockopt(fd(), SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) == 0) {
    faults_->counts().drops.fetch_add(1);
  }
}

void FaultyByteStream::maybe_delay(ssize_t moved) {
  const FaultPlan& plan = faults_->plan();
  if (moved <= 0 || plan.delay_probability <= 0) return;
  if (std::uniform_real_distribution<double>()(random_) >= plan.delay_probability) return;
  faults_->counts().delays.fetch_add(1);
  const int error_number = errno;
  std::this_thread::sleep_for(std::chrono::microseconds(plan.delay_us));
  errno = error_number;
}

ssize_t FaultyByteStream::read(const iovec* pieces, std::size_t count) {
  // The kernel may have more data, but there would be a gap before it.
  if (has_gap_) {
    errno = ECONNRESET;
    return -1;
  }
  const ssize_t received = bytes_->read(pieces, count);
  if (received <= 0) return received;
  auto moved = static_cast<std::size_t>(received);
  if (faults_->take_cut()) {
    moved = random_place(moved - 1);  // the rest is lost with the connection
    has_gap_ = true;
    if (cut(static_cast<ssize_t>(moved)) < 0) return -1;
  }
  maybe_drop();
  std::size_t left = moved;
  for (std::size_t i = 0; i < count && left > 0; ++i) {
    auto* const data = static_cast<std::uint8_t*>(pieces[i].iov_base);
    const std::size_t bytes = std::min(pieces[i].iov_len, left);
    std::size_t position = 0;
    while (flips_in_.distance < bytes - position) {
      position += static_cast<std::size_t>(flips_in_.distance);
      data[position] = flips_in_.flipped(data[position]);
      faults_->counts().flips.fetch_add(1);
      ++position;
      draw_flip(&flips_in_);
    }
    flips_in_.distance -= bytes - position;
    left -= bytes;
  }
  maybe_delay(static_cast<ssize_t>(moved));
  return static_cast<ssize_t>(moved);
}

ssize_t FaultyByteStream::write(const iovec* pieces, std::size_t count) {
  const std::size_t bytes = bytes_of(pieces, count);
  if (faults_->take_cut()) {
    const std::size_t place = random_place(bytes > 0 ? bytes - 1 : 0);
    return cut(write_flipped(pieces, count, place));
  }
  maybe_drop();
  const ssize_t written = write_flipped(pieces, count, bytes);
  maybe_delay(written);
  return written;
}

// A byte to be flipped is sent from a copy, after the bytes before it. Everything that there is room for is written,
// because a short write means a full socket buffer.
ssize_t FaultyByteStream::write_flipped(const iovec* pieces, std::size_t count, std::size_t bytes) {
  std::size_t written = 0;
  while (written < bytes) {
    const bool flips = flips_out_.distance < bytes - written;
    const std::size_t clean = flips ? static_cast<std::size_t>(flips_out_.distance) : bytes - written;
    slice(pieces, count, written, clean, &pieces_);
    std::uint8_t damaged = 0;
    if (flips) {
      damaged = flips_out_.flipped(byte_at(pieces, written + clean));
      pieces_.push_back({&damaged, 1});
    }
    const ssize_t moved = bytes_->write(pieces_.data(), pieces_.size());
    if (moved < 0) return written > 0 ? static_cast<ssize_t>(written) : -1;
    written += static_cast<std::size_t>(moved);
    if (static_cast<std::size_t>(moved) > clean) {
      faults_->counts().flips.fetch_add(1);
      draw_flip(&flips_out_);
      continue;
    }
    flips_out_.distance -= static_cast<std::size_t>(moved);
    if (flips || static_cast<std::size_t>(moved) < clean) break;
  }
  return static_cast<ssize_t>(written);
}

ssize_t FaultyByteStream::write_by_reference(const iovec& copied, const iovec& referred) {
  // Zero-copy bytes are the application's memory, so they cannot be flipped.
  if (faults_->plan().flip_probability > 0) {
    errno = EOPNOTSUPP;
    return -1;
  }
  if (faults_->take_cut()) {
    const std::size_t place = random_place(copied.iov_len + referred.iov_len - 1);
    const std::size_t first = std::min(copied.iov_len, place);
    ssize_t written = 0;
    if (place > 0) {
      written = bytes_->write_by_reference({copied.iov_base, first}, {referred.iov_base, place - first});
    }
    return cut(written);
  }
  maybe_drop();
  const ssize_t written = bytes_->write_by_reference(copied, referred);
  maybe_delay(written);
  return written;
}

}  // namespace

std::unique_ptr<FaultInjector> FaultInjector::create(const FaultPlan& plan) {
  if (!plan.any()) return nullptr;
  BAGUA_NET_WARN("Bagua-Net: BAGUA_NET_FAULT is set (seed " + std::to_string(plan.seed) +
                 "): this process damages its own connections on purpose. Unset it outside of tests");
  return std::make_unique<FaultInjector>(plan);
}

FaultInjector::FaultInjector(const FaultPlan& plan) : plan_(plan), random_(plan.seed) {
  const std::int64_t now_ns = monotonic_ns();
  if (plan.cuts_per_s > 0) next_cut_ns_ = now_ns + pause_ns(plan.cuts_per_s);
  if (plan.drops_per_s > 0) next_drop_ns_ = now_ns + pause_ns(plan.drops_per_s);
}

FaultInjector::~FaultInjector() {
  BAGUA_NET_WARN("Bagua-Net: BAGUA_NET_FAULT has cut " + std::to_string(counts_.cuts) + " connections, silenced " +
                 std::to_string(counts_.drops) + ", delayed " + std::to_string(counts_.delays) +
                 " reads and writes and inverted " + std::to_string(counts_.flips) + " bits");
}

std::int64_t FaultInjector::pause_ns(double per_s) {
  const MutexLock lock(mutex_);
  return static_cast<std::int64_t>(1e9 * std::exponential_distribution<double>(per_s)(random_));
}

bool FaultInjector::take(double per_s, std::atomic<std::int64_t>* next_ns) {
  if (per_s <= 0) return false;
  std::int64_t due_ns = next_ns->load(std::memory_order_relaxed);
  const std::int64_t now_ns = monotonic_ns();
  if (now_ns < due_ns) return false;
  // No other thread takes a fault while the time of the next one is drawn.
  if (!next_ns->compare_exchange_strong(due_ns, std::numeric_limits<std::int64_t>::max())) return false;
  next_ns->store(now_ns + pause_ns(per_s));
  return now_ns - due_ns <= kMaxDelayNs;
}

std::unique_ptr<ByteStream> FaultInjector::wrap(std::unique_ptr<ByteStream> bytes) {
  return std::make_unique<FaultyByteStream>(std::move(bytes), this, streams_.fetch_add(1));
}

std::unique_ptr<ByteStream> make_byte_stream(KeyedSocket socket, FaultInjector* faults) {
  Protected<ConnectionKeys> keys = std::move(socket.keys);
  std::unique_ptr<ByteStream> bytes = make_tcp_byte_stream(std::move(socket));
  if (faults != nullptr) bytes = faults->wrap(std::move(bytes));
  return keys == nullptr ? std::move(bytes) : make_sealed_byte_stream(std::move(bytes), std::move(keys));
}

}  // namespace bagua_net
