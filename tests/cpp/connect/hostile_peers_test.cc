// Many peers that do not know the token: they get nothing, cost little, and keep no real peer out.
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/connection_ends.h"
#include "support/pause.h"
#include "support/process_limits.h"

namespace bagua_net {
namespace {

std::size_t resident_kib() {
  std::ifstream status("/proc/self/statm");
  std::size_t total = 0;
  std::size_t resident = 0;
  status >> total >> resident;
  return resident * 4;
}

// BAGUA_HOSTILE_CONNECTIONS: for a longer run by hand.
std::size_t connection_count() {
  const char* const text = std::getenv("BAGUA_HOSTILE_CONNECTIONS");
  return text == nullptr ? 600 : std::strtoul(text, nullptr, 10);
}

// Opens a connection, misbehaves in one of the ways of strangers, and leaves it open where its way is to wait.
class Hostile {
 public:
  Hostile(const ListeningService& listening, unsigned seed) : listening_(listening), random_(seed) {}

  OwnedFd misbehave() {
    OwnedFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(socket.get(), listening_.address.data(), listening_.address.length()) != 0) return {};
    const timeval limit{1, 0};  // it may be let go of before it has an answer
    CHECK_EQ(::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), 0);
    const unsigned way = static_cast<unsigned>(random_() % 8);
    Hello said = listening_.hello();
    if (way == 4) said.listen_id[0] ^= 1;  // of nobody
    // A stream of a comm that it read from the network.
    if (way == 7) said.stream_index = static_cast<std::uint16_t>(random_() % 3 == 0 ? kJoiningStream : random_() % 4);
    std::array<std::uint8_t, kHelloBytes> hello;
    encode_hello(said, hello.data());
    if (way == 2) std::copy_n("GET / HTTP/1.1\r\n\r\n", 18, hello.begin());
    if (way == 3) std::generate(hello.begin(), hello.end(), [this] { return static_cast<std::uint8_t>(random_()); });
    // It says nothing, or begins slowly.
    say(socket, hello.data(), way == 0 ? 0 : way == 1 ? 1 + random_() % (kHelloBytes - 1) : kHelloBytes);
    // A listen that it read from the network, and a guess, or half of one.
    if (way == 5) guess(socket, kProofBytes);
    if (way == 6) guess(socket, 1 + random_() % (kProofBytes - 1));
    if (way == 7 && random_() % 2 == 0) reset_connection(&socket);
    const bool waits = way == 0 || way == 1 || way == 6;
    return waits ? std::move(socket) : OwnedFd();
  }

 private:
  static void say(const OwnedFd& socket, const void* bytes, std::size_t count) {
    [[maybe_unused]] const ssize_t ignored = ::send(socket.get(), bytes, count, MSG_NOSIGNAL);
  }
  void guess(const OwnedFd& socket, std::size_t bytes) {
    std::array<std::uint8_t, kChallengeBytes> challenge;
    if (::recv(socket.get(), challenge.data(), challenge.size(), MSG_WAITALL) <= 0) return;
    HandshakeProof proof;
    for (std::uint8_t& byte : proof) byte = static_cast<std::uint8_t>(random_());
    say(socket, proof.data(), bytes);
  }

  const ListeningService& listening_;
  std::mt19937 random_;
};

}  // namespace

TEST_CASE(a_real_peer_gets_through_a_crowd) {
  constexpr std::size_t kMost = 1024;  // that the listening side keeps
  rlimit limit{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = std::max<rlim_t>(limit.rlim_cur, std::min<rlim_t>(limit.rlim_max, 3 * connection_count() + 4096));
  ::setrlimit(RLIMIT_NOFILE, &limit);
  ListeningService listening;
  listening.check_open();
  const std::size_t files_before = open_descriptors();
  const std::size_t kib_before = resident_kib();
  std::atomic<std::size_t> done{0};
  std::atomic<std::size_t> held_count{0};
  std::atomic<bool> leave{false};
  std::string failure;
  std::thread crowd([&] {
    try {
      std::vector<OwnedFd> held;
      Hostile hostile(listening, 7);
      for (; done < connection_count(); ++done) {
        OwnedFd socket = hostile.misbehave();
        if (!socket.is_open()) continue;
        held.push_back(std::move(socket));
        ++held_count;
      }
      for (Pause pause; !leave;) pause();
    } catch (const std::exception& error) {
      failure = error.what();
      done = connection_count();
    }
  });
  std::size_t real_peers = 0;
  std::size_t most_files = 0;
  while (done < connection_count()) {
    listening.check_open();
    ++real_peers;
    most_files = std::max(most_files, open_descriptors() - std::min(open_descriptors(), held_count.load()));
  }
  listening.check_open();
  const std::size_t kib = resident_kib() - std::min(kib_before, resident_kib());
  leave = true;
  crowd.join();
  CHECK_EQ(failure, "");
  std::printf("        %zu connections, %zu held; %zu real peers meanwhile; at most %zu descriptors; %zu KiB more\n",
              done.load(), held_count.load(), real_peers, most_files - std::min(most_files, files_before), kib);
  // The listening side's, those of real peers, and one or two in the hands of the crowd.
  CHECK(most_files <= files_before + kMost + 32);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  CHECK(kib < 8192);
#endif
  listening.check_open();
}

TEST_CASE(those_that_name_a_listen_are_kept_longest) {
  std::optional<DescriptorLimit> few(64);  // an eighth of it are kept
  ListeningService listening;
  few.reset();
  Said said;
  const OwnedFd slow = listening.challenged(listening.hello(), &said);
  std::vector<OwnedFd> silent;
  for (int i = 0; i < 40; ++i) silent.push_back(connect_to(listening.address));
  CHECK(has_ended(silent[0].get()));  // since then there was no room
  prove(slow, *handshake_key(listening.handle.token), said);
  CHECK(read_reply(slow, *handshake_key(listening.handle.token), said).verdict == HandshakeVerdict::kAccepted);
}

TEST_CASE(a_peer_that_waits_for_a_descriptor_is_accepted_when_there_is_one) {
  ListeningService listening;
  const OwnedFd socket = connect_to(listening.address);
  listening.check_open();  // so that one is accepted before the limit
  const OwnedFd late(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  std::optional<DescriptorLimit> none(3);
  CHECK_EQ(::connect(late.get(), listening.address.data(), listening.address.length()), 0);
  make_blocking(late);
  Said said = say_hello(late, listening.hello());
  pollfd state{late.get(), POLLIN, 0};
  CHECK_EQ(::poll(&state, 1, 20), 0);
  none.reset();
  Reply reply;
  CHECK(read_challenge(late, &said, &reply));
}

}  // namespace bagua_net
