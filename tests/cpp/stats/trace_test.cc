// The trace: names of files, what is recorded and what is dropped, and files that cannot be written to their end.
#include "trace/trace.h"

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "base/log_sink.h"
#include "support/check.h"
#include "support/temporary_tree.h"
#include "support/trace_file.h"
#include "trace/comm_trace.h"

using bagua_net::CommTrace;
using bagua_net::Status;
using bagua_net::Trace;
using bagua_net::TraceEvent;
using bagua_net::TraceIdentity;
using bagua_net::TraceLimits;

namespace {

const TraceIdentity kIdentity{3, "node1", 4242};

int warnings = 0;
std::string last_warning;
void count_warning(bagua_net::LogLevel level, const char*, int, const char* message) {
  if (level != bagua_net::LogLevel::kWarn) return;
  ++warnings;
  last_warning = message;
}

// Written when asked to, not by the clock.
TraceLimits limits(std::size_t events = 1024) {
  TraceLimits limited;
  limited.events = events;
  limited.period_ms = 3'600'000;
  return limited;
}

std::shared_ptr<Trace> open_trace(const std::string& folder, const TraceLimits& limited) {
  std::unique_ptr<Trace> trace;
  CHECK_OK(Trace::open(folder + "/trace.json", kIdentity, limited, &trace));
  return trace;
}

TraceEvent event(std::uint32_t track, const char* name, std::uint64_t number) {
  TraceEvent made(track, "test", name, 1000);
  made.add("number", number);
  return made;
}

}  // namespace

TEST_CASE(every_process_has_a_file_of_its_own) {
  const auto path = [](const std::string& pattern) { return bagua_net::trace_path(pattern, kIdentity); };
  CHECK_EQ(path("/tmp/trace.json"), "/tmp/trace.rank3.node1.4242.json");
  CHECK_EQ(path("/tmp/trace"), "/tmp/trace.rank3.node1.4242");
  CHECK_EQ(path("/tmp/v1.2/trace"), "/tmp/v1.2/trace.rank3.node1.4242");
  CHECK_EQ(path("/tmp/.trace"), "/tmp/.trace.rank3.node1.4242");
  CHECK_EQ(path("%r/%h-%p.json"), "3/node1-4242.json");
  CHECK_EQ(path("100%%-%p.json"), "100%-4242.json");
  CHECK_EQ(path("%r.json"), "3.rank3.node1.4242.json");
  CHECK_EQ(path("50%"), "50%.rank3.node1.4242");
  CHECK_EQ(bagua_net::trace_path("t.json", {-1, "a/../b", 7}), "t.a_.._b.7.json");
}

TEST_CASE(events_arrive_as_they_were_recorded) {
  const TemporaryTree folder;
  auto trace = open_trace(folder.root(), limits());
  const std::uint32_t track = trace->add_tracks(Trace::TrackKind::kNetwork, "a track", 2);
  TraceEvent slice(track + 1, "test", "slice", 5'000'000);
  slice.set_end(5'001'500);
  slice.add("bytes", std::uint64_t{1} << 60);
  slice.add("path", "striped");
  slice.add("text that is cut", "0123456789abcdefgh");
  trace->record(slice);
  trace->record(event(track, "instant", 1));
  trace->close();
  trace->record(event(track, "late", 1));
  const trace_file::Trace written(folder.root());
  const std::string seen = written.only("slice");
  CHECK_EQ(trace_file::value(seen, "ph"), "X");
  CHECK_EQ(trace_file::value(seen, "dur"), "1.500");
  CHECK_EQ(trace_file::value(seen, "bytes"), "1152921504606846976");
  CHECK_EQ(trace_file::value(seen, "path"), "striped");
  CHECK_EQ(trace_file::value(seen, "text that is cut"), "0123456789abcde");
  CHECK_EQ(written.track_of(seen), "a track (2)");
  CHECK_EQ(trace_file::value(written.only("instant"), "ph"), "i");
  CHECK_EQ(written.named("late").size(), std::size_t{0});
  CHECK_EQ(trace->written_events(), std::uint64_t{2});
}

