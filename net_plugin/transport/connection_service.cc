#include "transport/connection_service.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/background_thread.h"
#include "base/monotonic_clock.h"

namespace bagua_net {

ConnectionService::ConnectionService(HandshakeSettings settings)
    : settings_(std::move(settings)),
      inbound_(settings_, &poller_, &next_id_),
      outbound_(settings_, &poller_, &next_id_) {}

ConnectionService::~ConnectionService() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  poller_.wake();
  thread_.join();
}

Status ConnectionService::start() {
  BAGUA_NET_RETURN_IF_ERROR(poller_.open());
  return start_background_thread("bagua-net-conn", nullptr, [this] { run(); }, &thread_);
}

Status ConnectionService::listen(const NetworkInterface& interface, std::uint8_t* handle, Token* token) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return inbound_.listen(interface, handle, token);
}

Status ConnectionService::accept(const Token& token, bool* ready, EstablishedConnection* connection) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return inbound_.accept(token, ready, connection);
}

void ConnectionService::stop_listening(const Token& token) {
  const std::lock_guard<std::mutex> lock(mutex_);
  inbound_.stop_listening(token);
}

Status ConnectionService::connect(std::uint8_t* handle, bool* ready, EstablishedConnection* connection) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool is_new = load_connect_state(handle) == 0;
  const Status status = outbound_.connect(handle, ready, connection);
  if (is_new) poller_.wake();  // a new deadline to look after
  return status;
}

void ConnectionService::join(const JoinTicket& ticket, int count, const std::shared_ptr<StreamArrivals>& arrivals) {
  const std::lock_guard<std::mutex> lock(mutex_);
  outbound_.join(ticket, count, arrivals);
  poller_.wake();  // a new deadline to look after
}

bool ConnectionService::is_idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return inbound_.listen_count() == 0 && outbound_.attempt_count() == 0;
}

void ConnectionService::run() {
  std::vector<EpollPoller::Event> events;
  for (;;) {
    int timeout_ms = -1;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) return;
      for (const EpollPoller::Event& event : events) {
        // Ids are never used twice, so an event of something closed meanwhile belongs to nobody.
        if (inbound_.owns(event.id)) inbound_.handle_event(event.id);
        if (outbound_.owns(event.id)) outbound_.handle_event(event.id);
      }
      const std::int64_t now_ms = monotonic_ms();
      inbound_.expire(now_ms);
      outbound_.expire(now_ms);
      const std::int64_t deadline_ms = std::min(inbound_.next_deadline_ms(), outbound_.next_deadline_ms());
      if (deadline_ms != std::numeric_limits<std::int64_t>::max()) {
        timeout_ms = static_cast<int>(std::clamp<std::int64_t>(deadline_ms - now_ms, 0, 60000));
      }
    }
    poller_.wait(timeout_ms, &events);
  }
}

}  // namespace bagua_net
