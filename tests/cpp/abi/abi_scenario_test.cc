// The one scenario, through every table v5 to v12, and through the oldest and the newest with and without workers, on
// one and on several data streams: what NCCL does with a network in a job's life, from connecting to the errors it may
// meet.
#include <climits>
#include <thread>

#include "abi_connection.h"
#include "support/temporary_tree.h"

namespace abi_test {
namespace {

void connects_when_the_other_side_is_not_ready(const Session& session) {
  const Net& net = session.net();
  Handle handle{};
  Connection connection;
  CHECK_SUCCESS(net.listen(session.ctx(), 0, handle.data(), &connection.listen));
  // accept comes first: there is nobody yet, and that is not an error.
  for (int attempt = 0; attempt < 3; ++attempt) {
    void* recv = slot_content(2);
    CHECK_SUCCESS(net.accept(connection.listen, &recv));
    CHECK(recv == nullptr);
  }
  poll_connection(net, session.ctx(), 0, &handle, &connection);
  CHECK_SUCCESS(net.close_listen(connection.listen));
  exchange(net, connection, 1000, 1000, 0, 0, 1);
  close_both_ends(net, &connection);
}

void connects_over_every_device(const Session& session) {
  const Net& net = session.net();
  int count = 0;
  CHECK_SUCCESS(net.devices(&count));
  for (int dev = 0; dev < count; ++dev) {
    Connection connection = connect_both_ends(net, session.ctx(), dev);
    exchange(net, connection, 100000, 100000, 0, 0, static_cast<std::uint64_t>(dev));
    close_both_ends(net, &connection);
  }
}

void carries_every_size(const Session& session) {
  const Net& net = session.net();
  Connection connection = connect_both_ends(net, session.ctx());
  const std::size_t sizes[] = {
      0,        1,    31,       32,          33, 4095, 4096, 4097, 0, 63, 64 * kKiB - 1, 64 * kKiB, 64 * kKiB + 1,
      kMiB - 1, kMiB, kMiB + 1, 5 * kMiB + 7};
  std::uint64_t seed = 100;
  for (const std::size_t bytes : sizes) {
    // Odd places in memory at both ends, unrelated to each other.
    exchange(net, connection, bytes, bytes, seed % 9, (seed * 5) % 13, seed);
    ++seed;
  }
  const std::size_t most = static_cast<std::size_t>(check::rounds(64)) * kMiB + 1;
  exchange(net, connection, most, most, 3, 1, seed);
  for (const int tag : {0, -1, 1, INT_MIN, INT_MAX}) exchange(net, connection, 100, 100, 1, 2, ++seed, tag);
  close_both_ends(net, &connection);
}

void receives_less_than_posted(const Session& session) {
  const Net& net = session.net();
  Connection connection = connect_both_ends(net, session.ctx());
  std::uint64_t seed = 300;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, 4 * kKiB, 100 * kKiB + 3, 2 * kMiB + 1}) {
    exchange(net, connection, bytes, bytes + 1, 1, 0, ++seed);
    exchange(net, connection, bytes, 4 * kMiB, 0, 3, ++seed);
  }
  close_both_ends(net, &connection);
}

// Message sizes that mix both ways that a message can take.
std::size_t mixed_size(int index) {
  constexpr std::size_t kSizes[] = {1, 0, 512 * kKiB, 37, 64 * kKiB, 128 * kKiB + 5, 8, kMiB};
  return kSizes[static_cast<std::size_t>(index) % std::size(kSizes)];
}

void keeps_32_requests_in_flight(const Session& session) {
  const Net& net = session.net();
  Connection connection = connect_both_ends(net, session.ctx());
  constexpr int kCount = bagua_net::nccl::kNetMaxRequests;
  Poster sender(net, connection.send);
  Poster receiver(net, connection.recv);
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<Buffer>> from;
    std::vector<std::unique_ptr<Buffer>> to;
    std::vector<void*> sending;
    std::vector<void*> receiving;
    std::vector<void*> from_handles;
    std::vector<void*> to_handles;
    for (int index = 0; index < kCount; ++index) {
      from.push_back(std::make_unique<Buffer>(mixed_size(index + round)));
      to.push_back(std::make_unique<Buffer>(kMiB));
      from.back()->fill(static_cast<std::uint64_t>(500 + index));
      from_handles.push_back(register_buffer(net, connection.send, from.back().get()));
      to_handles.push_back(register_buffer(net, connection.recv, to.back().get()));
    }
    // All of them are taken at once: "later" is for what goes beyond 32. Sends first in one round, receives in the
    // other: neither side may depend on the order.
    const auto post_receives = [&] {
      for (int index = 0; index < kCount; ++index) {
        const auto at = static_cast<std::size_t>(index);
        receiving.push_back(receiver.try_irecv(to[at]->data(), kMiB, to_handles[at]));
        CHECK(receiving.back() != nullptr);
      }
    };
    if (round == 0) post_receives();
    for (int index = 0; index < kCount; ++index) {
      const auto at = static_cast<std::size_t>(index);
      sending.push_back(sender.try_isend(from[at]->data(), from[at]->bytes(), from_handles[at]));
      CHECK(sending.back() != nullptr);
    }
    if (round == 1) post_receives();
    // The oldest of each side only, as NCCL does.
    std::size_t sent = 0;
    std::size_t received = 0;
    wait_until("32 messages", [&] {
      if (sent < sending.size() && is_done(net, sending[sent], nullptr)) ++sent;
      int bytes = -1;
      if (received < receiving.size() && is_done(net, receiving[received], &bytes)) {
        CHECK_EQ(bytes, static_cast<int>(from[received]->bytes()));
        ++received;
      }
      return sent == sending.size() && received == receiving.size();
    });
    for (std::size_t at = 0; at < to.size(); ++at) {
      to[at]->check(from[at]->bytes(), 500 + at);
      CHECK_SUCCESS(net.dereg_mr(connection.send, from_handles[at]));
      CHECK_SUCCESS(net.dereg_mr(connection.recv, to_handles[at]));
    }
  }
  close_both_ends(net, &connection);
}

