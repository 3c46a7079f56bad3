// Comms whose streams join, and go out of use, while messages are under way: nothing is lost, nothing hangs, and every
// message arrives in its own receive.
#include <fcntl.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/monotonic_clock.h"
#include "support/check.h"
#include "support/comm_parts.h"
#include "support/cut_connections.h"
#include "support/process_limits.h"
#include "support/stalling_stream.h"
#include "support/tcp_pair.h"
#include "transport/comm/recv_comm.h"
#include "transport/comm/send_comm.h"
#include "wire/frame_header.h"

namespace bagua_net {
namespace {

constexpr std::size_t kLarge = 65536;  // SendPolicy's min_chunk_bytes

// Two comms of one process over TCP; the test hands the streams in that join.
struct Connection {
  StreamGrowth growth;
  WorkerPool sending_pool;
  WorkerPool receiving_pool;
  std::shared_ptr<StreamArrivals> sender_arrivals = std::make_shared<StreamArrivals>();
  std::shared_ptr<StreamArrivals> receiver_arrivals = std::make_shared<StreamArrivals>();
  std::vector<int> asked;        // of open_streams
  std::vector<OwnedFd> watched;  // duplicates of the receiving ends, by stream index
  std::unique_ptr<SendComm> sender;
  std::unique_ptr<RecvComm> receiver;
  std::size_t messages = 0;

