// ReceivedRanges: which bytes of a message have been received. Neighbouring ranges are one, so that there are rarely
// more than the comm has streams. Guarded by its owner.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace bagua_net {

class ReceivedRanges {
 public:
  enum class Overlap { kNone, kWhole, kPart };

  void clear() { ranges_.clear(); }
  std::size_t size() const { return ranges_.size(); }

  // How much of the range has been received.
  Overlap overlap(std::size_t begin, std::size_t end) const {
    const auto range = first_after(begin);
    if (range != ranges_.end() && range->begin <= begin && range->end >= end) return Overlap::kWhole;
    return range != ranges_.end() && range->begin < end ? Overlap::kPart : Overlap::kNone;
  }
  // The range was received; it overlaps none of the others.
  void add(std::size_t begin, std::size_t end) {
    // The range before it may end where it begins.
    auto next = std::lower_bound(ranges_.begin(), ranges_.end(), begin,
                                 [](const Range& range, std::size_t position) { return range.begin < position; });
    const bool joins_next = next != ranges_.end() && next->begin == end;
    const bool joins_previous = next != ranges_.begin() && std::prev(next)->end == begin;
    if (joins_previous && joins_next) {
      std::prev(next)->end = next->end;
      ranges_.erase(next);
    } else if (joins_previous) {
      std::prev(next)->end = end;
    } else if (joins_next) {
      next->begin = begin;
    } else {
      ranges_.insert(next, {begin, end});
    }
  }

 private:
  struct Range {
    std::size_t begin;
    std::size_t end;
  };

  // The first range that ends after the position.
  std::vector<Range>::const_iterator first_after(std::size_t position) const {
    return std::partition_point(ranges_.begin(), ranges_.end(),
                                [&](const Range& range) { return range.end <= position; });
  }

  std::vector<Range> ranges_;  // disjoint, in order
};

}  // namespace bagua_net
