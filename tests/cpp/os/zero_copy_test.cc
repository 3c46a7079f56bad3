// PagePipe over TCP on the loopback interface: every byte arrives once and in its place, whatever the sizes, addresses
// and refusals, and nothing of it stays behind in the process. And ZeroCopySends, where the kernel copies after all,
// and says so.
#include "os/zero_copy.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "support/comm_parts.h"
#include "support/loopback.h"
#include "support/process_limits.h"
#include "transport/stream/byte_stream.h"

namespace bagua_net {
namespace {

const std::size_t kPage = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));

std::vector<std::uint8_t> make_bytes(std::size_t count, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::vector<std::uint8_t> bytes(count);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

// Sandboxes that take the kernel's place may have neither call.
bool kernel_supports_zero_copy() {
  int ends[2];
  CHECK_EQ(::pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  const OwnedFd read_end(ends[0]);
  const OwnedFd write_end(ends[1]);
  const auto [near, far] = tcp_pair();
  char byte = 7;
  const iovec piece{&byte, 1};
  const bool supported = ::vmsplice(write_end.get(), &piece, 1, SPLICE_F_NONBLOCK) == 1 &&
                         ::splice(read_end.get(), nullptr, near.get(), nullptr, 1, SPLICE_F_NONBLOCK) == 1;
  if (!supported) std::printf("        this kernel does not refer to memory: only the refusal is tested\n");
  return supported;
}

// Reads what there is.
void read_some(int socket, std::vector<std::uint8_t>* received) {
  std::uint8_t buffer[50000];
  for (;;) {
    const ssize_t got = ::recv(socket, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got <= 0) {
      CHECK(got < 0 && errno == EAGAIN);
      return;
    }
    received->insert(received->end(), buffer, buffer + got);
  }
}

void read_until(int socket, std::size_t count, std::vector<std::uint8_t>* received) {
  const Deadline deadline;
  while (received->size() < count) {
    deadline.check("bytes");
    pollfd readable{socket, POLLIN, 0};
    ::poll(&readable, 1, 1000);
    read_some(socket, received);
  }
  CHECK_EQ(received->size(), count);
}

// A pipe, and a connection that it sends over.
struct Sending {
  std::unique_ptr<PagePipe> pipe = PagePipe::open();
  std::pair<OwnedFd, OwnedFd> ends = tcp_pair();
  std::size_t times_full = 0;  // the socket

  Sending() { CHECK(pipe != nullptr); }
  int near() const { return ends.first.get(); }
  int far() const { return ends.second.get(); }

  // Sends everything and reads at the other end whenever the socket is full.
  void check_arrives(const std::uint8_t* data, std::size_t bytes) {
    std::vector<std::uint8_t> received;
    const Deadline deadline;
    for (std::size_t sent = 0; sent < bytes;) {
      deadline.check("room in the socket");
      const ssize_t moved = pipe->send(near(), data + sent, bytes - sent);
      if (moved > 0) {
        sent += static_cast<std::size_t>(moved);
        CHECK(sent <= bytes);
        continue;
      }
      CHECK(moved < 0);
      if (errno == EINTR) continue;
      CHECK_EQ(errno, EAGAIN);
      ++times_full;
      read_some(far(), &received);
    }
    read_until(far(), bytes, &received);
    CHECK(std::equal(received.begin(), received.end(), data));
  }
};

class Mapping {
 public:
  explicit Mapping(std::size_t pages)
      : bytes_(pages * kPage),
        data_(static_cast<std::uint8_t*>(
            ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    CHECK(data_ != MAP_FAILED);
    const std::vector<std::uint8_t> bytes = make_bytes(bytes_);
    std::copy(bytes.begin(), bytes.end(), data_);
  }
  ~Mapping() { ::munmap(data_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::uint8_t* data() const { return data_; }

 private:
  const std::size_t bytes_;
  std::uint8_t* const data_;
};

// What cannot be read after page `good`, by any means or by reference only: what comes before arrives, and the rest is
// refused without a byte of it sent.
void refuses_from_page_on(Mapping& mapping, std::size_t pages, std::size_t good, std::size_t offset) {
  const std::vector<std::uint8_t> expected(mapping.data() + offset, mapping.data() + good * kPage);
  const Sending sending;
  std::size_t sent = 0;
  ssize_t moved = 0;
  while ((moved = sending.pipe->send(sending.near(), mapping.data() + offset + sent, pages * kPage - offset - sent)) >
         0) {
    sent += static_cast<std::size_t>(moved);
  }
  CHECK_EQ(moved, ssize_t{-1});
  CHECK_EQ(errno, EOPNOTSUPP);
  CHECK_EQ(sent, expected.size());
  // As the stream does: what follows is copied from another place here.
  const char tail[] = "tail";
  CHECK_EQ(::send(sending.near(), tail, 4, MSG_NOSIGNAL), 4);
  std::vector<std::uint8_t> received;
  read_until(sending.far(), sent + 4, &received);
  CHECK(std::equal(expected.begin(), expected.end(), received.begin()));
  CHECK(std::equal(tail, tail + 4, received.end() - 4));
}

}  // namespace

TEST_CASE(bytes_of_all_sizes_and_addresses_arrive_in_order) {
  if (!kernel_supports_zero_copy()) return;
  const std::vector<std::uint8_t> bytes = make_bytes(8u << 20);
  Sending sending;
  for (const std::size_t size : {std::size_t{1}, std::size_t{2}, kPage - 1, kPage, kPage + 1, 16 * kPage,
                                 64 * kPage - 1, 64 * kPage, 64 * kPage + 1, 65 * kPage, std::size_t{2u << 20}}) {
    for (const std::size_t offset : {std::size_t{0}, std::size_t{1}, std::size_t{7}, kPage - 1, kPage, 3 * kPage + 5}) {
      sending.check_arrives(bytes.data() + offset, size);
    }
  }
  std::mt19937 random(1);
  for (int piece = 0; piece < 100; ++piece) {
    const std::size_t size = 1 + random() % (random() % 2 == 0 ? 10000 : 1000000);
    sending.check_arrives(bytes.data() + random() % (bytes.size() - size), size);
  }
}

// More than any socket takes: the pipe keeps what the socket had no room for.
TEST_CASE(a_full_socket_says_so_and_goes_on) {
  if (!kernel_supports_zero_copy()) return;
  for (const int buffer_bytes : {0, 1, 20000}) {
    Sending sending;
    if (buffer_bytes > 0) set_buffer(sending.ends.first, SO_SNDBUF, buffer_bytes);
    const std::vector<std::uint8_t> bytes = make_bytes(buffer_bytes == 0 ? 64u << 20 : 1u << 20);
    sending.check_arrives(bytes.data() + 1, bytes.size() - 1);
    CHECK(sending.times_full > 0);
  }
}

TEST_CASE(memory_that_cannot_be_read_is_refused_where_it_begins) {
  if (!kernel_supports_zero_copy()) return;
  for (const std::size_t good : {0, 1, 15, 16, 17, 64, 65, 100}) {
    for (const bool unmapped : {false, true}) {
      constexpr std::size_t kPages = 120;
      Mapping mapping(kPages);
      const std::size_t offset = good > 0 ? 13 : 0;
      if (unmapped) {
        CHECK_EQ(::munmap(mapping.data() + good * kPage, kPage), 0);
      } else {
        CHECK_EQ(::mprotect(mapping.data() + good * kPage, kPage, PROT_NONE), 0);
      }
      refuses_from_page_on(mapping, kPages, good, offset);
    }
  }
}

// Descriptors that splice() does not write to; O_APPEND is one of the reasons. What waits in the pipe was not sent.
TEST_CASE(what_cannot_be_spliced_to_is_refused) {
  const std::vector<std::uint8_t> bytes = make_bytes(3 * kPage);
  const OwnedFd file(::memfd_create("bagua-net-test", MFD_CLOEXEC));
  CHECK(file.is_open());
  CHECK_EQ(::fcntl(file.get(), F_SETFL, O_APPEND), 0);
  const std::unique_ptr<PagePipe> pipe = PagePipe::open();
  CHECK(pipe != nullptr);
  for (int i = 0; i < 2; ++i) {
    CHECK_EQ(pipe->send(file.get(), bytes.data(), bytes.size()), ssize_t{-1});
    CHECK_EQ(errno, EOPNOTSUPP);
  }
  CHECK_EQ(::lseek(file.get(), 0, SEEK_END), off_t{0});
}

// The reason for acknowledgements: a test that a kernel which copies would fail, and rightly. And the memory may go,
// with the pipe, while the socket refers to it.
TEST_CASE(the_socket_refers_to_the_memory) {
  if (!kernel_supports_zero_copy()) return;
  for (const bool goes : {false, true}) {
    Sending sending;
    auto mapping = std::make_unique<Mapping>(8);
    std::vector<std::uint8_t> expected(mapping->data(), mapping->data() + 8 * kPage);
    CHECK_EQ(sending.pipe->send(sending.near(), mapping->data(), expected.size()),
             static_cast<ssize_t>(expected.size()));
    if (goes) {
      mapping.reset();
      sending.pipe.reset();
    } else {
      std::fill(mapping->data(), mapping->data() + 8 * kPage, std::uint8_t{0x5a});
      expected.assign(expected.size(), 0x5a);
    }
    const Mapping other(8);
    std::fill(other.data(), other.data() + 8 * kPage, std::uint8_t{0});
    std::vector<std::uint8_t> received;
    read_until(sending.far(), expected.size(), &received);
    CHECK(received == expected);
  }
}

TEST_CASE(a_process_has_its_share_of_pipes_and_no_more) {
  const std::size_t before = open_descriptors();
  std::size_t share = 0;
  for (int round = 0; round < 3; ++round) {
    std::vector<std::unique_ptr<PagePipe>> pipes;
    while (auto pipe = PagePipe::open()) {
      pipes.push_back(std::move(pipe));
      CHECK(pipes.size() <= 256);  // a quarter of the descriptors that a process may have as a rule, at most half
    }
    CHECK(pipes.size() >= 16);
    CHECK_EQ(open_descriptors(), before + 2 * pipes.size());
    CHECK(PagePipe::open() == nullptr);
    pipes.pop_back();
    pipes.push_back(PagePipe::open());
    CHECK(pipes.back() != nullptr);
    if (round == 0) share = pipes.size();
    CHECK_EQ(pipes.size(), share);
  }
  CHECK_EQ(open_descriptors(), before);
}

// --- ZeroCopySends

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
