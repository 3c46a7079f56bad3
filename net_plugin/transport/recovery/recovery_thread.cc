#include "transport/recovery/recovery_thread.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "base/background_thread.h"
#include "base/log_sink.h"
#include "base/monotonic_clock.h"
#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {
constexpr int kTickMs = 1000;
constexpr int kCloseStepMs = 1;
constexpr std::uint64_t kLinkEvent = 0;  // the id of no comm
}  // namespace

RecoveryThread::~RecoveryThread() {
  if (!thread_.joinable()) return;
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  poller_.wake();
  thread_.join();
}

Status RecoveryThread::start(const WatchedLinks& watched) {
  BAGUA_NET_RETURN_IF_ERROR(poller_.open());
  if (!watched.interfaces.empty()) watch_links(watched);
  return start_background_thread(
      "bagua-net-fix", nullptr, [this] { run(); }, &thread_, [this](const Status& failure) { fail(failure); });
}

void RecoveryThread::fail(const Status& failure) {
  {
    const MutexLock running(run_mutex_);
    failure_ = failure;
    for (const auto& [id, entry] : entries_) entry.recoverable->fail(failure);
  }
  // Without allocating: there may be no memory.
  MutexLock lock(mutex_);
  has_ended_ = true;
  for (; !closing_.empty(); closing_.pop_back()) {
    std::unique_ptr<Recoverable> closed = std::move(closing_.back());
    lock.unlock();
    closed.reset();  // its empty entry is still in closing_, so wait_until_closed() waits for the destructor, too
    lock.lock();
  }
  closed_.notify_all();
}

std::uint64_t RecoveryThread::new_id() {
  const MutexLock lock(mutex_);
  return next_id_++;
}

void RecoveryThread::add(std::uint64_t id, Recoverable* recoverable, bool ticks) {
  const MutexLock running(run_mutex_);
  if (ticks) {
    const MutexLock lock(mutex_);
    ++ticking_;
  }
  entries_.emplace(id, Entry{recoverable, ticks});
  if (!failure_.is_ok()) recoverable->fail(failure_);
  notify(id);
}

