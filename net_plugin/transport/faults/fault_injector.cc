#include "transport/faults/fault_injector.h"

#include <limits>
#include <string>
#include <utility>

#include "base/log_sink.h"
#include "base/monotonic_clock.h"
#include "transport/faults/faulty_byte_stream.h"
#include "transport/stream/sealed_byte_stream.h"

namespace bagua_net {
namespace {

// A fault that is due during a longer time without traffic is skipped. Otherwise, after a drop has stopped the job, the
// next drop would hit the first bytes of the replacement, and so on.
constexpr std::int64_t kMaxDelayNs = 1'000'000'000;

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
