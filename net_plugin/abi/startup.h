// Brings the transport up from the environment: settings, interfaces, devices, and what the user is told about them.
// Called under the process instance's lock.
#pragma once

#include <memory>
#include <string>

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

}  // namespace bagua_net::abi