void RecoveryThread::remove(std::uint64_t id) {
  const MutexLock running(run_mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  if (found->second.ticks) {
    const MutexLock lock(mutex_);
    --ticking_;
  }
  entries_.erase(found);
}

void RecoveryThread::notify(std::uint64_t id) {
  {
    const MutexLock lock(mutex_);
    if (std::find(notified_.begin(), notified_.end(), id) != notified_.end()) return;
    notified_.push_back(id);
  }
  poller_.wake();
}

Status RecoveryThread::watch(int fd, std::uint64_t id, std::uint32_t flags) {
  poller_.remove(fd);
  return flags == 0 ? Status::ok() : poller_.add(fd, id, flags | EPOLLET);
}

void RecoveryThread::unwatch(int fd) { poller_.remove(fd); }

void RecoveryThread::close(std::unique_ptr<Recoverable> closing) {
  {
    const MutexLock lock(mutex_);
    if (has_ended_) return;  // the destructor closes it here
    closing_.push_back(std::move(closing));
  }
  poller_.wake();
}

bool RecoveryThread::is_closing() {
  const MutexLock lock(mutex_);
  return !closing_.empty();
}

void RecoveryThread::wait_until_closed() {
  MutexLock lock(mutex_);
  while (!closing_.empty()) lock.wait(closed_);
}

bool RecoveryThread::close_some() {
  std::vector<Recoverable*> closing;
  {
    const MutexLock lock(mutex_);
    for (const auto& owned : closing_) closing.push_back(owned.get());
  }
  for (Recoverable* const one : closing) {
    if (!one->is_closed(monotonic_ms())) continue;
    std::unique_ptr<Recoverable> closed;
    {
      const MutexLock lock(mutex_);
      const auto found =
          std::find_if(closing_.begin(), closing_.end(), [&](const auto& owned) { return owned.get() == one; });
      // Its empty entry stays in closing_, so wait_until_closed() waits for the destructor, too.
      closed = std::move(*found);
    }
    closed.reset();
  }
  const MutexLock lock(mutex_);
  closing_.erase(std::remove(closing_.begin(), closing_.end(), nullptr), closing_.end());
  if (closing_.empty()) closed_.notify_all();
  return !closing_.empty();
}

void RecoveryThread::watch_links(const WatchedLinks& watched) {
  on_link_state_ = watched.on_state;
  on_routes_ = watched.on_routes;
  unusable_since_ms_.assign(watched.interfaces.size(), 0);
  Status status = links_.open(watched.interfaces);
  if (status.is_ok()) status = poller_.add(links_.fd(), kLinkEvent, EPOLLIN);
  if (!status.is_ok()) {
    BAGUA_NET_INFO("Bagua-Net: an interface that goes down is noticed only by its silence: " + status.message());
    return;
  }
  for (std::size_t index = 0; index < links_.watched().size(); ++index) report_link(index, monotonic_ms());
}

void RecoveryThread::report_link(std::size_t index, std::int64_t now_ms) {
  const NetworkInterface& interface = links_.watched()[index];
  const LinkState state = links_.state(index);
  std::int64_t& since_ms = unusable_since_ms_[index];
  if (on_link_state_ != nullptr) on_link_state_(interface, state);
  if (state != LinkState::kUsable) {
    if (since_ms == 0) since_ms = now_ms;
    const std::string what = describe(state, interface);
    log_.add_if_due(LogLevel::kWarn, what, [&] { return "Bagua-Net: network interface " + what; });
  } else if (since_ms != 0) {
    log_.add_if_due(LogLevel::kInfo, interface.name, [&] {
      return "Bagua-Net: network interface " + interface.name + " can be used again, after " +
             std::to_string((now_ms - since_ms + 500) / 1000) + " s";
    });
    since_ms = 0;
  }
}

void RecoveryThread::look_at_links(std::int64_t now_ms) {
  const LinkWatch::Changes changes = links_.update(now_ms);
  for (const std::size_t index : changes.interfaces) report_link(index, now_ms);
  if (changes.routes && on_routes_ != nullptr) on_routes_();
  if (changes.routes || !changes.interfaces.empty()) tell_of_links();
  write_log();
}

void RecoveryThread::tell_of_links() {
  const MutexLock running(run_mutex_);
  for (const auto& [id, entry] : entries_) entry.recoverable->on_links_changed();
}

void RecoveryThread::write_log() {
  for (const RareLog::Line& line : log_.take()) log_message(line.level, __FILE__, __LINE__, line.text);
}

void RecoveryThread::recover(std::vector<std::uint64_t> due) {
  std::sort(due.begin(), due.end());
  due.erase(std::unique(due.begin(), due.end()), due.end());
  for (const std::uint64_t id : due) {
    std::vector<RareLog::Line> lines;
    {
      const MutexLock running(run_mutex_);
      const auto found = entries_.find(id);
      if (found == entries_.end()) continue;
      if (std::exchange(found->second.is_new, false)) found->second.recoverable->on_links_changed();
      lines = found->second.recoverable->recover();
      if (found->second.recoverable->looks_again()) {
        if (again_.empty()) again_ms_ = monotonic_ms() + kCheckPathsMs;
        again_.push_back(id);
      }
    }
    // A peer that ends without a word loses a connection of each comm, and a network that closes connections all the
    // time would fill the log.
    for (RareLog::Line& line : lines) {
      log_.add_if_due(line.level, line.kind, [&] { return std::move(line.text); });
    }
    write_log();
  }
}

void RecoveryThread::run() {
  write_log();  // of interfaces that were down at the start
  std::vector<EpollPoller::Event> events;
  std::int64_t tick_ms = monotonic_ms();
  for (;;) {
    std::vector<std::uint64_t> due;
    bool ticks = false;
    {
      const MutexLock lock(mutex_);
      if (stopping_ && closing_.empty()) return;
      due.swap(notified_);
      ticks = ticking_ > 0;
    }
    for (const EpollPoller::Event& event : events) due.push_back(event.id);
    const std::int64_t now_ms = monotonic_ms();
    const bool is_tick = ticks && now_ms >= tick_ms + kTickMs;
    if (is_tick) {
      tick_ms = now_ms;
      const MutexLock running(run_mutex_);
      for (const auto& [id, entry] : entries_) {
        if (entry.ticks) due.push_back(id);
      }
    }
    if (now_ms >= again_ms_) {
      due.insert(due.end(), again_.begin(), again_.end());
      again_.clear();
      again_ms_ = LinkWatch::kNever;
    }
    recover(std::move(due));
    const bool has_link_event =
        std::any_of(events.begin(), events.end(), [](const auto& event) { return event.id == kLinkEvent; });
    if (has_link_event || now_ms >= links_.due_ms()) look_at_links(now_ms);
    const bool closes = close_some();
    const std::int64_t wake_ms = std::min({ticks ? tick_ms + kTickMs : LinkWatch::kNever, links_.due_ms(), again_ms_});
    const auto rest_ms = static_cast<int>(std::clamp<std::int64_t>(wake_ms - monotonic_ms(), 0, kTickMs));
    poller_.wait(closes ? kCloseStepMs : wake_ms == LinkWatch::kNever ? -1 : rest_ms, &events);
  }
}

}  // namespace bagua_net
