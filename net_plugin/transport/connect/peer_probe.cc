#include "transport/connect/peer_probe.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>

#include "transport/recovery/recovery_timing.h"

namespace bagua_net {
namespace {

constexpr int kAskAgainMs = 200;

}  // namespace

void PeerContact::add(const SocketAddress& address) {
  const auto is_same = [&](const SocketAddress& one) { return one.same_host(address); };
  if (address.port() != 0 && std::none_of(addresses.begin(), addresses.end(), is_same)) addresses.push_back(address);
}

PeerAnswer PeerProbe::ask(std::int64_t now_ms) {
  questions_.resize(contact_.addresses.size());
  PeerAnswer most = PeerAnswer::kNone;
  bool is_one_waiting = false;
  for (std::size_t index = 0; index < questions_.size(); ++index) {
    Question& question = questions_[index];
    ask_at(contact_.addresses[index], question, now_ms);
    is_one_waiting |= question.last == PeerAnswer::kNone;
    most = std::max(most, question.last);
  }
  return most == PeerAnswer::kUnanswered && is_one_waiting ? PeerAnswer::kNone : most;
}

void PeerProbe::ask_at(const SocketAddress& address, Question& question, std::int64_t now_ms) {
  if (!question.socket.is_open()) {
    if (now_ms < question.due_ms) return;
    question.is_connected = false;
    question.due_ms = now_ms + kConnectAnswerMs;
    const Status status = tcp_connect(address, {}, nullptr, &question.socket);
    if (!status.is_ok()) question.socket.reset();  // no route, no descriptor: treated like no answer
  }
  const PeerAnswer answer = question.socket.is_open() ? look(question, now_ms) : PeerAnswer::kUnanswered;
  if (answer == PeerAnswer::kNone) return;
  question.socket.reset();
  question.due_ms = now_ms + kAskAgainMs;
  question.last = answer;
}

PeerAnswer PeerProbe::look(Question& question, std::int64_t now_ms) {
  const bool is_late = now_ms >= question.due_ms;
  const int socket = question.socket.get();
  if (!question.is_connected) {
    pollfd state{socket, POLLOUT, 0};
    if (::poll(&state, 1, 0) <= 0) return is_late ? PeerAnswer::kUnanswered : PeerAnswer::kNone;
    const int error_number = tcp_connect_result(socket);
    if (error_number != 0) return error_number == ECONNREFUSED ? PeerAnswer::kRefused : PeerAnswer::kUnanswered;
    question.is_connected = true;
    if (question.handshake.send_hello(socket, contact_.hello, contact_.key) != 0) return PeerAnswer::kUnanswered;
  }
  switch (question.handshake.read(socket)) {
    case ConnectorHandshake::Answer::kWaiting: return is_late ? PeerAnswer::kUnanswered : PeerAnswer::kNone;
    // A process that is stopped or ends, or that has too many connections, does not answer.
    case ConnectorHandshake::Answer::kClosed: return PeerAnswer::kUnanswered;
    case ConnectorHandshake::Answer::kChallenge: return PeerAnswer::kAlive;
    case ConnectorHandshake::Answer::kReply: return PeerAnswer::kGone;
  }
  return PeerAnswer::kUnanswered;
}

}  // namespace bagua_net
