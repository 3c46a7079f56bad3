// BAGUA_NET_FAULT: what a plan may say, and that each kind of fault really happens. That transfers survive them:
// checksum_test.cc and abi_fault_test.cc.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/plugin_config.h"
#include "support/check.h"
#include "support/context_pair.h"
#include "support/loopback.h"
#include "transport/faults/fault_injector.h"

namespace bagua_net {
namespace {

FaultPlan plan_of(const std::string& text) {
  FaultPlan plan;
  CHECK_EQ(parse_fault_plan(text, &plan), "");
  return plan;
}

Status status_of(const std::string& value, PluginConfig* config) {
  return parse_plugin_config(
      [&](const std::string& name) {
        return name == "BAGUA_NET_FAULT" ? std::optional<std::string>(value) : std::nullopt;
      },
      config);
}

iovec piece_of(std::vector<std::uint8_t>& bytes) { return {bytes.data(), bytes.size()}; }

// Both ends of a connection, the first with faults.
struct FaultyPair {
  FaultInjector faults;
  std::unique_ptr<ByteStream> near;
  OwnedFd far;

  explicit FaultyPair(const std::string& plan) : faults(plan_of(plan)) {
    auto [first, second] = tcp_pair();
    near = make_byte_stream(std::move(first), &faults);
    far = std::move(second);
  }
  std::vector<std::uint8_t> read_far(std::size_t bytes) {
    std::vector<std::uint8_t> received(bytes);
    CHECK_EQ(::recv(far.get(), received.data(), bytes, MSG_WAITALL | MSG_PEEK), static_cast<ssize_t>(bytes));
    CHECK_EQ(::recv(far.get(), received.data(), bytes, 0), static_cast<ssize_t>(bytes));
    return received;
  }
  void wait_for_bytes() {
    pollfd readable{near->fd(), POLLIN, 0};
    CHECK_EQ(::poll(&readable, 1, 10000), 1);
  }
};

// Blocking: what was written over loopback is there at once, or nearly so.
void make_blocking(int fd) { CHECK_EQ(::fcntl(fd, F_SETFL, 0), 0); }

std::vector<std::size_t> differences(const std::vector<std::uint8_t>& left, const std::vector<std::uint8_t>& right) {
  std::vector<std::size_t> positions;
  for (std::size_t i = 0; i < left.size(); ++i) {
    if (left[i] == right[i]) continue;
    CHECK_EQ(__builtin_popcount(left[i] ^ right[i]), 1);
    positions.push_back(i);
  }
  return positions;
}

// What a stream with this plan does to bytes that are written in pieces, as positions of changed bytes.
std::vector<std::size_t> flips_of(const std::string& plan, std::size_t piece_bytes, std::size_t total = 1u << 20) {
  FaultyPair pair(plan);
  make_blocking(pair.far.get());
  const std::vector<std::uint8_t> original = make_message(3, total);
  std::vector<std::uint8_t> sent = original;
  std::vector<std::uint8_t> received;
  for (std::size_t begin = 0; begin < sent.size(); begin += piece_bytes) {
    const std::size_t bytes = std::min(piece_bytes, sent.size() - begin);
    const iovec pieces[2] = {{sent.data() + begin, bytes / 3}, {sent.data() + begin + bytes / 3, bytes - bytes / 3}};
    CHECK_EQ(pair.near->write(pieces, 2), static_cast<ssize_t>(bytes));
    const std::vector<std::uint8_t> part = pair.read_far(bytes);
    received.insert(received.end(), part.begin(), part.end());
  }
  CHECK(sent == original);  // the application's memory stays as it is
  std::vector<std::size_t> positions = differences(original, received);
  CHECK_EQ(pair.faults.counts().flips.load(), positions.size());
  return positions;
}

}  // namespace

TEST_CASE(plans_are_read) {
  const FaultPlan plan = plan_of("seed=7, cut=1/s,drop=0.5/s,delay=5ms@0.01,flip=1e-6");
  CHECK_EQ(plan.seed, std::uint64_t{7});
  CHECK_EQ(plan.cuts_per_s, 1.0);
  CHECK_EQ(plan.drops_per_s, 0.5);
  CHECK_EQ(plan.delay_us, 5000);
  CHECK_EQ(plan.delay_probability, 0.01);
  CHECK_EQ(plan.flip_probability, 1e-6);
  CHECK_EQ(plan_of("delay=20us").delay_probability, 1.0);
  CHECK_EQ(plan_of("delay=0.5s@1").delay_us, 500000);
  PluginConfig config;
  CHECK_OK(status_of("CUT=2/S", &config));
  CHECK_EQ(config.faults.cuts_per_s, 2.0);
  CHECK(!PluginConfig().faults.any());
}

TEST_CASE(bad_plans_are_refused) {
  const std::pair<const char*, const char*> refused[] = {
      {"cut=1", "\"cut=1\" is not a rate from 0/s to 1000/s"},
      {"cut=1/min", "\"cut=1/min\" is not a rate"},
      {"cut=1001/s", "is not a rate"},
      {"drop=-1/s", "\"drop=-1/s\" is not a rate"},
      {"drop=nan/s", "is not a rate"},
      {"flip=2", "\"flip=2\" is not a probability from 0 to 1"},
      {"flip=nan", "is not a probability"},
      {"delay=5", "\"delay=5\" is not a time from 0us to 10s"},
      {"delay=11s", "is not a time"},
      {"delay=ms@1", "is not a time"},
      {"delay=5ms@1.5", "is not a time"},
      {"seed=-1,cut=1/s", "\"seed=-1\" is not an integer"},
      {"cuts=1/s", "\"cuts=1/s\" is not one of cut, drop, delay, flip and seed"},
      {"cut", "\"cut\" has no value"},
      {"cut=1/s,", "\"\" has no value"},
      {"cut=1/s,cut=2/s", "\"cut=2/s\" is named twice"},
      {"seed=3", "\"seed=3\" asks for no fault"},
      {"cut=0/s", "asks for no fault"},
  };
  for (const auto& [value, why] : refused) {
    PluginConfig config;
    const std::string message = status_of(value, &config).message();
    check_contains(message, why);
    CHECK_EQ(message.find("BAGUA_NET_FAULT=" + std::string(value) + ": must be a comma-separated list"),
             std::size_t{0});
    CHECK(message.find("\nCorrect BAGUA_NET_FAULT or unset it.") != std::string::npos);
    CHECK(!config.faults.any());
  }
}

TEST_CASE(without_a_plan_nothing_is_wrapped) {
  CHECK(FaultInjector::create({}) == nullptr);
  CHECK(make_context(recovering(0))->faults() == nullptr);
}

TEST_CASE(flipped_bits_follow_the_seed) {
  const std::vector<std::size_t> positions = flips_of("seed=5,flip=1e-4", 65536);
  CHECK(positions.size() > 50 && positions.size() < 200);  // 105 on average
  CHECK(flips_of("seed=5,flip=1e-4", 65536) == positions);
  CHECK(flips_of("seed=5,flip=1e-4", 10007) == positions);  // however the bytes are written
  CHECK(flips_of("seed=6,flip=1e-4", 65536) != positions);
  CHECK_EQ(flips_of("flip=1", 64, 4096).size(), std::size_t{4096});  // each in a packet of its own
}

TEST_CASE(bits_are_flipped_as_received) {
  FaultyPair pair("flip=1e-3");
  make_blocking(pair.far.get());
  const std::vector<std::uint8_t> sent = make_message(1, 100000);
  std::vector<std::uint8_t> received(sent.size());
  std::size_t moved = 0;
  CHECK_EQ(::send(pair.far.get(), sent.data(), sent.size(), 0), static_cast<ssize_t>(sent.size()));
  while (moved < received.size()) {
    pair.wait_for_bytes();
    const iovec piece{received.data() + moved, std::min<std::size_t>(received.size() - moved, 1000)};
    const ssize_t got = pair.near->read(&piece, 1);
    CHECK(got > 0);
    moved += static_cast<std::size_t>(got);
  }
  const std::size_t flips = differences(sent, received).size();
  CHECK(flips > 50 && flips < 150);
  CHECK_EQ(pair.faults.counts().flips.load(), flips);
}

// The whole write, though a bit of it is flipped: a caller takes a short write for a full socket.
TEST_CASE(memory_is_not_sent_by_reference_where_bits_are_flipped) {
  FaultyPair pair("flip=0.5");
  std::vector<std::uint8_t> bytes(1000);
  CHECK_EQ(pair.near->write_by_reference({}, piece_of(bytes)), ssize_t{-1});
  CHECK_EQ(errno, EOPNOTSUPP);
}

TEST_CASE(a_cut_ends_a_write_anywhere) {
  bool cut_early = false;
  bool cut_late = false;
  bool was_reset = false;
  bool was_closed = false;
  for (unsigned seed = 0; seed < 40; ++seed) {
    FaultyPair pair("cut=1000/s,seed=" + std::to_string(seed));
    make_blocking(pair.far.get());
    std::vector<std::uint8_t> bytes = make_message(0, 60000);
    const iovec piece = piece_of(bytes);
    std::vector<std::uint8_t> room(bytes.size());
    ssize_t written = 0;
    const Deadline deadline;
    do {
      deadline.check("a cut");
      written = pair.near->write(&piece, 1);
      if (written == static_cast<ssize_t>(bytes.size())) pair.read_far(bytes.size());
    } while (written == static_cast<ssize_t>(bytes.size()));
    CHECK_EQ(pair.faults.counts().cuts.load(), std::uint64_t{1});
    cut_early |= written < 48;
    cut_late |= written >= 48;
    CHECK(pair.near->write(&piece, 1) < 0);
    // No byte beyond the cut, and then the end.
    std::size_t received = 0;
    ssize_t got = 0;
    while ((got = ::recv(pair.far.get(), room.data(), room.size(), 0)) > 0) received += static_cast<std::size_t>(got);
    CHECK(received <= static_cast<std::size_t>(std::max<ssize_t>(written, 0)));
    (got == 0 ? was_closed : was_reset) = true;
  }
  CHECK(cut_early && cut_late && was_reset && was_closed);
}

TEST_CASE(a_cut_ends_a_read) {
  FaultyPair pair("cut=1000/s");
  make_blocking(pair.far.get());
  const std::vector<std::uint8_t> sent = make_message(0, 1000);
  std::vector<std::uint8_t> room(2000);
  ssize_t got = 0;
  const Deadline deadline;
  do {
    deadline.check("a cut");
    CHECK_EQ(::send(pair.far.get(), sent.data(), sent.size(), MSG_NOSIGNAL), static_cast<ssize_t>(sent.size()));
    pair.wait_for_bytes();
    const iovec piece = piece_of(room);
    got = pair.near->read(&piece, 1);
  } while (got == static_cast<ssize_t>(sent.size()));
  CHECK_EQ(pair.faults.counts().cuts.load(), std::uint64_t{1});
  CHECK(has_ended(pair.far.get()));
}

TEST_CASE(a_dropped_connection_hears_nothing) {
  FaultyPair pair("drop=1000/s");
  make_blocking(pair.far.get());
  std::vector<std::uint8_t> byte(1);
  const iovec piece = piece_of(byte);
  wait_until(
      [&] {
        CHECK_EQ(pair.near->write(&piece, 1), ssize_t{1});
        return pair.faults.counts().drops.load() > 0;
      },
      "a drop");
  CHECK_EQ(::send(pair.far.get(), byte.data(), 1, MSG_NOSIGNAL), ssize_t{1});
  pollfd readable{pair.near->fd(), POLLIN, 0};
  CHECK_EQ(::poll(&readable, 1, 50), 0);
  CHECK(pair.near->undelivered_bytes() > 0);  // the acknowledgement is lost, too
}

// Real time. A slow machine makes delays longer, never shorter.
TEST_CASE(delays_take_their_time) {
  FaultyPair pair("delay=2ms@0.5,seed=1");
  std::vector<std::uint8_t> byte(1);
  const iovec piece = piece_of(byte);
  const std::int64_t begin_us = monotonic_us();
  for (int i = 0; i < 20; ++i) CHECK_EQ(pair.near->write(&piece, 1), ssize_t{1});
  const auto delays = static_cast<std::int64_t>(pair.faults.counts().delays.load());
  CHECK(delays > 3 && delays < 17);
  CHECK(monotonic_us() - begin_us >= 2000 * delays);  // never less: nothing here asserts an upper limit
  // A look that finds nothing is not a read.
  const iovec room = piece_of(byte);
  for (int i = 0; i < 20; ++i) CHECK_EQ(pair.near->read(&room, 1), ssize_t{-1});
  CHECK_EQ(static_cast<std::int64_t>(pair.faults.counts().delays.load()), delays);
}

}  // namespace bagua_net
