// The data of a verified all-reduce, and what is done with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "bench/page_buffer.h"
#include "bench/ring_plan.h"

namespace bagua_net::bench {

enum class ElementType { kFloat32, kUint8 };  // uint8 sums wrap around

// Every rank's input depends on its rank, on the position in the buffer and on a round number, and the sum over the
// ranks has a closed form; so a message that is lost, repeated, misplaced, cut or left over from the round before gives
// a wrong sum somewhere.
//
// Values are base + rank * factor with base in 0..1023 and factor in 1..8, both taken from a hash of round and
// position. The sum over 1024 ranks (kMaxRanks) is below 2^23: exact in float32 in any order of addition.
class Pattern {
 public:
  Pattern(ElementType type, int nranks, std::uint64_t round);

  std::size_t element_bytes() const { return type_ == ElementType::kFloat32 ? 4 : 1; }

  // One rank's input for the buffer's bytes [offset, offset + bytes): written, or added to what is there.
  void write(int rank, std::size_t offset, std::size_t bytes, std::uint8_t* data) const;
  void add(int rank, std::size_t offset, std::size_t bytes, std::uint8_t* data) const;

  struct Verdict {
    std::size_t wrong_elements = 0;
    std::optional<std::size_t> first_wrong;  // element index
  };
  // Compares a whole reduced buffer, element by element.
  Verdict check_sum(const std::uint8_t* data, std::size_t bytes) const;

 private:
  struct Terms {
    std::uint32_t base;
    std::uint32_t factor;
  };
  Terms terms(std::size_t element) const;
  void put(int rank, std::size_t offset, std::size_t bytes, bool adds, std::uint8_t* data) const;

  ElementType type_;
  std::uint32_t nranks_;
  std::uint64_t seed_;
};

// The arithmetic of a sum all-reduce on the slices of a RingSchedule, done by the CPU for `verify`. Keeps every
// finished slice in a buffer of its own and says afterwards whether all of it is right.
class AllReduceKernel {
 public:
  AllReduceKernel(const RingPlan& plan, std::uint64_t round);

  // A message of step 0 is about to be sent: writes this rank's contribution into its slot. May be called again for the
  // same message if the transport had no room.
  void fill(const RingMessage& message, std::uint8_t* slot);
  // A message has arrived in `slot`, before it is passed on.
  void receive(const RingMessage& message, std::uint8_t* slot);

  Pattern::Verdict check() const { return pattern_.check_sum(result_.data(), buffer_bytes_); }

 private:
  const int rank_;
  const int nranks_;
  const std::size_t buffer_bytes_;
  const Pattern pattern_;
  PageBuffer result_;  // holds no valid element until slices arrive
};

}  // namespace bagua_net::bench
