// ZeroCopySends over TCP on the loopback interface, where the kernel copies after all, and says so.
#include "os/zero_copy_sends.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "support/comm_parts.h"
#include "support/loopback.h"
#include "transport/stream/byte_stream.h"

namespace bagua_net {
namespace {

constexpr std::size_t kBytes = 65536;

struct Connection {
  std::pair<OwnedFd, OwnedFd> ends = tcp_pair();
  std::vector<std::uint8_t> message = std::vector<std::uint8_t>(kBytes, 7);

  int near() const { return ends.first.get(); }
  int far() const { return ends.second.get(); }

  // Sandboxes that take the kernel's place may not have it.
  bool is_supported() const {
    allow_zero_copy_sends(near(), true);
    const bool supported = ZeroCopySends::are_allowed(near());
    if (!supported) std::printf("        this kernel does not have MSG_ZEROCOPY: nothing is tested\n");
    return supported;
  }
  void receive(std::size_t bytes) const {
    std::vector<std::uint8_t> room(bytes);
    for (std::size_t got = 0; got < bytes;) {
      pollfd readable{far(), POLLIN, 0};
      CHECK_EQ(::poll(&readable, 1, 10000), 1);
      const ssize_t more = ::recv(far(), room.data() + got, bytes - got, 0);
      CHECK(more > 0);
      got += static_cast<std::size_t>(more);
    }
    CHECK(room == std::vector<std::uint8_t>(bytes, 7));
  }
  bool has_error() const {
    pollfd state{near(), 0, 0};
    return ::poll(&state, 1, 0) > 0 && (state.revents & POLLERR) != 0;
  }
};

}  // namespace

TEST_CASE(a_socket_sends_so_only_where_it_is_allowed) {
  const Connection one;
  CHECK(!ZeroCopySends::are_allowed(one.near()));
  if (!one.is_supported()) return;
  allow_zero_copy_sends(one.near(), false);
  CHECK(!ZeroCopySends::are_allowed(one.near()));
}

TEST_CASE(where_the_kernel_copies_one_send_is_tried) {
  const Connection one;
  if (!one.is_supported()) return;
  ZeroCopySends sends(one.near());
  CHECK_EQ(sends.send(one.message.data(), kBytes), static_cast<ssize_t>(kBytes));
  one.receive(kBytes);
  wait_until([&] { return one.has_error(); }, "the notice");
  CHECK_EQ(sends.send(one.message.data(), kBytes), ssize_t{-1});
  CHECK_EQ(errno, EOPNOTSUPP);
  CHECK(!one.has_error());
}

TEST_CASE(memory_that_cannot_be_referred_to_is_refused) {
  const Connection one;
  if (!one.is_supported()) return;
  ZeroCopySends sends(one.near());
  const void* const nowhere = nullptr;
  CHECK_EQ(sends.send(nowhere, kBytes), ssize_t{-1});
  CHECK_EQ(errno, EOPNOTSUPP);
  // It was the memory; but one answer is enough.
  CHECK_EQ(sends.send(one.message.data(), kBytes), ssize_t{-1});
  CHECK_EQ(errno, EOPNOTSUPP);
}

TEST_CASE(a_disconnected_socket_waits_until_the_memory_is_free) {
  const Connection one;
  if (!one.is_supported()) return;
  // The peer does not read: what comes behind its window stays with the sender.
  const int room = 8 << 20;
  CHECK_EQ(::setsockopt(one.near(), SOL_SOCKET, SO_SNDBUF, &room, sizeof room), 0);
  std::vector<std::uint8_t> many(1u << 20, 7);
  ssize_t taken = 0;
  for (ssize_t more = 0; (more = ::send(one.near(), many.data(), many.size(), MSG_DONTWAIT)) > 0;) {
    taken += more;
    if (taken >= room / 4) break;
  }
  ZeroCopySends sends(one.near());
  if (sends.send(one.message.data(), kBytes) <= 0) {
    std::printf("        the peer's window and the socket were too small: nothing is tested\n");
    return;
  }
  CHECK(!sends.wait_until_released(20));
  const sockaddr nowhere{AF_UNSPEC, {}};
  CHECK_EQ(::connect(one.near(), &nowhere, sizeof nowhere), 0);
  CHECK(sends.wait_until_released(10000));
}

TEST_CASE(between_hosts_memory_is_referred_to_in_no_other_way) {
  // All of 127.0.0.0/8 leads here, but the ends see different addresses, as across a network.
  SocketAddress address = loopback(INADDR_LOOPBACK + 1).address;
  OwnedFd listener;
  CHECK_OK(tcp_listen(&address, &listener));
  OwnedFd near;
  CHECK_OK(tcp_connect(address, {}, nullptr, &near));
  const OwnedFd far = [&] {
    OwnedFd accepted;
    SocketAddress peer;
    wait_until([&] { return tcp_accept(listener.get(), &accepted, &peer).is_ok() && accepted.is_open(); }, "the peer");
    return accepted;
  }();
  const std::unique_ptr<ByteStream> stream = make_tcp_byte_stream(std::move(near));
  std::vector<std::uint8_t> message(kBytes, 7);
  CHECK_EQ(stream->write_by_reference({}, {message.data(), kBytes}), ssize_t{-1});
  CHECK_EQ(errno, EOPNOTSUPP);
}

TEST_CASE(a_notice_is_no_loss_of_the_connection) {
  Connection one;
  if (!one.is_supported()) return;
  const std::unique_ptr<ByteStream> stream = make_tcp_byte_stream(std::move(one.ends.first));
  const iovec piece{one.message.data(), kBytes};
  CHECK_EQ(stream->write_by_reference({}, piece), static_cast<ssize_t>(kBytes));
  one.receive(kBytes);
  wait_until(
      [&] {
        pollfd state{stream->fd(), 0, 0};
        return ::poll(&state, 1, 0) > 0 && (state.revents & POLLERR) != 0;
      },
      "the notice");
  CHECK(!stream->is_broken());
  CHECK_EQ(stream->write_by_reference({}, piece), ssize_t{-1});
  CHECK_EQ(errno, EOPNOTSUPP);
  CHECK_EQ(stream->write(&piece, 1), static_cast<ssize_t>(kBytes));
  one.receive(kBytes);
}

}  // namespace bagua_net
