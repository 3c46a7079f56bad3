#include "bench/ring_mode.h"

#include <memory>
#include <utility>

#include "bench/all_reduce_kernel.h"
#include "bench/channel_connection.h"
#include "bench/command_line.h"
#include "bench/driver_protocol.h"
#include "bench/resource_meter.h"
#include "bench/ring_options.h"
#include "bench/ring_schedule.h"
#include "bench/stall_watch.h"

namespace bagua_net::bench {
namespace {

constexpr std::int64_t kMaxIterations = 1'000'000;

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
  BAGUA_NET_RETURN_IF_ERROR(open_transport(options_.transport, options_.geometry.channels, &transport_));
  JsonLine line("listening");
  BAGUA_NET_RETURN_IF_ERROR(listen_on_channels(options_.transport.name, transport_.get(), &line));
  write_event(line);
  return Status::ok();
}

Status RingSession::serve() {
  BAGUA_NET_RETURN_IF_ERROR(
      serve_commands("ring", {{"connect", [this](const std::vector<std::string>& words) { return connect(words); }},
                              {"run", [this](const std::vector<std::string>& words) { return run(words); }},
                              {"verify", [this](const std::vector<std::string>& words) { return verify(words); }}}));
  return quit();
}

Status RingSession::connect(const std::vector<std::string>& words) {
  if (schedule_ != nullptr) return Status::invalid_usage("command \"connect\" came twice: the ring is connected");
  BAGUA_NET_RETURN_IF_ERROR(
      connect_channels(words, options_.geometry.channels, options_.timeout_ms, neighbours(), transport_.get()));
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
  schedule_->begin(plan, kernel);
  return pass_until_finished(schedule_.get(), options_.timeout_ms, neighbours());
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
  return run_mode<RingSession, RingOptions>(words, &parse_ring_options);
}

}  // namespace bagua_net::bench
