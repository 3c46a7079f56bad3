#include "bench/ring_mode.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "base/monotonic_clock.h"
#include "bench/all_reduce_kernel.h"
#include "bench/bare_transport.h"
#include "bench/command_line.h"
#include "bench/driver_protocol.h"
#include "bench/plugin_transport.h"
#include "bench/resource_meter.h"
#include "bench/ring_options.h"
#include "bench/ring_schedule.h"

namespace bagua_net::bench {
namespace {

constexpr std::int64_t kMaxIterations = 1'000'000;

std::string to_hex(const RingTransport::Handle& handle) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : handle) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

Status from_hex(const std::string& text, RingTransport::Handle* handle) {
  const auto digit = [](char character) {
    if (character >= '0' && character <= '9') return character - '0';
    if (character >= 'a' && character <= 'f') return character - 'a' + 10;
    return -1;
  };
  handle->clear();
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) {
    const int high = digit(text[i]);
    const int low = digit(text[i + 1]);
    if (high < 0 || low < 0) break;
    handle->push_back(static_cast<std::uint8_t>(high * 16 + low));
  }
  if (handle->size() * 2 == text.size()) return Status::ok();
  return Status::invalid_argument("handle \"" + text + "\" is not made of pairs of lower-case hexadecimal digits");
}

class RingSession {
 public:
  explicit RingSession(RingOptions options) : options_(std::move(options)) {}
  ~RingSession();

  Status start();
  Status serve();  // until quit

 private:
  Status connect(const std::vector<std::string>& words);
  Status run(const std::vector<std::string>& words);
  Status verify(const std::vector<std::string>& words);
  Status quit();

  // One all-reduce, from begin to the last completion.
  Status all_reduce(const RingPlan& plan, RingKernel* kernel);
  Status require_connected(const std::string& command) const;
  std::string neighbours() const;

  const RingOptions options_;
  std::unique_ptr<RingTransport> transport_;
  std::unique_ptr<RingSchedule> schedule_;  // exists once connected
  std::uint64_t verify_round_ = 0;          // the same on all ranks: every round has data of its own
};

RingSession::~RingSession() {
  if (transport_ == nullptr) return;
  // After an error as well: the slots may go only when the transport has let go of them.
  static_cast<void>(transport_->deregister_buffers());
  schedule_.reset();
  static_cast<void>(transport_->close());
}

std::string RingSession::neighbours() const {
  const int nranks = options_.geometry.nranks;
  const int rank = options_.geometry.rank;
  return "rank " + std::to_string(rank) + " (receives from rank " + std::to_string((rank + nranks - 1) % nranks) +
         ", sends to rank " + std::to_string((rank + 1) % nranks) + ")";
}

Status RingSession::start() {
  if (options_.transport == "bare") {
    transport_ = std::make_unique<BareTransport>(options_.address, options_.geometry.channels);
  } else {
    std::unique_ptr<PluginTransport> plugin;
    BAGUA_NET_RETURN_IF_ERROR(PluginTransport::create(options_.plugin, options_.geometry.channels, &plugin));
    transport_ = std::move(plugin);
  }
  std::vector<RingTransport::Handle> handles;
  BAGUA_NET_RETURN_IF_ERROR(transport_->listen(&handles));
  std::vector<std::string> texts;
  texts.reserve(handles.size());
  for (const RingTransport::Handle& handle : handles) texts.push_back(to_hex(handle));

  JsonLine line("listening");
  line.add("handles", texts).add("transport", options_.transport);
  if (transport_->table_name().empty()) {
    line.add_null("table");
  } else {
    line.add("table", transport_->table_name());
  }
  line.add("net_name", transport_->net_name())
      .add("devices", transport_->device_names())
      .add("pid", static_cast<std::int64_t>(getpid()));
  write_event(line);
  return Status::ok();
}

