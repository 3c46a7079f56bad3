// Brings the transport up from the environment: settings, interfaces, devices, and what the user is told about them.
// Called under the process instance's lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <variant>
#include <vector>

#include "abi/profiler.h"
#include "base/mutex.h"
#include "base/status.h"
#include "config/plugin_config.h"
#include "transport/transport_context.h"

namespace bagua_net::abi {

// What became of it; exactly one of the four.
struct Startup {
  enum class Outcome {
    kStarted,   // `transport` is there
    kDeclined,  // switched off by the user: init fails without a warning, NCCL takes its own transport
    kFailed,    // `failure` says why: init fails, NCCL takes its own transport
    kRefusing,  // as kFailed, but the job must not go on without us: init succeeds, connections fail with `failure`
  };
  Outcome outcome = Outcome::kFailed;
  std::unique_ptr<TransportContext> transport;
  Status failure;
  std::string summary;    // kStarted: interfaces and settings, for the "active" line
  bool demanded = false;  // the job must not go on without us
};

// [Note: BAGUA_NET_REQUIRED]
// NCCL treats a plugin whose init fails as absent: it takes the next transport and logs the fact at INFO only. A job
// that asked for Bagua-Net then runs, slowly, without it. BAGUA_NET_REQUIRED=1 forbids that, and so do
// BAGUA_NET_ENCRYPTION and BAGUA_NET_SECRET_FILE, because NCCL's own transport has neither. In one of two ways:
// - NCCL_NET=BaguaNet is set too (Python's activation sets it with BAGUA_NET_REQUIRED=1). Every version of NCCL that
//   we serve then accepts no other transport, so a failing init makes ncclCommInit return InvalidUsage, and our WARN is
//   the text of it. We fail init.
// - NCCL_NET is not set. Nothing that init returns stops NCCL from falling back, nor does devices() = 0 or a failing
//   getProperties(0): all of these mean "next candidate". Only from listen and connect on does a code reach the
//   application. So init succeeds, one placeholder device is shown, and every listen and connect fails with the reason:
//   ncclCommInit fails, or with lazy connections (2.22+) the first collective. Communicators that need no network work.
// The case that the library is not found at all cannot be seen from inside it: NCCL_NET=BaguaNet covers that one.
//
// trace: where the transport records what it does; nullptr: nowhere.
Startup start_transport(const EnvironmentReader& environment, const std::shared_ptr<Trace>& trace = nullptr);

// What BAGUA_NET_TRACE asks for; nullptr: nothing, or it cannot be had, which one warning says.
std::shared_ptr<Trace> start_trace(const EnvironmentReader& environment);

// What NCCL holds of a comm or a request: its address, with the epoch of its transport in the 16 bits that addresses of
// Linux processes leave free. So a pointer that outlived its transport is recognised without being followed, by a
// comparison.

constexpr int kAddressBits = 48;

// Never 0: that is the tag of no transport.
constexpr std::uint64_t epoch_tag(std::uint64_t epoch) { return epoch == 0 ? 0 : epoch % 0xffff + 1; }

inline void* handle_of(const void* object, std::uint64_t epoch) {
  const std::uint64_t tagged = reinterpret_cast<std::uint64_t>(object) | epoch_tag(epoch) << kAddressBits;
  return reinterpret_cast<void*>(tagged);  // NOLINT(performance-no-int-to-ptr): NCCL gives it back, and no more
}

// Whatever its epoch is.
template <typename T>
T* address_in(void* handle) {
  constexpr std::uint64_t kMask = (std::uint64_t{1} << kAddressBits) - 1;
  const std::uint64_t address = reinterpret_cast<std::uint64_t>(handle) & kMask;
  return reinterpret_cast<T*>(address);  // NOLINT(performance-no-int-to-ptr): what handle_of was given
}

inline bool is_of_epoch(void* handle, std::uint64_t epoch) {
  return epoch != 0 && reinterpret_cast<std::uint64_t>(handle) >> kAddressBits == epoch_tag(epoch);
}

// ProcessInstance: the one mutable global of the plugin. It owns the transport between the first init and the last
// finalize, and every object that NCCL holds a handle of, so that a stale one is an error and not a crash.
//
// Threads: init and finalize come under an NCCL mutex, but several copies of NCCL may live in a process, so one mutex
// serialises them here. All else comes from any thread, several at once.
//
// Life time: created on first use, never destroyed. Destroying it at exit would race with NCCL's threads, which nobody
// joins then, and would join threads that a forked child does not have.
//
// Fork: a child has none of the parent's threads, and closes its copies of the parent's sockets (base/owned_fd.h).
// Its first call finds no instance: the parent's is abandoned in memory, untouched, and init starts afresh.

// One communicator of NCCL's (v11+): what init hands out and finalize takes back.
struct Communicator {
  std::uint64_t id;  // NCCL's commId
  nccl::ProfilerCallback* profiler_callback;
};

using AnyComm = std::variant<ListenComm*, SendComm*, RecvComm*>;

// What NCCL holds as a listenComm, sendComm or recvComm, by a handle.
struct OpenComm {
  std::uint64_t epoch;  // the transport that it belongs to; stale after the last finalize and in a forked child
  TransportContext* transport;
  AnyComm comm;
  const Communicator* owner;  // nullptr before v11
};

class ProcessInstance {
 public:
  static ProcessInstance& get();