// More than a comm takes: "later" for the rest, and all of them arrive in order once there is room.
void answers_later_when_full(const Session& session) {
  const Net& net = session.net();
  Connection connection = connect_both_ends(net, session.ctx());
  Poster sender(net, connection.send);
  Poster receiver(net, connection.recv);
  constexpr std::size_t kCount = 1000;
  std::vector<std::uint64_t> from(kCount);
  std::vector<std::uint64_t> to(kCount);
  std::vector<void*> sending;
  std::vector<void*> receiving;
  std::size_t sent = 0;
  std::size_t received = 0;
  bool was_full = false;
  for (std::size_t at = 0; at < kCount; ++at) from[at] = pattern_word(at, at);
  // Only sends, until one is refused; nothing receives yet.
  while (!was_full && sending.size() < kCount) {
    void* const request = sender.try_isend(&from[sending.size()], 8, nullptr);
    if (request == nullptr)
      was_full = true;
    else
      sending.push_back(request);
  }
  CHECK(was_full);
  CHECK(sending.size() >= static_cast<std::size_t>(bagua_net::nccl::kNetMaxRequests));
  wait_until("all messages", [&] {
    if (receiving.size() < kCount) {
      void* const request = receiver.try_irecv(&to[receiving.size()], 8, nullptr);
      if (request != nullptr) receiving.push_back(request);
    }
    if (sending.size() < kCount) {
      void* const request = sender.try_isend(&from[sending.size()], 8, nullptr);
      if (request != nullptr) sending.push_back(request);
    }
    if (sent < sending.size() && is_done(net, sending[sent], nullptr)) ++sent;
    if (received < receiving.size() && is_done(net, receiving[received], nullptr)) ++received;
    return sent == kCount && received == kCount;
  });
  CHECK(from == to);
  close_both_ends(net, &connection);
}

// One of two ranks: sends on one connection and receives on the other, on a thread of its own.
void run_rank(const Net& net, void* send, void* recv, int messages, std::uint64_t send_seed, std::uint64_t recv_seed) {
  constexpr std::size_t kWindow = 8;
  Poster sender(net, send);
  Poster receiver(net, recv);
  std::vector<std::unique_ptr<Buffer>> from;
  std::vector<std::unique_ptr<Buffer>> to;
  std::vector<void*> from_handles;
  std::vector<void*> to_handles;
  std::vector<void*> sending;
  std::vector<void*> receiving;
  for (std::size_t slot = 0; slot < kWindow; ++slot) {
    from.push_back(std::make_unique<Buffer>(kMiB, slot));
    to.push_back(std::make_unique<Buffer>(kMiB, 2 * slot + 1));
    from_handles.push_back(register_buffer(net, send, from.back().get()));
    to_handles.push_back(register_buffer(net, recv, to.back().get()));
  }
  const auto count = static_cast<std::size_t>(messages);
  std::size_t sent = 0;
  std::size_t received = 0;
  wait_until("both directions", [&] {
    if (receiving.size() < count && receiving.size() < received + kWindow) {
      const std::size_t slot = receiving.size() % kWindow;
      void* const request = receiver.try_irecv(to[slot]->data(), kMiB, to_handles[slot]);
      if (request != nullptr) receiving.push_back(request);
    }
    if (sending.size() < count && sending.size() < sent + kWindow) {
      const std::size_t slot = sending.size() % kWindow;
      const std::size_t bytes = mixed_size(static_cast<int>(sending.size()));
      fill_pattern(from[slot]->data(), bytes, send_seed + sending.size());
      void* const request = sender.try_isend(from[slot]->data(), bytes, from_handles[slot]);
      if (request != nullptr) sending.push_back(request);
    }
    if (sent < sending.size() && is_done(net, sending[sent], nullptr)) ++sent;
    int bytes = -1;
    if (received < receiving.size() && is_done(net, receiving[received], &bytes)) {
      CHECK_EQ(bytes, static_cast<int>(mixed_size(static_cast<int>(received))));
      check_pattern(to[received % kWindow]->data(), static_cast<std::size_t>(bytes), recv_seed + received);
      ++received;
    }
    return sent == count && received == count;
  });
  for (std::size_t slot = 0; slot < kWindow; ++slot) {
    CHECK_SUCCESS(net.dereg_mr(send, from_handles[slot]));
    CHECK_SUCCESS(net.dereg_mr(recv, to_handles[slot]));
  }
}

