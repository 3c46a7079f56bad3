#include "transport/connect/connection_service.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/background_thread.h"
#include "base/log_sink.h"
#include "base/monotonic_clock.h"

namespace bagua_net {
namespace {

// How often the sockets are asked at least while something has a deadline: loop_.clock counts more as a pause.
constexpr std::int64_t kLookMs = 200;

}  // namespace

ConnectionService::ConnectionService(HandshakeSettings settings)
    : settings_(std::move(settings)), outbound_(settings_, &loop_), inbound_(settings_, &loop_, &outbound_) {}

ConnectionService::~ConnectionService() {
  if (!thread_.joinable()) return;
  {
    const CallersLock lock(mutex_);
    stopping_ = true;
  }
  poller_.wake();
  thread_.join();
}

Status ConnectionService::start() {
  BAGUA_NET_RETURN_IF_ERROR(poller_.open());
  return start_background_thread(
      "bagua-net-conn", nullptr, [this] { run(); }, &thread_, [this](const Status& failure) { fail(failure); });
}

Status ConnectionService::listen(const std::vector<NetworkInterface>& interfaces, std::uint8_t* handle, RandomId* id) {
  const CallersLock lock(mutex_);
  BAGUA_NET_RETURN_IF_ERROR(failure_);
  return inbound_.listen(interfaces, handle, id);
}

Status ConnectionService::accept(const RandomId& id, bool* ready, EstablishedConnection* connection) {
  const CallersLock lock(mutex_);
  BAGUA_NET_RETURN_IF_ERROR(failure_);
  return inbound_.accept(id, ready, connection);
}

void ConnectionService::stop_listening(const RandomId& id) {
  const CallersLock lock(mutex_);
  inbound_.stop_listening(id);
}

Status ConnectionService::connect(const std::vector<NetworkInterface>& interfaces, std::uint8_t* handle, bool* ready,
                                  EstablishedConnection* connection) {
  const CallersLock lock(mutex_);
  BAGUA_NET_RETURN_IF_ERROR(failure_);
  const bool is_new = load_connect_state(handle) == 0;
  if (is_new) loop_.look();
  std::vector<std::uint16_t> ports;
  for (const NetworkInterface& interface : interfaces) {
    if (is_new) ports.push_back(inbound_.listening_port(interface));
  }
  const Status status = outbound_.connect(interfaces, ports, handle, ready, connection);
  if (is_new) poller_.wake();  // a new deadline to look after
  return status;
}

void ConnectionService::join(const JoinTicket& ticket, int count, const std::shared_ptr<StreamArrivals>& arrivals) {
  const CallersLock lock(mutex_);
  loop_.look();
  outbound_.join(ticket, count, arrivals);
  if (!failure_.is_ok()) outbound_.fail_all(failure_);
  poller_.wake();  // a new deadline to look after
}

Prepared ConnectionService::prepare(const JoinTicket& ticket, std::size_t place,
                                    const std::shared_ptr<StreamArrivals>& arrivals) {
  const CallersLock lock(mutex_);
  loop_.look();
  const Prepared prepared = outbound_.prepare(ticket, place, arrivals);
  if (!failure_.is_ok()) outbound_.fail_all(failure_);
  poller_.wake();  // a new deadline to look after
  return prepared;
}

bool ConnectionService::is_idle() {
  const CallersLock lock(mutex_);
  return inbound_.listen_count() == 0 && outbound_.attempt_count() == 0;
}

void ConnectionService::rest() {
  const CallersLock lock(mutex_);
  resting_ = true;
  if (!failure_.is_ok()) has_ended_ = true;
  poller_.wake();
}

bool ConnectionService::resume() {
  const CallersLock lock(mutex_);
  resting_ = false;
  return !has_ended_;
}

void ConnectionService::fail(const Status& failure) {
  const MutexLock lock(mutex_);
  failure_ = failure;
  outbound_.fail_all(failure);
}

void ConnectionService::run() {
  std::vector<EpollPoller::Event> events;
  std::int64_t asked_ms = 0;
  for (;;) {
    int timeout_ms = -1;
    bool ends = false;
    std::vector<RareLog::Line> lines;
    {
      const MutexLock lock(mutex_);
      if (stopping_) return;
      loop_.look();
      for (const EpollPoller::Event& event : events) {
        // Ids are never used twice, so an event of something closed meanwhile belongs to nobody.
        inbound_.handle_event(event.id);
        outbound_.handle_event(event.id);
      }
      loop_.asked_ms = asked_ms;
      inbound_.expire(asked_ms);
      outbound_.expire(asked_ms);
      const std::int64_t deadline_ms = std::min(inbound_.next_deadline_ms(), outbound_.next_deadline_ms());
      if (deadline_ms != std::numeric_limits<std::int64_t>::max()) {
        timeout_ms = static_cast<int>(std::clamp<std::int64_t>(deadline_ms - loop_.now_ms(), 0, kLookMs));
      }
      lines = loop_.log.take();
      if (resting_ && inbound_.listen_count() == 0 && outbound_.attempt_count() == 0) {
        inbound_.close_listening_sockets();
        has_ended_ = ends = true;
      }
      asked_ms = loop_.look();
    }
    for (const RareLog::Line& line : lines) log_message(line.level, __FILE__, __LINE__, line.text);
    if (ends) return;
    poller_.wait(timeout_ms, &events);
    mutex_.step_aside();
  }
}

}  // namespace bagua_net
