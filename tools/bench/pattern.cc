#include "bench/pattern.h"

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
void store(std::uint8_t* data, std::size_t index, float value) { std::memcpy(data + 4 * index, &value, 4); }

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

std::uint32_t Pattern::sum(std::size_t element) const {
  const Terms of = terms(element);
  return nranks_ * of.base + of.factor * (nranks_ * (nranks_ - 1) / 2);
}

void Pattern::write(int rank, std::size_t offset, std::size_t bytes, std::uint8_t* data) const {
  const auto factor_count = static_cast<std::uint32_t>(rank);
  const std::size_t first = offset / element_bytes();
  const std::size_t count = bytes / element_bytes();
  for (std::size_t i = 0; i < count; ++i) {
    const Terms of = terms(first + i);
    const std::uint32_t value = of.base + factor_count * of.factor;
    if (type_ == ElementType::kFloat32) {
      store(data, i, static_cast<float>(value));
    } else {
      data[i] = static_cast<std::uint8_t>(value);
    }
  }
}

void Pattern::add(int rank, std::size_t offset, std::size_t bytes, std::uint8_t* data) const {
  const auto factor_count = static_cast<std::uint32_t>(rank);
  const std::size_t first = offset / element_bytes();
  const std::size_t count = bytes / element_bytes();
  for (std::size_t i = 0; i < count; ++i) {
    const Terms of = terms(first + i);
    const std::uint32_t value = of.base + factor_count * of.factor;
    if (type_ == ElementType::kFloat32) {
      store(data, i, load(data, i) + static_cast<float>(value));
    } else {
      data[i] = static_cast<std::uint8_t>(data[i] + value);
    }
  }
}

Pattern::Verdict Pattern::check_sum(const std::uint8_t* data, std::size_t bytes) const {
  Verdict verdict;
  for (std::size_t i = 0; i < bytes / element_bytes(); ++i) {
    const std::uint32_t expected = sum(i);
    const bool right = type_ == ElementType::kFloat32 ? load(data, i) == static_cast<float>(expected)
                                                      : data[i] == static_cast<std::uint8_t>(expected);
    if (right) continue;
    ++verdict.wrong_elements;
    if (!verdict.first_wrong) verdict.first_wrong = i;
  }
  return verdict;
}

}  // namespace bagua_net::bench
