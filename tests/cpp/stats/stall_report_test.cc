// What a process says of long waits: when, of whom, and that it goes on. Then over real connections: of a peer that
// does not read, and of one that does not send.
#include "stats/stall_report.h"

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/log_sink.h"
#include "base/monotonic_clock.h"
#include "support/comm_pair.h"
#include "support/cut_connections.h"
#include "support/pause.h"

namespace bagua_net {
namespace {

constexpr int kAfterMs = 30000;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

StallReport::Wait wait(const std::string& peer, bool receives, std::int64_t ms) {
  return {"10.0.0.1:" + std::to_string(ms) + " (" + peer + ")",
          receives ? StallReport::Waits::kToReceive : StallReport::Waits::kToSend, ms, "reason of " + peer};
}

std::vector<std::string>& logged() {
  static std::vector<std::string> lines;
  return lines;
}

void keep_line(LogLevel, const char*, int, const char* message) { logged().emplace_back(message); }

// Two ends on one thread, over TCP.
struct Connection {
  StallReport stalls{1};
  std::vector<std::uint8_t> message = make_message(0, 32u << 20);  // more than both ends' buffers hold
  std::vector<std::uint8_t> room = std::vector<std::uint8_t>(message.size());
  CommPair pair{settings(&stalls)};

  Connection() {
    logged().clear();
    set_log_function(&keep_line);
  }
  ~Connection() { set_log_function(nullptr); }

