#include "stats/comm_stats.h"

#include <algorithm>
#include <utility>

namespace bagua_net {

CommStats::CommStats(std::shared_ptr<StatsPage> page, const StatsPage::CommNames& names,
                     const std::shared_ptr<Trace>& trace)
    : page_(std::move(page)), slot_(page_ == nullptr ? nullptr : page_->open_comm(names)) {
  if (trace != nullptr) {
    trace_ = std::make_unique<CommTrace>(trace, names.direction == CommDirection::kSend, names.interface, names.peer);
  }
  if (slot_ != nullptr) return;
  own_ = std::make_unique<CommSlot>();
  slot_ = own_.get();
  slot_->direction.store(static_cast<std::uint32_t>(names.direction));
  slot_->same_host.store(names.same_host ? 1 : 0);
  if (page_ != nullptr) page_->count_hidden(1);
}

CommStats::~CommStats() {
  if (page_ == nullptr) return;
  page_->close(slot_, streams_);
  if (own_ != nullptr) page_->count_hidden(-1);
}

StreamStats CommStats::open_stream(int index, const SocketAddress& local) {
  if (page_ == nullptr) return {};
  const auto place = static_cast<std::size_t>(index);
  StreamSlot* slot = place < streams_.size() ? streams_[place] : nullptr;
  if (slot == nullptr) {
    if (own_ == nullptr) slot = page_->open_stream(slot_, index);
    if (slot == nullptr) {
      own_streams_.push_back(std::make_unique<StreamSlot>());
      slot = own_streams_.back().get();
    }
    streams_.push_back(slot);
  }
  NicSlot* const nic = page_->set_nic(slot_, slot, local);
  std::unique_ptr<StreamTrace> trace;
  if (trace_ != nullptr) trace = trace_->open_stream(index, nic == nullptr ? "" : nic->name);
  return {slot, nic, std::move(trace)};
}

std::int64_t CommStats::oldest_request_ms() const {
  const auto now_ms = static_cast<std::uint32_t>(coarse_monotonic_ms());
  std::uint32_t oldest_ms = 0;
  for (const Word& word : slot_->posted_ms) {
    const std::uint32_t posted_ms = word.load(std::memory_order_relaxed);
    if (posted_ms != 0) oldest_ms = std::max(oldest_ms, now_ms - posted_ms);
  }
  return oldest_ms;
}

void CommStats::fail(const std::string& why) {
  if (page_ != nullptr) page_->fail(slot_, why);
  if (trace_ != nullptr) trace_->failed(why);
}

}  // namespace bagua_net
