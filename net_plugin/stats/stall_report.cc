#include "stats/stall_report.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

namespace bagua_net {
namespace {

// Each comm reports once a second. After this time, all that wait for the same cause have reported.
constexpr std::int64_t kGatherMs = 1500;
// A rank may wait for all others. The line names the peers with the longest waits.
constexpr std::size_t kNamedPeers = 4;

// A comm that waits reports once a second.
constexpr std::int64_t kForgetMs = 5000;

std::string seconds(std::int64_t ms) { return std::to_string(ms / 1000) + " s"; }

const char* words(StallReport::Waits what) {
  switch (what) {
    case StallReport::Waits::kToReceive: return "to receive from ";
    case StallReport::Waits::kToBeConnected: return "for a peer to connect to ";
    case StallReport::Waits::kToSend: return "to send to ";
  }
  return "";
}

}  // namespace

std::string StallReport::waits(const void* comm, Wait wait, std::int64_t now_ms) {
  const MutexLock lock(mutex_);
  longest_ms_ = std::max(longest_ms_, wait.ms);
  wait.said_ms = now_ms;
  waiting_[comm] = std::move(wait);
  for (auto other = waiting_.begin(); other != waiting_.end();) {
    other = now_ms - other->second.said_ms > kForgetMs ? waiting_.erase(other) : std::next(other);
  }
  if (due_ms_ == 0) due_ms_ = now_ms + std::min<std::int64_t>(kGatherMs, after_ms_);
  if (now_ms < due_ms_) return {};
  // The next line comes when the wait is twice as long.
  due_ms_ = now_ms + longest_ms_;
  is_written_ = true;
  return line();
}

std::int64_t StallReport::forget(const void* comm) noexcept {
  const MutexLock lock(mutex_);
  if (waiting_.erase(comm) == 0 || !waiting_.empty()) return 0;
  due_ms_ = 0;
  const std::int64_t longest_ms = std::exchange(longest_ms_, 0);
  return std::exchange(is_written_, false) ? longest_ms : 0;
}

std::string StallReport::goes_on(const void* comm) {
  const std::int64_t longest_ms = forget(comm);
  return longest_ms == 0 ? "" : "goes on, after at least " + seconds(longest_ms);
}

std::string StallReport::line() const {
  // NCCL opens several comms between the same two ranks, which wait for the same reason. Only the ports differ.
  std::map<std::pair<std::string, Waits>, std::pair<const Wait*, int>> by_peer;
  for (const auto& [comm, wait] : waiting_) {
    auto& [longest, count] = by_peer[{wait.peer.substr(std::min(wait.peer.find(" ("), wait.peer.size())), wait.what}];
    if (longest == nullptr || longest->ms < wait.ms) longest = &wait;
    ++count;
  }
  std::vector<std::pair<const Wait*, int>> waits;
  for (const auto& [peer, found] : by_peer) waits.push_back(found);
  std::sort(waits.begin(), waits.end(), [](const auto& one, const auto& other) {
    return std::tuple(one.first->what, -one.first->ms) < std::tuple(other.first->what, -other.first->ms);
  });
  std::string text = (rank_ < 0 ? std::string("this process") : "rank " + std::to_string(rank_)) + " has waited for " +
                     seconds(longest_ms_) + ": ";
  for (std::size_t number = 0; number < std::min(waits.size(), kNamedPeers); ++number) {
    const auto& [wait, comms] = waits[number];
    if (number > 0) text += "; ";
    text += words(wait->what) + wait->peer;
    if (comms > 1) text += " on " + std::to_string(comms) + " channels";
    text += ": " + wait->why;
  }
  if (waits.size() > kNamedPeers) text += "; and for " + std::to_string(waits.size() - kNamedPeers) + " more peers";
  return text + ". `bagua-net blame` on these hosts says who holds the job up";
}

}  // namespace bagua_net
