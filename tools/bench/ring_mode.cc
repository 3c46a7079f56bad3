// Ring mode: this process is one rank of a ring all-reduce over one transport, commanded over stdin.
#include <sched.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <memory>
#include <thread>

#include "base/monotonic_clock.h"
#include "bench/driver_protocol.h"
#include "bench/modes.h"
#include "bench/ring_schedule.h"

namespace bagua_net::bench {
namespace {

constexpr std::int64_t kMaxIterations = 1'000'000;
// Idle passes between two looks at the clock, so that the busy loop makes no clock call per pass. Few, because giving
// the CPU away takes milliseconds where others want it, and the deadline is to hold there, too.
constexpr int kPassesPerClockLook = 16;
// In a long stall, and where a message takes so long in any case, each of these looks leaves the CPU to others.
constexpr std::int64_t kSleepAfterMs = 100;
constexpr useconds_t kSleepUs = 5000;

std::string to_hex(const RingTransport::Handle& handle) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : handle) text += {kDigits[byte >> 4], kDigits[byte & 15]};
  return text;
}

RingTransport::Handle from_hex(const std::string& text) {
  RingTransport::Handle handle(text.size() / 2);
  const char* next = text.data();
  for (std::uint8_t& byte : handle) {
    const auto [stop, error] = std::from_chars(next, next + 2, byte, 16);
    next += 2;
    if (error != std::errc() || stop != next) throw Failure("handle \"" + text + "\" is not hexadecimal");
  }
  return handle;
}

RingGeometry geometry_of(const Options& options) {
  RingGeometry geometry;
  geometry.nranks = static_cast<int>(options.integer("--nranks", 2, kMaxRanks));
  geometry.rank = static_cast<int>(options.integer("--rank", 0, geometry.nranks - 1));
  geometry.channels = static_cast<int>(options.integer("--channels", 1, kMaxChannels, geometry.channels));
  geometry.depth = static_cast<int>(options.integer("--depth", 1, kMaxDepth, geometry.depth));
  const auto slice = static_cast<std::int64_t>(geometry.slice_bytes);
  const std::int64_t bytes = options.integer("--slice-bytes", 16, kMaxSliceBytes, slice);
  if (bytes % 16 != 0) {
    throw Failure("--slice-bytes is " + std::to_string(bytes) +
                  ", but must be a multiple of 16, so that no slice cuts an element");
  }
  geometry.slice_bytes = static_cast<std::size_t>(bytes);
  return geometry;
}

std::unique_ptr<RingTransport> transport_of(const Options& options, int channels) {
  const std::string name = options.text("--transport");
  if (name == "bare") return make_bare_transport(options.text("--address", "127.0.0.1"), channels);
  if (name != "plugin") throw Failure("--transport is \"" + name + "\", but must be plugin or bare");
  const std::string device = options.text("--device", "0");
  const auto number = device == "all" ? -1 : parse_integer("--device (if not all)", device, 0, 65535);
  return make_plugin_transport(options.text("--library"), static_cast<int>(number), channels);
}

class RingSession {
 public:
  explicit RingSession(const Options& options)
      : geometry_(geometry_of(options)), timeout_ms_(options.integer("--timeout-ms", 100, 3'600'000, 60000)) {}
  RingSession(const RingSession&) = delete;
  RingSession& operator=(const RingSession&) = delete;
  ~RingSession() {
    quietly([this] { close(); });
  }

  void serve(const Options& options) {
    transport_ = transport_of(options, geometry_.channels);
    std::vector<std::string> handles;
    for (const RingTransport::Handle& handle : transport_->listen()) handles.push_back(to_hex(handle));
    JsonLine("listening")
        .add("handles", handles)
        .add("table", transport_->table_name())
        .add("net_name", transport_->net_name())
        .add("devices", transport_->device_names())
        .send();
    bench::serve({{"connect HANDLE ...", [this](const Words& words) { connect(words); }},
                  {"run BYTES ITERATIONS WARMUP", [this](const Words& words) { run(words); }},
                  {"verify BYTES", [this](const Words& words) { verify(words); }}},
                 [this] { close(); });
  }

 private:
  // The slots may go only when the transport has let go of them.
  void close() {
    if (transport_ == nullptr) return;
    transport_->deregister_buffers();
    schedule_.reset();
    transport_->close();
  }

