#include "bench/all_reduce_kernel.h"

#include <cstring>

namespace bagua_net::bench {

AllReduceKernel::AllReduceKernel(const RingPlan& plan, std::uint64_t round)
    : rank_(plan.geometry().rank),
      nranks_(plan.geometry().nranks),
      buffer_bytes_(plan.buffer_bytes()),
      pattern_(plan.element_bytes() == 4 ? ElementType::kFloat32 : ElementType::kUint8, nranks_, round) {}

Status AllReduceKernel::allocate_result() {
  BAGUA_NET_RETURN_IF_ERROR(result_.allocate(buffer_bytes_, "the result of verify"));
  // uint8 has no value that cannot be a sum, so an unwritten byte is made a wrong one: right + 1.
  if (pattern_.element_bytes() == 1) {
    std::memset(result_.data(), 0, buffer_bytes_);
    for (int rank = 0; rank < nranks_; ++rank) pattern_.add(rank, 0, buffer_bytes_, result_.data());
    for (std::size_t i = 0; i < buffer_bytes_; ++i) ++result_.data()[i];
  }
  return Status::ok();
}

void AllReduceKernel::fill(const RingMessage& message, std::uint8_t* slot) {
  pattern_.write(rank_, message.offset, message.bytes, slot);
}

void AllReduceKernel::receive(const RingMessage& message, std::uint8_t* slot) {
  const int last_sum_step = nranks_ - 2;  // after it every contribution is in
  if (message.step <= last_sum_step) pattern_.add(rank_, message.offset, message.bytes, slot);
  if (message.step >= last_sum_step) std::memcpy(result_.data() + message.offset, slot, message.bytes);
}

}  // namespace bagua_net::bench