  Connection(int workers, std::size_t streams, int initial, int most, SendPolicy policy = {}, bool recovers = false)
      : growth(initial, most), sending_pool(workers, 50, any_cpu()), receiving_pool(workers, 50, any_cpu()) {
    std::vector<std::unique_ptr<ByteStream>> sending;
    std::vector<std::unique_ptr<ByteStream>> receiving;
    for (std::size_t i = 0; i < streams; ++i) {
      auto [near, far] = tcp_pair();
      watch(far);
      sending.push_back(make_tcp_byte_stream(std::move(near)));
      receiving.push_back(make_tcp_byte_stream(std::move(far)));
    }
    policy.growth = &growth;
    policy.open_streams = [this](int count) { asked.push_back(count); };
    if (policy.most_streams == 1) policy.most_streams = most;
    RecvPolicy receiving_policy;
    receiving_policy.recovers = recovers;
    if (recovers) policy.replace_stream = [](Joining) {};
    CHECK_OK(SendComm::create(std::move(sending), "receiver", sender_arrivals, policy, &sending_pool, &sender));
    CHECK_OK(RecvComm::create(std::move(receiving), "sender", receiver_arrivals, &receiving_pool, &receiver,
                              receiving_policy));
  }
  ~Connection() {
    sender.reset();
    receiver.reset();
    sending_pool.stop();
    receiving_pool.stop();
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void watch(const OwnedFd& far) { watched.emplace_back(::fcntl(far.get(), F_DUPFD_CLOEXEC, 0)); }

  void join() {
    auto [near, far] = tcp_pair();
    watch(far);
    receiver_arrivals->hand_in(std::move(far));
    sender_arrivals->hand_in(std::move(near));
  }

  // The sender has closed it.
  bool has_ended(std::size_t index) const {
    std::uint8_t byte = 0;
    return ::recv(watched[index].get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
  }
  // From there on all of them.
  bool have_ended(std::size_t first) const {
    for (std::size_t index = first; index < watched.size(); ++index) {
      if (!has_ended(index)) return false;
    }
    return true;
  }

  std::size_t used_streams() const {
    return static_cast<std::size_t>(std::count_if(watched.begin(), watched.end(),
                                                  [](const OwnedFd& far) { return bytes_received(far.get()) > 0; }));
  }
  std::vector<std::uint64_t> received_by_stream() const {
    std::vector<std::uint64_t> bytes;
    for (const OwnedFd& far : watched) bytes.push_back(bytes_received(far.get()));
    return bytes;
  }

  // Sends messages of these sizes with as many under way as the comm takes, and verifies them; `step` is called before
  // each round of calls.
  void exchange(const std::vector<std::size_t>& sizes, const std::function<void()>& step = [] {}) {
    std::vector<std::vector<std::uint8_t>> sent;
    std::vector<std::vector<std::uint8_t>> received;
    for (const std::size_t size : sizes) {
      sent.push_back(make_message(messages++, size));
      received.emplace_back(size + 1, 0xee);
    }
    std::vector<Request*> sends;
    std::vector<Request*> receives;
    std::size_t sends_done = 0;
    std::size_t receives_done = 0;
    const Deadline deadline;
    while (sends_done < sizes.size() || receives_done < sizes.size()) {
      deadline.check("messages");
      step();
      Request* request = nullptr;
      if (sends.size() < sizes.size()) {
        const std::vector<std::uint8_t>& message = sent[sends.size()];
        CHECK_OK(sender->isend(message.data(), message.size(), nullptr, &request));
        if (request != nullptr) sends.push_back(request);
      }
      if (receives.size() < sizes.size()) {
        std::vector<std::uint8_t>& room = received[receives.size()];
        CHECK_OK(receiver->irecv(room.data(), room.size(), nullptr, &request));
        if (request != nullptr) receives.push_back(request);
      }
      bool done = false;
      std::size_t bytes = 0;
      if (sends_done < sends.size()) {
        CHECK_OK(sends[sends_done]->test(&done, &bytes));
        if (done) CHECK_EQ(bytes, sizes[sends_done++]);
      }
      if (receives_done < receives.size()) {
        CHECK_OK(receives[receives_done]->test(&done, &bytes));
        if (done) CHECK_EQ(bytes, sizes[receives_done++]);
      }
    }
    for (std::size_t number = 0; number < sizes.size(); ++number) {
      CHECK_EQ(int{received[number].back()}, 0xee);
      received[number].pop_back();
      CHECK(received[number] == sent[number]);
    }
  }
};

// Makes StreamGrowth see windows of 200 ms, long after any that the comms themselves report, and far apart.
class Windows {
 public:
  explicit Windows(StreamGrowth& growth) : growth_(growth) {}

  void pass(std::size_t bytes) {
    growth_.begin_busy(now_ns_);
    // More full messages than any that the comms may have reported since the last window.
    for (int message = 0; message < 1000; ++message) growth_.add_posted(true);
    for (int message = 0; message < 100; ++message) growth_.add_sent(bytes / 100, now_ns_ + 99'000'000);
    growth_.add_sent(bytes, now_ns_ + 200'000'000);
    growth_.end_busy(now_ns_ + 200'000'000);
    now_ns_ += 1'000'000'000'000;
  }

  // A network on which each connection adds as much: every trial gains.
  void pass_until(int target) {
    constexpr std::size_t kMoreThanAnyNetwork = std::size_t{1} << 40;
    for (int window = 0; growth_.target() != target; ++window) {
      CHECK(window < 100);
      pass(static_cast<std::size_t>(growth_.target()) * kMoreThanAnyNetwork);
    }
  }

  // Nothing moves until the number goes back.
  void pass_until_fewer() {
    const int before = growth_.target();
    for (int window = 0; growth_.target() >= before; ++window) {
      CHECK(window < 100);
      pass(1);
    }
  }

 private:
  StreamGrowth& growth_;
  std::int64_t now_ns_ = 1'000'000'000'000'000'000;
};

Status test_until_done(Request* request) {
  const Deadline deadline;
  for (;;) {
    deadline.check("a request");
    bool done = false;
    std::size_t bytes = 0;
    const Status status = request->test(&done, &bytes);
    if (done || !status.is_ok()) return status;
  }
}

void streams_join_on_both_ends(int workers, std::size_t first_streams) {
  for (unsigned seed = 1; seed <= 3; ++seed) {
    std::mt19937 random(seed);
    constexpr std::size_t kMax = 8;
    Connection connection(workers, first_streams, kMax, kMax);
    std::vector<OwnedFd> nears;
    std::vector<OwnedFd> fars;
    for (std::size_t i = first_streams; i < kMax; ++i) {
      auto [near, far] = tcp_pair();
      connection.watch(far);
      nears.push_back(std::move(near));
      fars.push_back(std::move(far));
      // From here on the sender may use it, as the service promises.
      connection.receiver_arrivals->announce();
    }
    std::shuffle(nears.begin(), nears.end(), random);
    std::shuffle(fars.begin(), fars.end(), random);
    const auto hand_in = [&] {
      if (!nears.empty() && random() % 20 == 0) {
        connection.sender_arrivals->hand_in(std::move(nears.back()));
        nears.pop_back();
      }
      if (!fars.empty() && random() % 20 == 0) {
        connection.receiver_arrivals->hand_in_announced(std::move(fars.back()));
        fars.pop_back();
      }
    };
    const Deadline deadline;
    do {
      deadline.check("traffic on every stream");
      std::vector<std::size_t> sizes;
      for (int i = 0; i < 40; ++i) sizes.push_back(random() % 3 == 0 ? random() % 200 : random() % (4u << 20));
      connection.exchange(sizes, hand_in);
    } while (connection.used_streams() < kMax);
  }
}

// The streams go from 2 to 4 and back to 2.
void streams_go_out_of_use(int workers) {
  Connection connection(workers, 2, 2, 4);
  Windows windows(connection.growth);
  windows.pass_until(4);
  CHECK_EQ(connection.growth.target(), 4);
  connection.exchange({4u << 20});
  CHECK_EQ(connection.asked.size(), 1u);
  CHECK_EQ(connection.asked[0], 2);
  connection.join();
  connection.join();
  const Deadline deadline;
  while (connection.used_streams() < 4) {
    deadline.check("traffic on four streams");
    // On a busy machine the comm's own messages may already have ended the trial.
    windows.pass_until(4);
    connection.exchange({100, 4u << 20, 4u << 20, 4u << 20, 4u << 20});
  }
  // Messages are under way on all four when the number goes back.
  int rounds = 0;
  connection.exchange(std::vector<std::size_t>(16, 4u << 20), [&] {
    if (++rounds != 8) return;
    windows.pass_until(4);
    windows.pass_until_fewer();
  });
  CHECK_EQ(connection.growth.target(), 2);
  connection.exchange({kLarge});
  const std::vector<std::uint64_t> before = connection.received_by_stream();
  connection.exchange(std::vector<std::size_t>(16, 1u << 20));
  const std::vector<std::uint64_t> after = connection.received_by_stream();
  CHECK(after[0] + after[1] >= before[0] + before[1] + (16u << 20));
  // The end of the stream counts as a byte.
  CHECK(after[2] <= before[2] + 1);
  CHECK(after[3] <= before[3] + 1);
}

struct NoFailures final : FailureSink {
  void fail(Status) override {}
};

void write_frame(int socket, std::uint64_t number, std::uint8_t value) {
  std::vector<std::uint8_t> frame(kFrameHeaderBytes + 1, value);
  encode_frame_header({1, number, 0, 1}, frame.data());
  CHECK_EQ(::send(socket, frame.data(), frame.size(), MSG_NOSIGNAL), static_cast<ssize_t>(frame.size()));
}

}  // namespace

TEST_CASE(streams_join_in_mid_traffic_on_one_thread) { streams_join_on_both_ends(0, 1); }

TEST_CASE(streams_join_in_mid_traffic_with_workers) { streams_join_on_both_ends(2, 2); }

TEST_CASE(streams_go_out_of_use_on_one_thread) { streams_go_out_of_use(0); }

TEST_CASE(streams_go_out_of_use_with_workers) { streams_go_out_of_use(2); }

TEST_CASE(streams_that_only_the_receiver_takes_in_disturb_nothing) {
  for (const int workers : {0, 2}) {
    Connection connection(workers, 2, 8, 8);
    std::vector<OwnedFd> nears;
    for (int i = 0; i < 4; ++i) {
      auto [near, far] = tcp_pair();
      connection.receiver_arrivals->hand_in(std::move(far));
      nears.push_back(std::move(near));
    }
    connection.exchange({100, 1u << 20, 0, 3u << 20});
    nears.clear();  // and end again, unused
    connection.exchange({100, 1u << 20, 0, 3u << 20});
  }
}

TEST_CASE(a_stream_that_the_sender_uses_before_the_receiver_has_it_waits) {
  Connection connection(0, 1, 2, 2);
  connection.exchange({kLarge});
  connection.receiver_arrivals->announce();
  auto ends = tcp_pair();
  connection.watch(ends.second);
  connection.sender_arrivals->hand_in(std::move(ends.first));
  int rounds = 0;
  // Until the sender has used it: what it carries is missing at the receiver, which goes on waiting.
  const Deadline deadline;
  while (connection.used_streams() < 2) {
    deadline.check("traffic on the second stream");
    connection.exchange(std::vector<std::size_t>(4, 8u << 20), [&] {
      if (++rounds == 200) connection.receiver_arrivals->hand_in_announced(std::move(ends.second));
    });
  }
}

TEST_CASE(a_stream_that_joins_a_failed_comm_is_shut_down) {
  for (const int workers : {0, 2}) {
    Connection connection(workers, 2, 4, 4);
    std::uint8_t byte = 0;
    Request* receive = nullptr;
    CHECK_OK(connection.receiver->irecv(&byte, 1, nullptr, &receive));
    connection.receiver->fail(Status::remote_error("broken"));
    auto [near, far] = tcp_pair();
    connection.receiver_arrivals->hand_in(std::move(far));
    CHECK(test_until_done(receive).message().find("broken") != std::string::npos);
    CHECK(has_ended(near.get()));
  }
}

TEST_CASE(a_failure_reaches_streams_that_joined) {
  for (const int workers : {0, 2}) {
    Connection connection(workers, 2, 4, 4);
    connection.join();
    connection.exchange({4u << 20, 4u << 20});
    connection.sender->fail(Status::remote_error("broken"));
    for (const OwnedFd& far : connection.watched) CHECK(has_ended(far.get()));
  }
}

TEST_CASE(a_stream_that_joins_after_deregistration_stopped_the_comm_is_closed) {
  Connection connection(2, 2, 4, 4);
  std::vector<std::uint8_t> room(100);
  MemoryRegistration* registration = nullptr;
  CHECK_OK(connection.receiver->register_memory(room.data(), room.size(), &registration));
  Request* receive = nullptr;
  CHECK_OK(connection.receiver->irecv(room.data(), room.size(), registration, &receive));
  CHECK_OK(connection.receiver->deregister_memory(registration));
  auto [near, far] = tcp_pair();
  write_frame(near.get(), 0, 7);
  connection.receiver_arrivals->hand_in(std::move(far));
  CHECK(!test_until_done(receive).is_ok());
  CHECK(has_ended(near.get()));
  // A worker that had got the stream would read the frame soon.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_EQ(int{room[0]}, 0);
}

TEST_CASE(a_receive_waits_for_an_announced_stream_when_the_others_have_ended) {
  for (const int workers : {0, 2}) {
    Connection connection(workers, 2, 4, 4);
    auto [near, far] = tcp_pair();
    connection.receiver_arrivals->announce();
    connection.sender.reset();  // ends both streams
    std::uint8_t byte = 0;
    Request* receive = nullptr;
    CHECK_OK(connection.receiver->irecv(&byte, 1, nullptr, &receive));
    for (int i = 0; i < 1000; ++i) {
      bool done = false;
      std::size_t bytes = 0;
      CHECK_OK(receive->test(&done, &bytes));
      CHECK(!done);
    }
    write_frame(near.get(), 0, 7);
    connection.receiver_arrivals->hand_in_announced(std::move(far));
    CHECK_OK(test_until_done(receive));
    CHECK_EQ(int{byte}, 7);
    near.reset();
    // Now nothing more can come.
    CHECK_OK(connection.receiver->irecv(&byte, 1, nullptr, &receive));
    CHECK(test_until_done(receive).code() == StatusCode::kRemoteError);
  }
}

TEST_CASE(the_end_of_a_stream_right_behind_a_message_is_noticed) {
  for (const int workers : {0, 2}) {
    Connection connection(workers, 2, 4, 4);
    auto [near, far] = tcp_pair();
    write_frame(near.get(), 0, 7);
    near.reset();
    connection.receiver_arrivals->hand_in(std::move(far));
    std::uint8_t byte = 0;
    Request* receive = nullptr;
    CHECK_OK(connection.receiver->irecv(&byte, 1, nullptr, &receive));
    CHECK_OK(test_until_done(receive));
    connection.sender.reset();
    CHECK_OK(connection.receiver->irecv(&byte, 1, nullptr, &receive));
    CHECK(test_until_done(receive).code() == StatusCode::kRemoteError);
  }
}

TEST_CASE(closing_a_comm_closes_what_it_has_not_taken_in) {
  Connection connection(0, 1, 4, 4);
  auto [near, near_peer] = tcp_pair();
  auto [far, far_peer] = tcp_pair();
  connection.sender_arrivals->hand_in(std::move(near));
  connection.receiver_arrivals->hand_in(std::move(far));
  connection.sender_arrivals.reset();
  connection.receiver_arrivals.reset();
  connection.sender.reset();
  connection.receiver.reset();
  CHECK(has_ended(near_peer.get()));
  CHECK(has_ended(far_peer.get()));
}

TEST_CASE(more_streams_than_fit_are_closed) {
  Connection connection(0, 1, 4, 4);
  std::vector<OwnedFd> nears;
  for (int i = 0; i < kMaxStreams; ++i) {
    auto [near, far] = tcp_pair();
    nears.push_back(std::move(near));
    connection.receiver_arrivals->hand_in(std::move(far));
  }
  connection.exchange({100, kLarge});
  CHECK(has_ended(nears.back().get()));
  connection.exchange({100, kLarge});
}

TEST_CASE(streams_are_asked_for_once_and_as_many_as_are_missing) {
  for (const int workers : {0, 2}) {
    Connection connection(workers, 2, 8, 8);
    connection.exchange({100, kLarge / kLimitedFlowShare, 0});
    CHECK(connection.asked.empty());  // small messages ask for nothing
    connection.exchange({kLarge, kLarge, 4u << 20});
    CHECK_EQ(connection.asked.size(), 1u);
    CHECK_EQ(connection.asked[0], 6);
    connection.join();
    connection.join();
    connection.exchange(std::vector<std::size_t>(100, kLarge));
    CHECK_EQ(connection.asked.size(), 1u);
  }
}

TEST_CASE(a_comm_asks_for_no_more_than_its_peer_allows) {
  SendPolicy policy;
  policy.most_streams = 3;
  Connection connection(0, 1, 16, 16, policy);
  connection.exchange({kLarge, kLarge});
  CHECK_EQ(connection.asked.size(), 1u);
  CHECK_EQ(connection.asked[0], 2);
}

TEST_CASE(a_further_trial_asks_for_the_difference) {
  Connection connection(0, 2, 2, 16);
  connection.exchange({kLarge});
  CHECK(connection.asked.empty());
  Windows windows(connection.growth);
  for (const int target : {8, 16}) {
    windows.pass_until(target);
    connection.exchange({kLarge});
  }
  CHECK_EQ(connection.asked.size(), 2u);
  CHECK_EQ(connection.asked[0], 6);  // from 2 to 8
  CHECK_EQ(connection.asked[1], 8);  // from 8 to 16, though the first six have not come
}

TEST_CASE(streams_that_gained_nothing_are_closed) {
  for (const int workers : {0, 2}) {
    for (const bool recovers : {false, true}) {
      Connection connection(workers, 2, 2, 8, {}, recovers);
      Windows windows(connection.growth);
      const Deadline deadline;
      // More often than there are places for streams that nobody has closed.
      for (int trial = 0; trial < 12; ++trial) {
        windows.pass_until(8);
        const std::size_t first = connection.watched.size();
        for (int joins = 0; joins < 6; ++joins) connection.join();
        connection.exchange(std::vector<std::size_t>(20, kLarge));
        windows.pass_until_fewer();
        while (!connection.have_ended(first) || !connection.receiver_arrivals->has_room(3)) {
          deadline.check("the end of the streams");
          connection.exchange({kLarge, 4u << 20});
        }
        CHECK(!connection.has_ended(0) && !connection.has_ended(1));
      }
      // All the others are lost: the sender has not closed the comm.
      if (!recovers) continue;
      std::vector<std::uint8_t> room(100);
      Request* receive = nullptr;
      CHECK_OK(connection.receiver->irecv(room.data(), room.size(), nullptr, &receive));
      for (int index = 0; index < 2; ++index)
        cut(connection.watched[static_cast<std::size_t>(index)].get(), Cut::kReset);
      const Status status = test_until_done(receive);
      CHECK(status.message().find("has opened no connection") != std::string::npos);
    }
  }
}

TEST_CASE(without_room_for_more_streams_a_comm_goes_on_with_those_it_has) {
  OptionalConnections optional;
  SendPolicy policy;
  policy.optional = std::make_shared<OptionalConnections::Share>(&optional);
  Connection connection(0, 1, 16, 16, policy);
  {
    const DescriptorLimit limit(2 * (open_descriptors() + 6));
    connection.exchange({kLarge, kLarge});
  }
  CHECK_EQ(connection.asked.size(), 1u);
  CHECK(connection.asked[0] > 0 && connection.asked[0] <= 6);
  CHECK_EQ(policy.optional->taken(), connection.asked[0]);
  connection.exchange({kLarge, kLarge});
}

TEST_CASE(a_comm_that_is_closed_in_mid_message_leaves_no_busy_time) {
  Connection connection(0, 1, 1, 2);
  const std::vector<std::uint8_t> message(16u << 20);
  Request* send = nullptr;
  CHECK_OK(connection.sender->isend(message.data(), message.size(), nullptr, &send));
  CHECK(send != nullptr);
  connection.sender.reset();
  // Full messages enough for a trial, and an hour later one more: far from a window of busy time.
  const std::int64_t now_ns = monotonic_ns();
  constexpr std::int64_t kHourNs = 3'600'000'000'000;
  connection.growth.begin_busy(now_ns);
  for (int i = 0; i < 10; ++i) {
    connection.growth.add_posted(true);
    connection.growth.add_sent(kLarge, now_ns);
  }
  connection.growth.end_busy(now_ns);
  connection.growth.begin_busy(now_ns + kHourNs);
  connection.growth.add_posted(true);
  connection.growth.add_sent(kLarge, now_ns + kHourNs);
  connection.growth.end_busy(now_ns + kHourNs);
  CHECK_EQ(connection.growth.target(), 1);
}

TEST_CASE(a_message_whose_streams_went_out_of_use_before_they_took_it_is_sent) {
  Connection connection(1, 2, 2, 4);
  Windows windows(connection.growth);
  windows.pass_until(4);
  connection.exchange({kLarge});
  connection.join();
  connection.join();
  connection.exchange({kLarge});  // takes them in
  CHECK_EQ(connection.growth.target(), 4);
  // Message m wakes as many of the streams 1 to 3 as it has chunks, from 1 + m % 3 on: here 2 and 3.
  while (connection.messages % 3 != 1) connection.exchange({100});

  auto [stalling_socket, its_peer] = tcp_pair();
  NoFailures no_failures;
  StallingStream stalling(std::move(stalling_socket), &no_failures);
  EventLoopWorker* worker = nullptr;
  CHECK_OK(connection.sending_pool.assign({}, 0, &worker));
  std::uint64_t stalling_id = 0;
  CHECK_OK(worker->attach(&stalling, &stalling_id));
  worker->kick(stalling_id);
  stalling.wait_until_stalling();

  const std::vector<std::uint8_t> striped(kLarge + 1, 7);
  const std::vector<std::uint8_t> whole(kLarge, 8);  // large, and written by the thread that posts it
  std::vector<std::uint8_t> first_room(striped.size());
  std::vector<std::uint8_t> second_room(whole.size());
  Request* sends[2] = {};
  Request* receives[2] = {};
  CHECK_OK(connection.receiver->irecv(first_room.data(), first_room.size(), nullptr, &receives[0]));
  CHECK_OK(connection.receiver->irecv(second_room.data(), second_room.size(), nullptr, &receives[1]));
  // In a thread of its own, which has moved nothing yet and hence time left for `whole`.
  std::thread([&] {
    [[maybe_unused]] Status ignored = connection.sender->isend(striped.data(), striped.size(), nullptr, &sends[0]);
    windows.pass_until_fewer();
    ignored = connection.sender->isend(whole.data(), whole.size(), nullptr, &sends[1]);
  }).join();
  CHECK_EQ(connection.growth.target(), 2);
  CHECK(sends[0] != nullptr && sends[1] != nullptr);
  stalling.release();

  // As NCCL does: both ends are tested in turn.
  const std::int64_t end_ms = monotonic_ms() + kDeadlineMs;
  bool done[4] = {};
  while (monotonic_ms() < end_ms && !(done[0] && done[1] && done[2] && done[3])) {
    Request* const requests[4] = {sends[0], sends[1], receives[0], receives[1]};
    for (int i = 0; i < 4; ++i) {
      std::size_t bytes = 0;
      if (!done[i]) CHECK_OK(requests[i]->test(&done[i], &bytes));
    }
  }
  worker->detach(&stalling, stalling_id);
  CHECK(done[1] && done[3]);
  CHECK(done[0] && done[2]);
  CHECK(first_room == striped);
}

}  // namespace bagua_net

CHECK_MAIN
