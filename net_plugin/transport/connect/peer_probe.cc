#include "transport/connect/peer_probe.h"

#include <poll.h>

#include <cerrno>

#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

constexpr int kAskAgainMs = 200;

}  // namespace

void PeerProbe::forget() {
  socket_.reset();
  due_ms_ = 0;
  last_ = PeerAnswer::kNone;
}

PeerAnswer PeerProbe::ask(std::int64_t now_ms) {
  if (!socket_.is_open()) {
    if (now_ms < due_ms_) return last_;
    is_connected_ = false;
    due_ms_ = now_ms + kConnectAnswerMs;
    const Status status = tcp_connect(contact_.address, {}, nullptr, &socket_);
    if (!status.is_ok()) socket_.reset();  // no route, no descriptor, no port: treated like no answer
  }
  const PeerAnswer answer = socket_.is_open() ? look(now_ms) : PeerAnswer::kUnanswered;
  if (answer == PeerAnswer::kNone) return last_;
  socket_.reset();
  due_ms_ = now_ms + kAskAgainMs;
  last_ = answer;
  return last_;
}

PeerAnswer PeerProbe::look(std::int64_t now_ms) {
  const bool is_late = now_ms >= due_ms_;
  if (!is_connected_) {
    pollfd state{socket_.get(), POLLOUT, 0};
    if (::poll(&state, 1, 0) <= 0) return is_late ? PeerAnswer::kUnanswered : PeerAnswer::kNone;
    const int error_number = tcp_connect_result(socket_.get());
    if (error_number != 0) return error_number == ECONNREFUSED ? PeerAnswer::kRefused : PeerAnswer::kUnanswered;
    is_connected_ = true;
    if (handshake_.send_hello(socket_.get(), contact_.hello, contact_.key) != 0) return PeerAnswer::kUnanswered;
  }
  switch (handshake_.read(socket_.get())) {
    case ConnectorHandshake::Answer::kWaiting: return is_late ? PeerAnswer::kUnanswered : PeerAnswer::kNone;
    // A process that is stopped or ends, or that has too many connections, does not answer.
    case ConnectorHandshake::Answer::kClosed: return PeerAnswer::kUnanswered;
    case ConnectorHandshake::Answer::kChallenge: return PeerAnswer::kAlive;
    case ConnectorHandshake::Answer::kReply: return PeerAnswer::kGone;
  }
  return PeerAnswer::kUnanswered;
}

}  // namespace bagua_net
