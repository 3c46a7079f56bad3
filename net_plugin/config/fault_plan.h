// FaultPlan: what BAGUA_NET_FAULT asks for, to test how a job behaves on a bad network. Cuts and drops are counted per
// process, the others per connection.
#pragma once

#include <cstdint>
#include <string>

namespace bagua_net {

struct FaultPlan {
  std::uint64_t seed = 0;
  double cuts_per_s = 0;         // connections that break, of this process
  double drops_per_s = 0;        // connections that go silent
  double delay_probability = 0;  // of a read or write that moves data
  std::int64_t delay_us = 0;
  double flip_probability = 0;  // of a byte: one of its bits is inverted

  bool any() const { return cuts_per_s > 0 || drops_per_s > 0 || delay_probability > 0 || flip_probability > 0; }
};

// "seed=7,cut=1/s,drop=0.1/s,delay=5ms@0.01,flip=1e-6". Returns "" after it stored the plan, or else what the text must
// be and what is wrong with it.
std::string parse_fault_plan(const std::string& text, FaultPlan* plan);

}  // namespace bagua_net