TEST_CASE(what_finds_no_room_is_counted_and_said) {
  const TemporaryTree folder;
  auto trace = open_trace(folder.root(), limits(8));
  const std::uint32_t track = trace->add_tracks(Trace::TrackKind::kNccl, "a track");
  for (std::uint64_t i = 0; i < 20; ++i) trace->record(event(track, "first", i));
  CHECK_EQ(trace->dropped_events(), std::uint64_t{12});
  trace->flush();
  for (std::uint64_t i = 0; i < 3; ++i) trace->record(event(track, "second", i));
  trace->close();
  const trace_file::Trace written(folder.root());
  const auto first = written.named("first");
  CHECK_EQ(first.size(), std::size_t{8});
  CHECK_EQ(trace_file::number(first.back(), "number"), 7);
  CHECK_EQ(written.named("second").size(), std::size_t{3});
  CHECK_EQ(written.named("12 events dropped").size(), std::size_t{1});
  CHECK(trace_file::content(trace->path()).find(R"("events":11,"dropped":12)") != std::string::npos);
}

TEST_CASE(many_threads_record_at_once) {
  const TemporaryTree folder;
  auto trace = open_trace(folder.root(), limits(64));
  const std::uint32_t track = trace->add_tracks(Trace::TrackKind::kNccl, "a track");
  constexpr std::uint64_t kEach = 2000;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (std::uint64_t i = 0; i < kEach; ++i) trace->record(event(track, "event", i));
    });
  }
  for (int i = 0; i < 50; ++i) trace->flush();
  for (std::thread& thread : threads) thread.join();
  trace->close();
  const trace_file::Trace written(folder.root());
  CHECK_EQ(written.named("event").size() + trace->dropped_events(), 4 * kEach);
}

TEST_CASE(a_process_that_is_killed_leaves_what_it_recorded) {
  const TemporaryTree folder;
  TraceLimits often = limits();
  often.period_ms = 1;
  auto trace = open_trace(folder.root(), often);
  trace->record(event(trace->add_tracks(Trace::TrackKind::kNccl, "a track"), "event", 1));
  // By its own thread; pytest's deadline ends a wait without end.
  while (trace_file::Trace(folder.root()).named("event").empty()) std::this_thread::yield();
  CHECK_EQ(trace_file::content(trace->path()).substr(0, 2), "[\n");
}

TEST_CASE(a_full_disk_ends_the_file_and_not_the_job) {
  const TemporaryTree folder;
  warnings = 0;
  bagua_net::set_log_function(&count_warning);
  auto trace = open_trace(folder.root(), limits());
  const std::uint32_t track = trace->add_tracks(Trace::TrackKind::kNccl, "a track");
  trace->record(event(track, "before", 1));
  trace->flush();
  const std::string before = trace_file::content(trace->path());
  std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limited{before.size() + 100, RLIM_INFINITY};
  CHECK_EQ(::setrlimit(RLIMIT_FSIZE, &limited), 0);
  for (std::uint64_t i = 0; i < 10; ++i) trace->record(event(track, "after", i));
  trace->flush();
  trace->record(event(track, "after", 10));
  trace->note(track, "after", "");
  trace->flush();
  CHECK_EQ(warnings, 1);
  CHECK(last_warning.find(trace->path() + " ends before the job does") != std::string::npos);
  CHECK(!trace->is_recording());
  trace->close();
  const rlimit unlimited{RLIM_INFINITY, RLIM_INFINITY};
  CHECK_EQ(::setrlimit(RLIMIT_FSIZE, &unlimited), 0);
  // Nothing cut in the middle.
  CHECK_EQ(trace_file::content(trace->path()).substr(0, before.size()), before);
  CHECK_EQ(trace_file::Trace(folder.root()).named("after").size(), std::size_t{0});
}

