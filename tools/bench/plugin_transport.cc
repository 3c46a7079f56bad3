// A RingTransport over the network table of a dlopened plugin, used exactly as NCCL's proxy uses it: one connection per
// comm, memory registered per comm, receives of one buffer, a NULL comm or request tried again.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "abi/net_types.h"
#include "bench/driver_protocol.h"
#include "bench/ring_transport.h"

namespace bagua_net::bench {
namespace {

constexpr char kTable[] = "v12";
constexpr char kTableSymbol[] = "ncclNetPlugin_v12";
constexpr std::uint64_t kCommId = 1;
constexpr int kTag = 0;  // tags tell the buffers of one grouped receive apart; groups here have one

// The logger that the plugin gets prints in the manner of NCCL's log to stderr, as far as BAGUA_DRIVER_LOG asks for it,
// and keeps the last warning: the table returns a number only, and the reason behind it is in that warning. Any thread
// may log. One per process, because NCCL's logger is a plain function without a context.
struct LogState {
  nccl::LogLevel shown = nccl::LogLevel::kNone;  // set before the plugin is opened
  std::mutex mutex;                              // guards last_warning
  std::string last_warning;
};

LogState& log_state() {
  static LogState state;
  return state;
}

// NOLINTNEXTLINE(modernize-avoid-variadic-functions): NCCL's type of a logger
void write_log(nccl::LogLevel level, unsigned long /*flags*/, const char* file, int line, const char* format, ...) {
  char message[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  LogState& state = log_state();
  const bool is_warning = level == nccl::LogLevel::kWarn;
  if (is_warning) {
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.last_warning = message;
  }
  if (static_cast<int>(level) > static_cast<int>(state.shown)) return;
  const std::string where = is_warning ? std::string("WARN ") + file + ":" + std::to_string(line) : "INFO";
  std::fprintf(stderr, "bagua-net-driver:%d %s %s\n", static_cast<int>(getpid()), where.c_str(), message);
}

void configure_log() {
  const char* value = std::getenv("BAGUA_DRIVER_LOG");
  const std::string level = value == nullptr ? "" : value;
  if (level == "warn") {
    log_state().shown = nccl::LogLevel::kWarn;
  } else if (level == "info") {
    log_state().shown = nccl::LogLevel::kInfo;
  } else if (!level.empty()) {
    throw Failure("BAGUA_DRIVER_LOG is \"" + level + "\", but must be warn, info or empty");
  }
}

// No profiler listens; NCCL passes a callback all the same.
nccl::Result ignore_profiler_event(void**, int, void*, std::int64_t, void*) { return nccl::Result::kSuccess; }

const char* meaning_of(nccl::Result result) {
  switch (result) {
    case nccl::Result::kSuccess: return "success";
    case nccl::Result::kUnhandledCudaError: return "unhandled CUDA error";
    case nccl::Result::kSystemError: return "system error";
    case nccl::Result::kInternalError: return "internal error";
    case nccl::Result::kInvalidArgument: return "invalid argument";
    case nccl::Result::kInvalidUsage: return "invalid usage";
    case nccl::Result::kRemoteError: return "remote error";
    case nccl::Result::kInProgress: return "in progress, which a plugin must not return";
    case nccl::Result::kTimeout: return "timeout";
  }
  return "an unknown code";
}

const nccl::NetTableV12& table_of(void* library, const std::string& path) {
  if (library == nullptr) {
    const char* reason = dlerror();
    throw Failure("cannot open the plugin library \"" + path +
                  "\": " + (reason == nullptr ? "unknown reason" : reason) +
                  "; give --library the path of libnccl-net.so (`bagua-net doctor` shows it)");
  }
  if (const void* table = dlsym(library, kTableSymbol)) return *static_cast<const nccl::NetTableV12*>(table);
  throw Failure("the library \"" + path + "\" has no " + kTableSymbol +
                ": it is not an NCCL network plugin that this driver knows");
}

class PluginTransport final : public RingTransport {
 public:
  PluginTransport(const std::string& path, int channels)
      : library_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)),  // as NCCL opens it
        table_(table_of(library_, path)),
        channels_(static_cast<std::size_t>(channels)) {}
  PluginTransport(const PluginTransport&) = delete;
  PluginTransport& operator=(const PluginTransport&) = delete;
  ~PluginTransport() override {
    quietly([this] { PluginTransport::close(); });
    dlclose(library_);
  }

  void start(int device) {
    nccl::NetCommConfig config{nccl::kUndefined};
    check(table_.init(&context_, kCommId, &config, &write_log, &ignore_profiler_event), "init");
    is_initialised_ = true;
    int count = 0;
    check(table_.devices(&count), "devices");
    if (device >= count) {
      throw Failure("--device is " + std::to_string(device) + ", but " + table_.name + " has " + std::to_string(count) +
                    " devices, numbered from 0");
    }
    for (int number = 0; number < count; ++number) {
      nccl::NetPropertiesV12 properties;
      std::memset(&properties, 0xff, sizeof properties);  // NCCL's is uninitialised
      check(table_.getProperties(number, &properties), "getProperties");
      device_names_.emplace_back(properties.name);
    }
    for (int index = 0; static_cast<std::size_t>(index) < channels_.size(); ++index) {
      channel_at(index).device = device < 0 ? index % count : device;
    }
    // Warnings of a start that went well say nothing about later failures.
    const std::lock_guard<std::mutex> lock(log_state().mutex);
    log_state().last_warning.clear();
  }