  // Idempotent. `communicator` is nullptr for tables without finalize (before v11): then the transport stays up for
  // good, because nothing says when its last user is gone.
  // callback: asks this NCCL what a message belongs to; nullptr before v10.
  Status init(int table_version, std::uint64_t communicator_id, nccl::ProfilerCallback* callback,
              Communicator** communicator, bool* declined);
  // Closes whatever the communicator left open and, after the last one, the transport. Harmless for nullptr, for a
  // communicator whose init failed, and for one that was finalized before or by a parent process.
  void finalize(Communicator* communicator);

  // The transport, or why there is none.
  Status transport(TransportContext** transport);
  // The devices shown to NCCL: the transport's, or the placeholder of a plugin that refuses to work.
  Status devices(DeviceList** devices);

  // What records NCCL's own events in the trace of BAGUA_NET_TRACE; nullptr: there is none. Started by NCCL's profiler.
  Profiler* start_profiler();
  Profiler* profiler() const { return profiler_.load(std::memory_order_acquire); }
  // How NCCL is asked what a message belongs to, of a comm of that owner.
  nccl::ProfilerCallback* profiler_callback(const Communicator* owner) const {
    return owner != nullptr ? owner->profiler_callback : profiler_callback_.load(std::memory_order_acquire);
  }

  // What NCCL is given.
  void* add_comm(TransportContext* transport, AnyComm comm, const Communicator* owner);
  // For calls off the hot path: an error for a pointer that was closed or belongs to the parent process.
  Status find_comm(void* comm, OpenComm** open);
  // Harmless for nullptr and for what was closed before.
  void close(void* comm);

  // The same text indefinitely: NCCL keeps names and paths beyond every finalize.
  char* interned(const std::string& text);

 private:
  ProcessInstance();
  void open_trace() REQUIRES(mutex_);  // once
  Status startup_failure() const REQUIRES(mutex_);
  static void close_in_transport(const OpenComm& open);
  using OpenComms = std::unordered_map<OpenComm*, std::unique_ptr<OpenComm>>;
  OpenComms::iterator entry_of(void* comm) REQUIRES(comms_mutex_);

  Mutex mutex_;  // held while threads are started and joined
  std::unordered_map<Communicator*, std::unique_ptr<Communicator>> communicators_ GUARDED_BY(mutex_);
  bool has_user_without_finalize_ GUARDED_BY(mutex_) = false;
  bool announced_ GUARDED_BY(mutex_) = false;
  std::unique_ptr<TransportContext> transport_ GUARDED_BY(mutex_);
  bool asked_for_trace_ GUARDED_BY(mutex_) = false;
  std::shared_ptr<Trace> trace_ GUARDED_BY(mutex_);  // nullptr: none
  std::unique_ptr<Profiler> owned_profiler_ GUARDED_BY(mutex_);
  std::atomic<nccl::ProfilerCallback*> profiler_callback_{nullptr};  // of tables without owners
  std::atomic<Profiler*> profiler_{nullptr};                         // the same, for all threads
  Status refusal_ GUARDED_BY(mutex_);           // not ok: connections fail with it, see [Note: BAGUA_NET_REQUIRED]
  DeviceList placeholder_devices_;              // shown while refusal_ is set
  DeviceList::Joins joins_ GUARDED_BY(mutex_);  // of the transport before
  std::unordered_set<std::string> interned_ GUARDED_BY(mutex_);  // node based: text stays where it is

  Mutex comms_mutex_;
  OpenComms comms_ GUARDED_BY(comms_mutex_);
};

// The transport that is up now; 0 = none. An isend compares its comm's with it, so that it never touches a transport of
// the parent process or one that was finalized. Acquire/release: whoever sees the number sees that transport.
extern std::atomic<std::uint64_t> current_epoch;

}  // namespace bagua_net::abi