void moves_both_directions_at_once(const Session& session) {
  const Net& net = session.net();
  Connection there = connect_both_ends(net, session.ctx());
  Connection back = connect_both_ends(net, session.ctx());
  constexpr int kMessages = 16 + check::rounds(48);  // each buffer is used again
  std::string failure;
  std::thread other([&] {
    try {
      run_rank(net, back.send, there.recv, kMessages, 20000, 10000);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  });
  try {
    run_rank(net, there.send, back.recv, kMessages, 10000, 20000);
  } catch (...) {
    other.join();
    throw;
  }
  other.join();
  CHECK_EQ(failure, "");
  close_both_ends(net, &there);
  close_both_ends(net, &back);
}

// The job is wrong here, and has to be told: which sizes, within seconds.
void refuses_sends_larger_than_receives(const Session& session) {
  const Net& net = session.net();
  for (const std::size_t bytes : {std::size_t{1001}, kMiB + 1}) {
    CapturedLog::get().clear();
    Connection connection = connect_both_ends(net, session.ctx());
    Buffer from(bytes);
    Buffer to(1000);
    void* const from_handle = register_buffer(net, connection.send, &from);
    void* const to_handle = register_buffer(net, connection.recv, &to);
    void* const receiving = Poster(net, connection.recv).try_irecv(to.data(), 1000, to_handle);
    void* const sending = Poster(net, connection.send).try_isend(from.data(), bytes, from_handle);
    CHECK(receiving != nullptr && sending != nullptr);
    bool refused = false;
    wait_until("the error", [&] {
      int done = 0;
      // Whatever becomes of the send: it may have left already, or its connection is gone.
      net.test(sending, &done, nullptr);
      const Result result = net.test(receiving, &done, nullptr);
      if (result != Result::kSuccess) {
        CHECK_RESULT(result, Result::kInvalidUsage);
        refused = true;
      }
      CHECK(done == 0 || refused);
      return refused;
    });
    CHECK_WARNED(std::to_string(bytes));
    CHECK_WARNED("1000");
    to.check(0, 0);
    CHECK_SUCCESS(net.dereg_mr(connection.recv, to_handle));
    CHECK_SUCCESS(net.dereg_mr(connection.send, from_handle));
    close_both_ends(net, &connection);
  }
}

void run_scenario(int version) {
  const Session session(version);
  connects_when_the_other_side_is_not_ready(session);
  connects_over_every_device(session);
  carries_every_size(session);
  receives_less_than_posted(session);
  keeps_32_requests_in_flight(session);
  answers_later_when_full(session);
  moves_both_directions_at_once(session);
  refuses_sends_larger_than_receives(session);
}

bool register_scenario_cases() {
  for (int version = kOldestVersion; version <= kNewestVersion; ++version) {
    register_case("scenario_v" + std::to_string(version) + "_defaults",
                  [=] { in_own_process({}, [=] { run_scenario(version); }); });
    register_case("scenario_v" + std::to_string(version) + "_encrypted", [=] {
      const TemporaryTree tree;
      tree.write("secret", std::string(32, 's'));
      in_own_process({{"BAGUA_NET_ENCRYPTION", "1"}, {"BAGUA_NET_SECRET_FILE", tree.root() + "/secret"}},
                     [=] { run_scenario(version); });
    });
    // Those between only convert arguments otherwise, whatever moves the data.
    if (version != kOldestVersion && version != kNewestVersion) continue;
    for (const char* workers : {"0", "2"}) {
      for (const char* streams : {"1", "4"}) {
        register_case("scenario_v" + std::to_string(version) + "_workers" + workers + "_streams" + streams, [=] {
          in_own_process({{"BAGUA_NET_NWORKERS", workers}, {"BAGUA_NET_NSTREAMS", streams}},
                         [=] { run_scenario(version); });
        });
      }
    }
  }
  return true;
}

const bool scenario_cases_registered = register_scenario_cases();

}  // namespace
}  // namespace abi_test
