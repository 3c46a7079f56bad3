// FaultInjector: carries out the plan of BAGUA_NET_FAULT on the connections of this process. One per transport context,
// which outlives its comms. Cuts and drops happen at random times, to the connection that moves bytes next, if one does
// so within a second.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <random>

#include "base/mutex.h"
#include "config/fault_plan.h"
#include "crypto/cipher_state.h"
#include "transport/stream/byte_stream.h"

namespace bagua_net {

class FaultInjector {
 public:
  // What was done so far.
  struct Counts {
    std::atomic<std::uint64_t> cuts{0};
    std::atomic<std::uint64_t> drops{0};
    std::atomic<std::uint64_t> delays{0};
    std::atomic<std::uint64_t> flips{0};
  };

  // nullptr: the plan asks for no fault. Otherwise says so in the log.
  static std::unique_ptr<FaultInjector> create(const FaultPlan& plan);
  explicit FaultInjector(const FaultPlan& plan);
  ~FaultInjector();  // says in the log what was done
  FaultInjector(const FaultInjector&) = delete;
  FaultInjector& operator=(const FaultInjector&) = delete;

  const FaultPlan& plan() const { return plan_; }
  Counts& counts() { return counts_; }
  const Counts& counts() const { return counts_; }

  // Any thread.
  std::unique_ptr<ByteStream> wrap(std::unique_ptr<ByteStream> bytes);
  // True: the caller has to carry the fault out.
  bool take_cut() { return take(plan_.cuts_per_s, &next_cut_ns_); }
  bool take_drop() { return take(plan_.drops_per_s, &next_drop_ns_); }

 private:
  bool take(double per_s, std::atomic<std::int64_t>* next_ns);
  std::int64_t pause_ns(double per_s);

  const FaultPlan plan_;
  Counts counts_;
  std::atomic<std::uint64_t> streams_{0};
  Mutex mutex_;
  std::mt19937_64 random_ GUARDED_BY(mutex_);
  std::atomic<std::int64_t> next_cut_ns_{0};
  std::atomic<std::int64_t> next_drop_ns_{0};
};

// What a comm moves its bytes with, sealed if the connection has keys. faults: nullptr, or what damages what is on the
// wire.
std::unique_ptr<ByteStream> make_byte_stream(KeyedSocket socket, FaultInjector* faults);

}  // namespace bagua_net