  // Until every channel is connected both ways. Both directions at once, as NCCL: a rank that waits for one before it
  // starts the other would stop the ring.
  void connect(const Words& words) {
    const auto channels = static_cast<std::size_t>(geometry_.channels);
    if (schedule_ != nullptr || words.size() != channels + 1) {
      throw Failure("connect has " + std::to_string(words.size() - 1) +
                    " handles, but comes once, with one for each of " + std::to_string(channels) + " channels");
    }
    std::vector<RingTransport::Handle> handles;
    for (std::size_t i = 0; i < channels; ++i) handles.push_back(from_hex(words[i + 1]));
    std::vector<bool> connected(channels, false);
    std::vector<bool> accepted(channels, false);
    for (const std::int64_t deadline = monotonic_ms() + timeout_ms_;;) {
      std::string missing;
      for (std::size_t i = 0; i < channels; ++i) {
        const auto channel = static_cast<int>(i);
        connected[i] = connected[i] || transport_->connect(channel, &handles[i]);
        accepted[i] = accepted[i] || transport_->accept(channel);
        if (!connected[i]) missing += " send " + std::to_string(i);
        if (!accepted[i]) missing += " receive " + std::to_string(i);
      }
      if (missing.empty()) break;
      if (monotonic_ms() > deadline) {
        throw Failure("the ring is not connected after " + std::to_string(timeout_ms_) + " ms at " + neighbours() +
                      "; missing channels:" + missing +
                      ": see whether those ranks run and their addresses can be reached, or raise --timeout-ms");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    schedule_ = std::make_unique<RingSchedule>(transport_.get(), geometry_);
    schedule_->allocate_slots();
    JsonLine("connected").send();
  }

  void run(const Words& words) {
    const RingPlan plan = plan_of(words);
    std::vector<double> seconds(static_cast<std::size_t>(parse_integer("ITERATIONS", words[2], 1, kMaxIterations)));
    const std::int64_t warmup = parse_integer("WARMUP", words[3], 0, kMaxIterations);
    for (std::int64_t i = 0; i < warmup; ++i) all_reduce(plan, nullptr);

    const double cpu_before = cpu_seconds();
    double began = monotonic_seconds();
    for (double& taken : seconds) {
      all_reduce(plan, nullptr);
      const double ended = monotonic_seconds();
      taken = ended - began;
      began = ended;
    }
    const double cpu = cpu_seconds() - cpu_before;
    JsonLine("result").add("bytes", plan.buffer_bytes()).add("seconds", seconds).add("cpu_s", cpu).send();
  }

  void verify(const Words& words) {
    const RingPlan plan = plan_of(words);
    AllReduceKernel kernel(plan, verify_round_++);
    all_reduce(plan, &kernel);
    const Pattern::Verdict verdict = kernel.check();
    JsonLine("verified")
        .add("bytes", plan.buffer_bytes())
        .add("wrong_elements", verdict.wrong_elements)
        .add("first_wrong", verdict.first_wrong)
        .send();
  }

  RingPlan plan_of(const Words& words) const {
    if (schedule_ == nullptr) throw Failure("command \"" + words[0] + R"(" came before "connect")");
    return {geometry_, static_cast<std::size_t>(parse_integer("BYTES", words[1], 1, kMaxBufferBytes))};
  }

  // One all-reduce, from begin to the last completion.
  void all_reduce(const RingPlan& plan, AllReduceKernel* kernel) {
    schedule_->begin(plan, kernel);
    std::int64_t idle_since_ms = 0;
    for (int idle_passes = 0; !schedule_->finished();) {
      if (schedule_->pass()) {
        idle_passes = 0;
        idle_since_ms = 0;
        continue;
      }
      // NCCL's progress thread: it gives the CPU away after a pass in which nothing moved.
      sched_yield();
      if (++idle_passes % kPassesPerClockLook != 0) continue;
      const std::int64_t now = monotonic_ms();
      if (idle_since_ms == 0) idle_since_ms = now;
      if (now - idle_since_ms > kSleepAfterMs) ::usleep(kSleepUs);
      if (now - idle_since_ms > timeout_ms_) {
        throw Failure("no message completed for " + std::to_string(timeout_ms_) + " ms at " + neighbours() + "; " +
                      schedule_->describe() +
                      ": see whether the other ranks run the same command, or raise --timeout-ms");
      }
    }
  }

  std::string neighbours() const {
    const int nranks = geometry_.nranks;
    const int rank = geometry_.rank;
    return "rank " + std::to_string(rank) + " (receives from rank " + std::to_string((rank + nranks - 1) % nranks) +
           ", sends to rank " + std::to_string((rank + 1) % nranks) + ")";
  }

  const RingGeometry geometry_;
  const std::int64_t timeout_ms_;
  std::unique_ptr<RingTransport> transport_;
  std::unique_ptr<RingSchedule> schedule_;  // exists once connected
  std::uint64_t verify_round_ = 0;          // the same on all ranks: every round has data of its own
};

}  // namespace

void run_ring_mode(const Words& words) {
  const Options options(words, {"--transport", "--library", "--device", "--address", "--rank", "--nranks", "--channels",
                                "--slice-bytes", "--depth", "--timeout-ms"});
  RingSession session(options);
  reported([&] { session.serve(options); });
}

}  // namespace bagua_net::bench
