#include "bench/peers_mode.h"

#include <sys/resource.h>

#include <memory>
#include <optional>
#include <utility>

#include "bench/channel_connection.h"
#include "bench/command_line.h"
#include "bench/driver_protocol.h"
#include "bench/pattern.h"
#include "bench/process_footprint.h"
#include "bench/resource_meter.h"
#include "bench/rotating_traffic.h"
#include "bench/stall_watch.h"
#include "bench/transport_choice.h"

namespace bagua_net::bench {
namespace {

constexpr std::int64_t kMaxComms = 1024;
constexpr std::int64_t kMaxMessages = std::int64_t{1} << 32;
constexpr std::int64_t kMaxTimeoutMs = 3'600'000;

struct PeersOptions {
  TransportChoice transport;
  int rank = 0;
  int comms = 1;
  int in_flight = 8;
  std::int64_t max_message_bytes = std::int64_t{1} << 20;
  std::int64_t timeout_ms = 60000;
};

Status parse_peers_options(const std::vector<std::string>& words, PeersOptions* options) {
  std::vector<std::string> known = transport_option_names();
  known.insert(known.end(), {"--rank", "--comms", "--in-flight", "--max-message-bytes", "--timeout-ms"});
  CommandLine line;
  BAGUA_NET_RETURN_IF_ERROR(CommandLine::parse(words, known, &line));
  BAGUA_NET_RETURN_IF_ERROR(parse_transport_choice(line, &options->transport));
  std::int64_t number = 0;
  BAGUA_NET_RETURN_IF_ERROR(line.integer("--rank", 0, 1, &number));
  options->rank = static_cast<int>(number);
  BAGUA_NET_RETURN_IF_ERROR(line.integer("--comms", 1, kMaxComms, &number));
  options->comms = static_cast<int>(number);
  BAGUA_NET_RETURN_IF_ERROR(line.integer_or("--in-flight", 1, kMaxDepth, options->in_flight, &number));
  options->in_flight = static_cast<int>(number);
  BAGUA_NET_RETURN_IF_ERROR(line.integer_or("--max-message-bytes", 1, static_cast<std::int64_t>(kMaxSliceBytes),
                                            options->max_message_bytes, &options->max_message_bytes));
  return line.integer_or("--timeout-ms", 100, kMaxTimeoutMs, options->timeout_ms, &options->timeout_ms);
}

// Every message has data of its own, so one that is lost, repeated, cut, or left over from before is wrong somewhere.
class PatternAudit final : public MessageAudit {
 public:
  PatternAudit(int rank, std::uint64_t round) : rank_(static_cast<std::uint64_t>(rank)), round_(round) {}

  void fill(std::uint64_t number, std::uint8_t* data, std::size_t bytes) override {
    pattern(number, rank_, bytes).write(0, 0, bytes, data);
  }
  void check(std::uint64_t number, const std::uint8_t* data, std::size_t bytes) override {
    // The sum over one rank is that rank's data.
    const Pattern::Verdict verdict = pattern(number, 1 - rank_, bytes).check_sum(data, bytes);
    if (verdict.wrong_elements > 0 && !first_wrong_message_) first_wrong_message_ = number;
    wrong_elements_ += verdict.wrong_elements;
  }

  void add_to(JsonLine* line) const {
    line->add("wrong_elements", static_cast<std::int64_t>(wrong_elements_));
    if (first_wrong_message_) {
      line->add("first_wrong_message", static_cast<std::int64_t>(*first_wrong_message_));
    } else {
      line->add_null("first_wrong_message");
    }
  }

 private:
  Pattern pattern(std::uint64_t number, std::uint64_t sender, std::size_t bytes) const {
    const ElementType type = bytes % 4 == 0 ? ElementType::kFloat32 : ElementType::kUint8;
    return {type, 1, (round_ << 33) + 2 * number + sender};
  }

  const std::uint64_t rank_;
  const std::uint64_t round_;
  std::size_t wrong_elements_ = 0;
  std::optional<std::uint64_t> first_wrong_message_;
};

class PeersSession {
 public:
  explicit PeersSession(PeersOptions options) : options_(std::move(options)) {}
  ~PeersSession();

  Status start();
  Status serve();  // until quit

 private:
  Status connect(const std::vector<std::string>& words);
  Status run(const std::vector<std::string>& words);
  Status verify(const std::vector<std::string>& words);
  Status report_footprint(const std::vector<std::string>& words) const;
  Status quit();

  Status parse_traffic(const std::vector<std::string>& words, std::int64_t* bytes, std::int64_t* messages) const;
  Status exchange(std::int64_t bytes, std::int64_t messages, MessageAudit* audit);
  std::string neighbour() const;

