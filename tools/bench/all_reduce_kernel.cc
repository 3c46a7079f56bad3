#include "bench/all_reduce_kernel.h"

#include <cstring>

namespace bagua_net::bench {
namespace {

// The finisher of the splitmix64 generator: neighbouring inputs give unrelated outputs.
std::uint64_t hash(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// memcpy: a slot is a byte buffer, never an array of floats.
float load(const std::uint8_t* data, std::size_t index) {
  float value = 0;
  std::memcpy(&value, data + 4 * index, 4);
  return value;
}

}  // namespace

Pattern::Pattern(ElementType type, int nranks, std::uint64_t round)
    : type_(type), nranks_(static_cast<std::uint32_t>(nranks)), seed_(hash(round)) {}

Pattern::Terms Pattern::terms(std::size_t element) const {
  const std::uint64_t bits = hash(seed_ ^ element);
  return {static_cast<std::uint32_t>(bits & 1023), static_cast<std::uint32_t>((bits >> 10) & 7) + 1};
}

void Pattern::put(int rank, std::size_t offset, std::size_t bytes, bool adds, std::uint8_t* data) const {
  const std::size_t first = offset / element_bytes();
  for (std::size_t i = 0; i < bytes / element_bytes(); ++i) {
    const Terms of = terms(first + i);
    const std::uint32_t value = of.base + static_cast<std::uint32_t>(rank) * of.factor;
    if (type_ == ElementType::kFloat32) {
      const float sum = static_cast<float>(value) + (adds ? load(data, i) : 0.0F);
      std::memcpy(data + 4 * i, &sum, 4);
    } else {
      data[i] = static_cast<std::uint8_t>(value + (adds ? data[i] : 0));
    }
  }
}

void Pattern::write(int rank, std::size_t offset, std::size_t bytes, std::uint8_t* data) const {
  put(rank, offset, bytes, false, data);
}

void Pattern::add(int rank, std::size_t offset, std::size_t bytes, std::uint8_t* data) const {
  put(rank, offset, bytes, true, data);
}

Pattern::Verdict Pattern::check_sum(const std::uint8_t* data, std::size_t bytes) const {
  Verdict verdict;
  for (std::size_t i = 0; i < bytes / element_bytes(); ++i) {
    const Terms of = terms(i);
    const std::uint32_t expected = nranks_ * of.base + of.factor * (nranks_ * (nranks_ - 1) / 2);
    const bool right = type_ == ElementType::kFloat32 ? load(data, i) == static_cast<float>(expected)
                                                      : data[i] == static_cast<std::uint8_t>(expected);
    if (right) continue;
    ++verdict.wrong_elements;
    if (!verdict.first_wrong) verdict.first_wrong = i;
  }
  return verdict;
}

AllReduceKernel::AllReduceKernel(const RingPlan& plan, std::uint64_t round)
    : rank_(plan.geometry().rank),
      nranks_(plan.geometry().nranks),
      buffer_bytes_(plan.buffer_bytes()),
      pattern_(plan.element_bytes() == 4 ? ElementType::kFloat32 : ElementType::kUint8, nranks_, round) {
  result_.allocate(buffer_bytes_, "the result of verify");
  // uint8 has no value that cannot be a sum, so an unwritten byte is made a wrong one: right + 1.
  if (pattern_.element_bytes() == 1) {
    std::memset(result_.data(), 1, buffer_bytes_);
    for (int rank = 0; rank < nranks_; ++rank) pattern_.add(rank, 0, buffer_bytes_, result_.data());
  }
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
