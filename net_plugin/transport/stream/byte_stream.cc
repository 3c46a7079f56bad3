#include "transport/stream/byte_stream.h"

#include <linux/tcp.h>  // the whole tcp_info; <netinet/tcp.h> has the beginning
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "os/tcp_socket.h"
#include "os/zero_copy.h"

namespace bagua_net {
namespace {

class TcpByteStream final : public ByteStream {
 public:
  explicit TcpByteStream(OwnedFd socket) : socket_(std::move(socket)) {}
  ~TcpByteStream() override { TcpByteStream::shutdown(); }  // a forked child may hold a duplicate: close is not enough

  // One piece is the usual case of a look at an idle socket, and recv costs less than recvmsg.
  ssize_t read(const iovec* pieces, std::size_t count) override {
    if (count == 1) return ::recv(socket_.get(), pieces[0].iov_base, pieces[0].iov_len, MSG_DONTWAIT);
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces);
    message.msg_iovlen = count;
    return ::recvmsg(socket_.get(), &message, MSG_DONTWAIT);
  }

  ssize_t write(const iovec* pieces, std::size_t count) override {
    if (count == 1) {
      return ::send(socket_.get(), pieces[0].iov_base, pieces[0].iov_len, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces);
    message.msg_iovlen = count;
    return ::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  }

  ssize_t write_by_reference(const iovec& copied, const iovec& referred) override {
    if (copied.iov_len > 0) {
      // It waits for the pages, to travel with them.
      return ::send(socket_.get(), copied.iov_base, copied.iov_len, MSG_DONTWAIT | MSG_NOSIGNAL | MSG_MORE);
    }
    if (pages_ == nullptr && zero_copy_ == nullptr) begin_to_refer();
    if (zero_copy_ != nullptr) return zero_copy_->send(referred.iov_base, referred.iov_len);
    if (pages_ == nullptr) {
      errno = EOPNOTSUPP;
      return -1;
    }
    const ssize_t sent = pages_->send(socket_.get(), referred.iov_base, referred.iov_len);
    if (sent < 0 && errno == EOPNOTSUPP) {
      pages_.reset();  // with what it may still hold: the caller writes that
      errno = EOPNOTSUPP;
    }
    return sent;
  }

  bool delivery(Delivery* delivery) const override {
    tcp_info info{};
    socklen_t length = sizeof info;
    if (::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
    // Before Linux 4.10.
    if (length < offsetof(tcp_info, tcpi_sndbuf_limited) + sizeof info.tcpi_sndbuf_limited) return false;
    delivery->bytes = info.tcpi_bytes_acked;
    delivery->busy_us = static_cast<std::int64_t>(info.tcpi_busy_time);
    delivery->unsent_bytes = info.tcpi_notsent_bytes;
    delivery->retransmits = info.tcpi_total_retrans;
    delivery->peer_window_us = static_cast<std::int64_t>(info.tcpi_rwnd_limited);
    delivery->socket_buffer_us = static_cast<std::int64_t>(info.tcpi_sndbuf_limited);
    delivery->round_trip_us = info.tcpi_rtt;
    // All bits set: nothing has come back yet.
    delivery->least_round_trip_us = std::min(info.tcpi_min_rtt, info.tcpi_rtt);
    const double window = static_cast<double>(info.tcpi_snd_cwnd) * static_cast<double>(info.tcpi_snd_mss);
    const double round_trip_ns = 1e3 * static_cast<double>(std::max<std::int64_t>(delivery->least_round_trip_us, 1));
    delivery->permitted_bytes_per_ns =
        std::min(static_cast<double>(info.tcpi_pacing_rate) / 1e9, window / round_trip_ns);
    return true;
  }

  bool peer_liveness(PeerLiveness* liveness) const override {
    tcp_info info{};
    socklen_t length = sizeof info;
    if (::getsockopt(socket_.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
    liveness->ms = info.tcpi_last_ack_recv;
    // Neither number counts what meets a closed window and is answered: the peer lives. While data is unacknowledged
    // the kernel probes nothing.
    liveness->transmissions = info.tcpi_unacked > 0 ? info.tcpi_retransmits : info.tcpi_probes;
    if (info.tcpi_unacked > 0) {
      // Each interval is twice the one before: all up to the last transmission are the next one less the first.
      const std::int64_t before_ms = (info.tcpi_rto - (info.tcpi_rto >> info.tcpi_backoff)) / 1000;
      liveness->went_out = info.tcpi_retrans > 0;
      // If it did not go out, the last that did is one of the first.
      liveness->unanswered_ms = liveness->went_out ? before_ms + info.tcpi_last_data_sent
                                                   : std::max<std::int64_t>(before_ms, info.tcpi_last_data_sent);
    }
    liveness->packet_bytes = info.tcpi_pmtu;
    liveness->data_ms = info.tcpi_last_data_recv;
    liveness->sent_ms = info.tcpi_last_data_sent;
    return true;
  }

  void probe_when_idle() override { probe_idle_peer(socket_.get()); }

  std::size_t undelivered_bytes() const override { return tcp_undelivered_bytes(socket_.get()); }

  int fd() const override { return socket_.get(); }
  void shutdown() override { ::shutdown(socket_.get(), SHUT_RDWR); }
  // Disconnecting sends the reset before the call returns, also when a forked child holds a duplicate of the socket.
  void reset() override {
    const sockaddr nowhere{AF_UNSPEC, {}};
    if (::connect(socket_.get(), &nowhere, sizeof nowhere) != 0) shutdown();
  }
  bool wait_until_released(int limit_ms) override {
    return zero_copy_ == nullptr || zero_copy_->wait_until_released(limit_ms);
  }
  bool is_broken() const override {
    pollfd state{socket_.get(), 0, 0};
    for (int look = 0; look < 3; ++look) {
      if (zero_copy_ != nullptr) zero_copy_->take_notices();
      if (::poll(&state, 1, 0) <= 0) return false;
      // A broken connection is hung up, too. An error alone may be a notice that has just come.
      if ((state.revents & POLLHUP) != 0) return true;
      if ((state.revents & POLLERR) == 0) return false;
      if (zero_copy_ == nullptr || !zero_copy_->has_any_under_way()) return true;
    }
    return true;
  }

 private:
  // Between hosts only in the way that says when the network card has let go of the memory.
  void begin_to_refer() {
    if (ZeroCopySends::are_allowed(socket_.get())) {
      zero_copy_ = std::make_unique<ZeroCopySends>(socket_.get());
    } else if (local_address(socket_.get()).same_host(remote_address(socket_.get()))) {
      pages_ = PagePipe::open();
    }
  }

  OwnedFd socket_;
  // By reference: the first write decides which.
  std::unique_ptr<PagePipe> pages_;           // within a host
  std::unique_ptr<ZeroCopySends> zero_copy_;  // between hosts
};

}  // namespace

ssize_t ByteStream::write_by_reference(const iovec&, const iovec&) {
  errno = EOPNOTSUPP;
  return -1;
}

std::unique_ptr<ByteStream> make_tcp_byte_stream(OwnedFd socket) {
  return std::make_unique<TcpByteStream>(std::move(socket));
}

}  // namespace bagua_net