  std::string net_name() const override { return table_.name; }
  std::optional<std::string> table_name() const override { return kTable; }
  std::vector<std::string> device_names() const override { return device_names_; }

  std::vector<Handle> listen() override {
    std::vector<Handle> handles;
    for (Channel& channel : channels_) {
      handles.emplace_back(nccl::kNetHandleMaxBytes);
      check(table_.listen(context_, channel.device, handles.back().data(), &channel.listen_comm), "listen");
      if (channel.listen_comm == nullptr) throw Failure("listen succeeded without a listen comm");
    }
    return handles;
  }

  bool connect(int index, Handle* next_rank) override {
    Channel& channel = channel_at(index);
    if (next_rank->size() != nccl::kNetHandleMaxBytes) {
      throw Failure("the handle of channel " + std::to_string(index) + " has " + std::to_string(next_rank->size()) +
                    " bytes instead of " + std::to_string(nccl::kNetHandleMaxBytes) +
                    ": it is not one that a plugin rank printed");
    }
    nccl::NetDeviceHandle* offload = nullptr;
    check(table_.connect(context_, channel.device, next_rank->data(), &channel.send.comm, &offload), "connect");
    return channel.send.comm != nullptr;
  }

  bool accept(int index) override {
    Channel& channel = channel_at(index);
    nccl::NetDeviceHandle* offload = nullptr;
    check(table_.accept(channel.listen_comm, &channel.receive.comm, &offload), "accept");
    if (channel.receive.comm == nullptr) return false;
    // One listen comm is one connection: NCCL closes it here.
    check(table_.closeListen(std::exchange(channel.listen_comm, nullptr)), "closeListen");
    return true;
  }

  void register_buffer(int index, void* data, std::size_t bytes) override {
    for (Side* side : {&channel_at(index).send, &channel_at(index).receive}) {
      check(table_.regMr(side->comm, data, bytes, nccl::kPointerHost, &side->registration), "regMr");
      side->is_registered = true;
    }
  }

  void* isend(int index, const void* data, std::size_t bytes) override {
    const Side& side = channel_at(index).send;
    void* request = nullptr;
    check(table_.isend(side.comm, const_cast<void*>(data), bytes, kTag, side.registration, nullptr, &request), "isend");
    return request;
  }

  void* irecv(int index, void* data, std::size_t bytes) override {
    Side& side = channel_at(index).receive;
    int tag = kTag;
    void* profiler_handle = nullptr;
    void* request = nullptr;
    check(table_.irecv(side.comm, 1, &data, &bytes, &tag, &side.registration, &profiler_handle, &request), "irecv");
    return request;
  }

  std::optional<std::size_t> test(void* request) override {
    int is_done = 0;
    int size = 0;
    check(table_.test(request, &is_done, &size), "test");
    if (is_done == 0) return {};
    return static_cast<std::size_t>(size);
  }

  void deregister_buffers() override {
    for (Channel& channel : channels_) {
      for (Side* side : {&channel.send, &channel.receive}) {
        if (std::exchange(side->is_registered, false)) check(table_.deregMr(side->comm, side->registration), "deregMr");
      }
    }
  }

  void close() override {
    const auto closed = [this](void** comm, nccl::CloseV5* call, const char* name) {
      if (void* open = std::exchange(*comm, nullptr)) check(call(open), name);
    };
    for (Channel& channel : channels_) {
      closed(&channel.send.comm, table_.closeSend, "closeSend");
      closed(&channel.receive.comm, table_.closeRecv, "closeRecv");
      closed(&channel.listen_comm, table_.closeListen, "closeListen");
    }
    if (std::exchange(is_initialised_, false)) check(table_.finalize(context_), "finalize");
  }

 private:
  struct Side {
    void* comm = nullptr;
    void* registration = nullptr;
    bool is_registered = false;  // a plugin may use NULL as a registration
  };
  struct Channel {
    int device = 0;
    void* listen_comm = nullptr;
    Side send, receive;
  };

  Channel& channel_at(int channel) { return channels_[static_cast<std::size_t>(channel)]; }

  // Which call, NCCL's name of the code, and the plugin's last warning.
  void check(nccl::Result result, const char* call) const {
    if (result == nccl::Result::kSuccess) return;
    const std::lock_guard<std::mutex> lock(log_state().mutex);
    const std::string& warning = log_state().last_warning;
    throw Failure(std::string(call) + " of " + table_.name + " (table " + kTable + ") returned " +
                  std::to_string(static_cast<int>(result)) + " (" + meaning_of(result) + ")" +
                  (warning.empty() ? "; run with BAGUA_DRIVER_LOG=info for its log" : ": " + warning));
  }

  void* const library_;
  const nccl::NetTableV12& table_;
  void* context_ = nullptr;
  bool is_initialised_ = false;
  std::vector<std::string> device_names_;
  std::vector<Channel> channels_;
};

}  // namespace

std::unique_ptr<RingTransport> make_plugin_transport(const std::string& library, int device, int channels) {
  configure_log();
  auto transport = std::make_unique<PluginTransport>(library, channels);
  transport->start(device);
  return transport;
}

}  // namespace bagua_net::bench
