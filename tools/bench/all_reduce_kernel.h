// AllReduceKernel: the arithmetic of a sum all-reduce on the slices of a RingSchedule, done by the CPU for `verify`.
// Keeps every finished slice in a buffer of its own and says afterwards whether all of it is right.
#pragma once

#include <cstdint>

#include "bench/page_buffer.h"
#include "bench/pattern.h"
#include "bench/ring_plan.h"
#include "bench/ring_schedule.h"

namespace bagua_net::bench {

class AllReduceKernel final : public RingKernel {
 public:
  AllReduceKernel(const RingPlan& plan, std::uint64_t round);

  // Holds no valid element until slices arrive.
  Status allocate_result();

  void fill(const RingMessage& message, std::uint8_t* slot) override;
  void receive(const RingMessage& message, std::uint8_t* slot) override;

  Pattern::Verdict check() const { return pattern_.check_sum(result_.data(), buffer_bytes_); }

 private:
  const int rank_;
  const int nranks_;
  const std::size_t buffer_bytes_;
  const Pattern pattern_;
  PageBuffer result_;
};

}  // namespace bagua_net::bench