  static CommPair::Settings settings(StallReport* stalls) {
    CommPair::Settings settings = over_tcp(1, 0);
    settings.sending.stalls = settings.receiving.stalls = stalls;
    return settings;
  }
  Request* send() { return pair.send(message); }
  Request* receive() { return pair.receive(room); }
  // Until so many lines were written, or the requests are done.
  static void test_until(std::vector<Request*> requests, std::size_t lines) {
    const Deadline deadline;
    Pause pause;
    while (!requests.empty() && logged().size() < lines) {
      deadline.check("a line");
      pause();
      for (std::size_t i = 0; i < requests.size();) {
        bool done = false;
        std::size_t bytes = 0;
        CHECK_OK(requests[i]->test(&done, &bytes));
        if (done)
          requests.erase(requests.begin() + static_cast<std::ptrdiff_t>(i));
        else
          ++i;
      }
    }
  }
};

}  // namespace

TEST_CASE(comms_that_wait_are_gathered_into_one_line) {
  StallReport report(kAfterMs);
  const int comms[4] = {};
  CHECK_EQ(report.waits(&comms[0], wait("a", false, 31000), 0), "");
  CHECK_EQ(report.waits(&comms[1], wait("b", true, 30500), 200), "");
  CHECK_EQ(report.waits(&comms[2], wait("b", true, 30900), 400), "");
  const std::string line = report.waits(&comms[0], wait("a", false, 32500), 1500);
  // What is received comes first, one entry for the two comms with that peer.
  CHECK_EQ(
      line.find(
          "this process has waited for 32 s: to receive from 10.0.0.1:30900 (b) on 2 channels: reason of b; to send to "
          "10.0.0.1:32500 (a): reason of a. "),
      0u);
  CHECK(has(line, "bagua-net blame"));
}

TEST_CASE(a_stall_that_lasts_is_reported_ever_more_rarely) {
  StallReport report(kAfterMs);
  const int comm = 0;
  std::vector<std::int64_t> written_ms;
  for (std::int64_t ms = kAfterMs; ms < 1000000; ms += 1000) {
    if (!report.waits(&comm, wait("a", true, ms), ms).empty()) written_ms.push_back(ms);
  }
  CHECK_EQ(written_ms.size(), 5u);
  for (std::size_t i = 1; i < written_ms.size(); ++i) CHECK(written_ms[i] >= 2 * written_ms[i - 1] - 1000);
}

TEST_CASE(the_end_is_reported_once_when_no_comm_waits_any_more) {
  StallReport report(kAfterMs);
  const int comms[2] = {};
  for (const std::int64_t now_ms : {0, 2000}) {
    for (const int& comm : comms) [[maybe_unused]]
      const std::string line = report.waits(&comm, wait("a", true, kAfterMs + now_ms), now_ms);
  }
  CHECK_EQ(report.goes_on(&comms[0]), "");
  CHECK_EQ(report.goes_on(&comms[1]), "goes on, after at least 32 s");
  CHECK_EQ(report.goes_on(&comms[1]), "");
  // The next is a stall of its own.
  CHECK_EQ(report.waits(&comms[0], wait("a", true, kAfterMs), 90000), "");
  CHECK_EQ(report.goes_on(&comms[0]), "");
}

TEST_CASE(who_says_no_more_that_it_waits_is_forgotten) {
  StallReport report(kAfterMs, 3);
  const int comms[2] = {};
  CHECK_EQ(report.waits(&comms[0], wait("a", true, kAfterMs), 0), "");
  CHECK(has(report.waits(&comms[1], wait("b", true, kAfterMs), 1500), "(a)"));
  const std::string line = report.waits(&comms[1], wait("b", true, 4 * kAfterMs), 3 * kAfterMs);
  CHECK_EQ(line.find("rank 3 has waited for 120 s: to receive from 10.0.0.1:120000 (b): reason of b. "), 0u);
}

TEST_CASE(with_many_peers_those_that_are_waited_for_longest_are_named) {
  StallReport report(kAfterMs);
  std::vector<int> comms(9);
  std::string line;
  for (const std::int64_t now_ms : {0, 1500}) {
    for (std::size_t i = 0; i < comms.size(); ++i) {
      const auto ms = static_cast<std::int64_t>(40000 + 1000 * i);
      const std::string one = report.waits(&comms[i], wait("p" + std::to_string(i), true, ms), now_ms);
      if (!one.empty()) line = one;
    }
  }
  CHECK(has(line, "(p8): reason of p8"));
  CHECK(!has(line, "(p4)"));
  CHECK(has(line, "and for 5 more peers"));
}

TEST_CASE(a_peer_that_does_not_read_is_named_and_so_is_the_end) {
  Connection connection;
  Request* const sent = connection.send();
  Connection::test_until({sent}, 1);
  CHECK(has(logged()[0], "to send to receiver: 33554432 bytes in 1 send that is unfinished"));
  CHECK(has(logged()[0], "its process does not read"));
  Connection::test_until({sent, connection.receive()}, ~std::size_t{0});
  CHECK(has(logged().back(), "goes on, after"));
}

TEST_CASE(a_comm_that_has_failed_waits_no_more) {
  Connection connection;
  Request* const received = connection.receive();
  Connection::test_until({received}, 1);
  connection.pair.sender.reset();
  CHECK(!outcome(received).is_ok());
  const int other = 0;
  std::string line;
  for (const int later_ms : {0, 2000}) {
    line += connection.stalls.waits(&other, wait("a", true, kAfterMs), coarse_monotonic_ms() + later_ms);
  }
  CHECK(has(line, "reason of a"));
  CHECK(!has(line, "sender"));
}

TEST_CASE(a_peer_that_does_not_send_is_named) {
  Connection connection;
  Request* const received = connection.receive();
  Connection::test_until({received}, 1);
  CHECK(has(logged()[0], "to receive from sender: 1 receive that is unfinished, for which nothing has arrived"));
  CHECK(has(logged()[0], "the last data came 0 s ago"));
  Connection::test_until({received, connection.send()}, ~std::size_t{0});
}

TEST_CASE(a_host_that_does_not_answer_is_named_by_who_receives) {
  logged().clear();
  set_log_function(&keep_line);
  StallReport stalls(1);
  WorkerPool no_workers(0, 0, any_cpu());
  auto [near, far] = tcp_pair();
  const std::pair<int, int> options[] = {{TCP_KEEPIDLE, 1}, {TCP_KEEPINTVL, 1}, {TCP_KEEPCNT, 60}};
  const int on = 1;
  CHECK_EQ(::setsockopt(near.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on), 0);
  for (const auto& [option, value] : options) {
    CHECK_EQ(::setsockopt(near.get(), IPPROTO_TCP, option, &value, sizeof value), 0);
  }
  silence(far.get());

  std::vector<std::unique_ptr<ByteStream>> streams;
  streams.push_back(make_tcp_byte_stream(std::move(near)));
  std::unique_ptr<RecvComm> receiver;
  RecvPolicy policy;
  policy.stalls = &stalls;
  CHECK_OK(RecvComm::create(std::move(streams), "the sender", nullptr, &no_workers, &receiver, policy));
  std::vector<std::uint8_t> room(8);
  Request* request = nullptr;
  CHECK_OK(receiver->irecv(room.data(), room.size(), nullptr, &request));
  const Deadline deadline;
  while (logged().empty() || !has(logged().back(), "probes: the host or the network is down")) {
    deadline.check("the line");
    CHECK(!is_done(request));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  CHECK(!has(logged().front(), "probes"));
  set_log_function(nullptr);
}

}  // namespace bagua_net