  const PeersOptions options_;
  std::unique_ptr<RingTransport> transport_;
  std::unique_ptr<RotatingTraffic> traffic_;  // memory is there before the first comm; messages only once connected
  bool is_connected_ = false;
  std::uint64_t verify_round_ = 0;  // the same on both ranks
};

PeersSession::~PeersSession() {
  if (transport_ == nullptr) return;
  // After an error as well: the memory may go only when the transport has let go of it.
  static_cast<void>(transport_->deregister_buffers());
  traffic_.reset();
  static_cast<void>(transport_->close());
}

std::string PeersSession::neighbour() const {
  return "rank " + std::to_string(options_.rank) + " (its peer is rank " + std::to_string(1 - options_.rank) + ")";
}

// As NCCL does before it opens its connections.
void allow_all_descriptors() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

Status PeersSession::start() {
  allow_all_descriptors();
  BAGUA_NET_RETURN_IF_ERROR(open_transport(options_.transport, options_.comms, &transport_));
  traffic_ = std::make_unique<RotatingTraffic>(transport_.get(), options_.comms, options_.in_flight,
                                               static_cast<std::size_t>(options_.max_message_bytes));
  // Before the first comm, and with the driver's own memory touched: what is added later is the comms'.
  BAGUA_NET_RETURN_IF_ERROR(traffic_->allocate());
  ProcessFootprint before;
  BAGUA_NET_RETURN_IF_ERROR(ProcessFootprint::measure(&before));
  JsonLine line("listening");
  BAGUA_NET_RETURN_IF_ERROR(listen_on_channels(options_.transport.name, transport_.get(), &line));
  before.add_totals_to("before_", &line);
  write_event(line);
  return Status::ok();
}

Status PeersSession::serve() {
  BAGUA_NET_RETURN_IF_ERROR(serve_commands(
      "peers", {{"connect", [this](const std::vector<std::string>& words) { return connect(words); }},
                {"run", [this](const std::vector<std::string>& words) { return run(words); }},
                {"verify", [this](const std::vector<std::string>& words) { return verify(words); }},
                {"footprint", [this](const std::vector<std::string>& words) { return report_footprint(words); }}}));
  return quit();
}

Status PeersSession::connect(const std::vector<std::string>& words) {
  if (is_connected_) return Status::invalid_usage("command \"connect\" came twice: the comms are connected");
  BAGUA_NET_RETURN_IF_ERROR(
      connect_channels(words, options_.comms, options_.timeout_ms, neighbour(), transport_.get()));
  BAGUA_NET_RETURN_IF_ERROR(traffic_->register_memory());
  is_connected_ = true;
  write_event(JsonLine("connected"));
  return Status::ok();
}

Status PeersSession::parse_traffic(const std::vector<std::string>& words, std::int64_t* bytes,
                                   std::int64_t* messages) const {
  if (!is_connected_) return Status::invalid_usage("command \"" + words[0] + R"(" came before "connect")");
  BAGUA_NET_RETURN_IF_ERROR(parse_integer("BYTES of " + words[0], words[1], 1, options_.max_message_bytes, bytes));
  return parse_integer("MESSAGES of " + words[0], words[2], 1, kMaxMessages, messages);
}

Status PeersSession::exchange(std::int64_t bytes, std::int64_t messages, MessageAudit* audit) {
  traffic_->begin(static_cast<std::size_t>(bytes), static_cast<std::uint64_t>(messages), audit);
  return pass_until_finished(traffic_.get(), options_.timeout_ms, neighbour());
}

Status PeersSession::run(const std::vector<std::string>& words) {
  BAGUA_NET_RETURN_IF_ERROR(expect_arguments(words, 3, "run BYTES MESSAGES WARMUP"));
  std::int64_t bytes = 0;
  std::int64_t messages = 0;
  std::int64_t warmup = 0;
  BAGUA_NET_RETURN_IF_ERROR(parse_traffic(words, &bytes, &messages));
  BAGUA_NET_RETURN_IF_ERROR(parse_integer("WARMUP of run", words[3], 0, kMaxMessages, &warmup));
  if (warmup > 0) BAGUA_NET_RETURN_IF_ERROR(exchange(bytes, warmup, nullptr));

  const ResourceUsage before = ResourceUsage::now();
  const double began = monotonic_seconds();
  BAGUA_NET_RETURN_IF_ERROR(exchange(bytes, messages, nullptr));
  const double taken = monotonic_seconds() - began;
  const ResourceUsage used = ResourceUsage::now().since(before);

  JsonLine line("result");
  line.add("bytes", bytes).add("messages", messages).add("seconds", taken);
  used.add_to(&line);
  write_event(line);
  return Status::ok();
}

Status PeersSession::verify(const std::vector<std::string>& words) {
  BAGUA_NET_RETURN_IF_ERROR(expect_arguments(words, 2, "verify BYTES MESSAGES"));
  std::int64_t bytes = 0;
  std::int64_t messages = 0;
  BAGUA_NET_RETURN_IF_ERROR(parse_traffic(words, &bytes, &messages));
  PatternAudit audit(options_.rank, verify_round_++);
  BAGUA_NET_RETURN_IF_ERROR(exchange(bytes, messages, &audit));
  JsonLine line("verified");
  line.add("bytes", bytes).add("messages", messages);
  audit.add_to(&line);
  write_event(line);
  return Status::ok();
}

// Between two of these the main thread sleeps in the read of the next command, and whatever the other threads do is
// what idle comms cost.
Status PeersSession::report_footprint(const std::vector<std::string>& words) const {
  BAGUA_NET_RETURN_IF_ERROR(expect_arguments(words, 0, "footprint"));
  ProcessFootprint footprint;
  BAGUA_NET_RETURN_IF_ERROR(ProcessFootprint::measure(&footprint));
  JsonLine line("footprint");
  footprint.add_totals_to("", &line);
  footprint.add_threads_to(&line);
  write_event(line);
  return Status::ok();
}

Status PeersSession::quit() {
  limit_closing_time();
  BAGUA_NET_RETURN_IF_ERROR(transport_->deregister_buffers());
  traffic_->free_memory();
  BAGUA_NET_RETURN_IF_ERROR(transport_->close());
  write_event(JsonLine("bye"));
  return Status::ok();
}

}  // namespace

Status run_peers_mode(const std::vector<std::string>& words) {
  return run_mode<PeersSession, PeersOptions>(words, &parse_peers_options);
}

}  // namespace bagua_net::bench