TEST_CASE(a_file_of_full_size_gets_no_more) {
  const TemporaryTree folder;
  warnings = 0;
  bagua_net::set_log_function(&count_warning);
  TraceLimits small = limits();
  small.file_bytes = 2000;
  auto trace = open_trace(folder.root(), small);
  const std::uint32_t track = trace->add_tracks(Trace::TrackKind::kNccl, "a track");
  for (int round = 0; round < 30; ++round) {
    trace->record(event(track, "event", 1));
    trace->flush();
  }
  trace->close();
  CHECK_EQ(warnings, 1);
  const std::string text = trace_file::content(trace->path());
  CHECK(text.size() > 1500 && text.size() < 2500);
  CHECK_EQ(text.substr(text.size() - 3), "\n]\n");
  CHECK_EQ(trace_file::Trace(folder.root()).named("the trace ends here").size(), std::size_t{1});
}

TEST_CASE(a_place_that_cannot_be_written_to_is_an_error) {
  const TemporaryTree folder;
  std::unique_ptr<Trace> trace;
  const auto refusal = [&](const std::string& pattern) {
    const Status status = Trace::open(pattern, kIdentity, limits(), &trace);
    CHECK(trace == nullptr);
    return status.message();
  };
  CHECK(refusal(folder.root()).find("is a folder") != std::string::npos);
  CHECK(refusal(folder.root() + "/").find("is a folder") != std::string::npos);
  CHECK(refusal(folder.root() + "/none/trace.json").find("No such file") != std::string::npos);
}

TEST_CASE(a_peers_name_does_not_break_the_file) {
  const TemporaryTree folder;
  auto trace = open_trace(folder.root(), limits());
  {
    CommTrace comm(trace, true, "eth0", "\"}],\n\\host\x01\xff");
    comm.posted(0, CommTrace::MessagePath::kInline);
    comm.finished(0, 10);
  }
  trace->close();
  const std::string text = trace_file::content(trace->path());
  CHECK(text.find(R"(to \"}],?\\host??, device eth0")") != std::string::npos);
}

TEST_CASE(messages_that_overlap_are_on_tracks_of_their_own) {
  const TemporaryTree folder;
  auto trace = open_trace(folder.root(), limits());
  {
    CommTrace comm(trace, true, "eth0", "peer");
    for (std::uint64_t number = 0; number < 3; ++number) comm.posted(number, CommTrace::MessagePath::kStriped);
    comm.finished(1, 11);
    comm.posted(3, CommTrace::MessagePath::kInline);
    comm.finished(0, 10);
    comm.finished(3, 13);
  }
  trace->close();
  const trace_file::Trace written(folder.root());
  const auto sends = written.named("isend");
  CHECK_EQ(sends.size(), std::size_t{3});
  const auto track = [&](std::size_t at) { return written.track_of(sends[at]); };
  CHECK(track(0) == track(2) && track(0) != track(1));
  CHECK_EQ(trace_file::number(sends[0], "bytes"), 11);
  CHECK_EQ(trace_file::value(sends[2], "path"), "inline");
  // Message 2 was under way when the comm was closed.
  CHECK_EQ(trace_file::number(written.only("isend, unfinished"), "message"), 2);
}

// What a job that hangs leaves when it is killed.
TEST_CASE(a_message_that_waits_is_told_of_ever_more_rarely) {
  const TemporaryTree folder;
  auto trace = open_trace(folder.root(), limits());
  constexpr std::int64_t kSecondNs = 1'000'000'000;
  const std::int64_t begin_ns = bagua_net::monotonic_ns();
  {
    CommTrace comm(trace, false, "eth0", "peer");
    comm.posted(0, CommTrace::MessagePath::kNotKnown);
    comm.posted(1, CommTrace::MessagePath::kNotKnown);
    comm.finished(0, 10);
    // The first look is within the first second.
    for (int half = 1; half <= 20; ++half) trace->tell_of_waiting(begin_ns + half * kSecondNs / 2);
    comm.finished(1, 10);
    trace->tell_of_waiting(begin_ns + 100 * kSecondNs);
  }
  trace->tell_of_waiting(begin_ns + 200 * kSecondNs);
  trace->close();
  const auto told = trace_file::Trace(folder.root()).named("irecv waits");
  CHECK_EQ(told.size(), std::size_t{4});
  for (const std::string& event : told) CHECK_EQ(trace_file::number(event, "message"), 1);
  CHECK_EQ(trace_file::number(told[3], "posted_ms_ago") / 1000, 8);
}
