#include "transport/recovery/peer_probe.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

namespace bagua_net {
namespace {

constexpr int kAnswerMs = 900;  // before the kernel asks again itself, after longer and longer times
constexpr int kAskAgainMs = 200;

static_assert(kReplyBytes == kChallengeBytes);

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
    received_ = 0;
    due_ms_ = now_ms + kAnswerMs;
    const Status status = tcp_connect(contact_.address, {}, nullptr, &socket_);
    if (!status.is_ok()) socket_.reset();  // no way there, no descriptor, no port: as good as no answer
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
    std::array<std::uint8_t, kHelloBytes> hello;
    encode_hello(contact_.hello, hello.data());
    // A fresh socket buffer always has room for so few bytes.
    if (::send(socket_.get(), hello.data(), hello.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
      return PeerAnswer::kUnanswered;
    }
  }
  const ssize_t got = ::recv(socket_.get(), answer_.data() + received_, answer_.size() - received_, MSG_DONTWAIT);
  const bool is_pending = got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  if (is_pending && !is_late) return PeerAnswer::kNone;
  // It says nothing: a process that is stopped or ends, or one with more connections than it can keep.
  if (got <= 0) return PeerAnswer::kUnanswered;
  received_ += static_cast<std::size_t>(got);
  if (received_ < answer_.size()) return PeerAnswer::kNone;
  Challenge challenge;
  return decode_challenge(answer_.data(), &challenge) ? PeerAnswer::kAlive : PeerAnswer::kGone;
}

}  // namespace bagua_net