Status RingSession::serve() {
  std::vector<std::string> words;
  while (read_command(&words)) {
    if (words[0] == "quit") return quit();
    if (words[0] == "connect") {
      BAGUA_NET_RETURN_IF_ERROR(connect(words));
    } else if (words[0] == "run") {
      BAGUA_NET_RETURN_IF_ERROR(run(words));
    } else if (words[0] == "verify") {
      BAGUA_NET_RETURN_IF_ERROR(verify(words));
    } else {
      return Status::invalid_argument("unknown command \"" + words[0] +
                                      "\"; ring mode knows connect, run, verify and quit");
    }
  }
  return quit();
}

Status RingSession::connect(const std::vector<std::string>& words) {
  const auto channels = static_cast<std::size_t>(options_.geometry.channels);
  if (schedule_ != nullptr) return Status::invalid_usage("command \"connect\" came twice: the ring is connected");
  BAGUA_NET_RETURN_IF_ERROR(
      expect_arguments(words, channels, "connect HANDLE... (" + std::to_string(channels) + ", one per channel)"));
  std::vector<RingTransport::Handle> handles(channels);
  for (std::size_t i = 0; i < channels; ++i) BAGUA_NET_RETURN_IF_ERROR(from_hex(words[i + 1], &handles[i]));

  // Both directions at once, as NCCL: a rank that waits for one before it starts the other would stop the ring.
  std::vector<bool> connected(channels, false);
  std::vector<bool> accepted(channels, false);
  std::size_t missing = 2 * channels;
  const std::int64_t deadline = monotonic_ms() + options_.timeout_ms;
  while (missing > 0) {
    for (std::size_t i = 0; i < channels; ++i) {
      bool is_done = false;
      if (!connected[i]) {
        BAGUA_NET_RETURN_IF_ERROR(transport_->connect(static_cast<int>(i), &handles[i], &is_done));
        connected[i] = is_done;
        missing -= is_done ? 1 : 0;
      }
      if (!accepted[i]) {
        BAGUA_NET_RETURN_IF_ERROR(transport_->accept(static_cast<int>(i), &is_done));
        accepted[i] = is_done;
        missing -= is_done ? 1 : 0;
      }
    }
    if (missing == 0) break;
    if (monotonic_ms() > deadline) {
      std::string open;
      for (std::size_t i = 0; i < channels; ++i) {
        if (!connected[i]) open += " send " + std::to_string(i);
        if (!accepted[i]) open += " receive " + std::to_string(i);
      }
      return Status::remote_error("the ring is not connected after " + std::to_string(options_.timeout_ms) + " ms at " +
                                  neighbours() + "; missing channels:" + open +
                                  ": see whether those ranks run and their addresses can be reached, or raise "
                                  "--timeout-ms");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

  schedule_ = std::make_unique<RingSchedule>(transport_.get(), options_.geometry);
  BAGUA_NET_RETURN_IF_ERROR(schedule_->allocate_slots());
  write_event(JsonLine("connected"));
  return Status::ok();
}

Status RingSession::require_connected(const std::string& command) const {
  if (schedule_ != nullptr) return Status::ok();
  return Status::invalid_usage("command \"" + command + R"(" came before "connect")");
}

Status RingSession::all_reduce(const RingPlan& plan, RingKernel* kernel) {
  // Passes without progress between two looks at the clock, so that the busy loop makes no clock call per pass.
  constexpr int kPassesPerClockLook = 1024;
  schedule_->begin(plan, kernel);
  int idle_passes = 0;
  std::int64_t idle_since = 0;
  while (!schedule_->finished()) {
    bool progressed = false;
    BAGUA_NET_RETURN_IF_ERROR(schedule_->pass(&progressed));
    if (progressed) {
      idle_passes = 0;
      idle_since = 0;
      continue;
    }
    // NCCL's progress thread: it gives the CPU away after a pass in which nothing moved.
    sched_yield();
    if (++idle_passes < kPassesPerClockLook) continue;
    idle_passes = 0;
    const std::int64_t now = monotonic_ms();
    if (idle_since == 0) idle_since = now;
    if (now - idle_since > options_.timeout_ms) {
      return Status::remote_error("no message completed for " + std::to_string(options_.timeout_ms) + " ms at " +
                                  neighbours() + "; " + schedule_->describe() +
                                  ": see whether those ranks run the same command, or raise --timeout-ms");
    }
  }
  return Status::ok();
}

Status RingSession::run(const std::vector<std::string>& words) {
  BAGUA_NET_RETURN_IF_ERROR(require_connected("run"));
  BAGUA_NET_RETURN_IF_ERROR(expect_arguments(words, 3, "run BYTES ITERATIONS WARMUP"));
  std::int64_t bytes = 0;
  std::int64_t iterations = 0;
  std::int64_t warmup = 0;
  BAGUA_NET_RETURN_IF_ERROR(
      parse_integer("BYTES of run", words[1], 1, static_cast<std::int64_t>(kMaxBufferBytes), &bytes));
  BAGUA_NET_RETURN_IF_ERROR(parse_integer("ITERATIONS of run", words[2], 1, kMaxIterations, &iterations));
  BAGUA_NET_RETURN_IF_ERROR(parse_integer("WARMUP of run", words[3], 0, kMaxIterations, &warmup));

  const RingPlan plan(options_.geometry, static_cast<std::size_t>(bytes));
  std::vector<double> seconds(static_cast<std::size_t>(iterations), 0.0);
  for (std::int64_t i = 0; i < warmup; ++i) BAGUA_NET_RETURN_IF_ERROR(all_reduce(plan, nullptr));

  const ResourceUsage before = ResourceUsage::now();
  double began = monotonic_seconds();
  for (double& taken : seconds) {
    BAGUA_NET_RETURN_IF_ERROR(all_reduce(plan, nullptr));
    const double ended = monotonic_seconds();
    taken = ended - began;
    began = ended;
  }
  const ResourceUsage used = ResourceUsage::now().since(before);

  JsonLine line("result");
  line.add("bytes", bytes).add("iterations", iterations).add("seconds", seconds);
  used.add_to(&line);
  write_event(line);
  return Status::ok();
}

Status RingSession::verify(const std::vector<std::string>& words) {
  BAGUA_NET_RETURN_IF_ERROR(require_connected("verify"));
  BAGUA_NET_RETURN_IF_ERROR(expect_arguments(words, 1, "verify BYTES"));
  std::int64_t bytes = 0;
  BAGUA_NET_RETURN_IF_ERROR(
      parse_integer("BYTES of verify", words[1], 1, static_cast<std::int64_t>(kMaxBufferBytes), &bytes));

  const RingPlan plan(options_.geometry, static_cast<std::size_t>(bytes));
  AllReduceKernel kernel(plan, verify_round_++);
  BAGUA_NET_RETURN_IF_ERROR(kernel.allocate_result());
  BAGUA_NET_RETURN_IF_ERROR(all_reduce(plan, &kernel));
  const Pattern::Verdict verdict = kernel.check();

  JsonLine line("verified");
  line.add("bytes", bytes).add("wrong_elements", static_cast<std::int64_t>(verdict.wrong_elements));
  if (verdict.first_wrong) {
    line.add("first_wrong", static_cast<std::int64_t>(*verdict.first_wrong));
  } else {
    line.add_null("first_wrong");
  }
  write_event(line);
  return Status::ok();
}

Status RingSession::quit() {
  limit_closing_time();
  BAGUA_NET_RETURN_IF_ERROR(transport_->deregister_buffers());
  if (schedule_ != nullptr) schedule_->free_slots();
  BAGUA_NET_RETURN_IF_ERROR(transport_->close());
  write_event(JsonLine("bye"));
  return Status::ok();
}

}  // namespace

Status run_ring_mode(const std::vector<std::string>& words) {
  RingOptions options;
  Status status = parse_ring_options(words, &options);
  if (!status.is_ok()) {
    report_failure(status);
    return status;
  }
  RingSession session(options);
  status = session.start();
  if (status.is_ok()) status = session.serve();
  // Before the session's destructor, so that nobody waits for the news until everything is closed.
  if (!status.is_ok()) report_failure(status);
  return status;
}

}  // namespace bagua_net::bench
