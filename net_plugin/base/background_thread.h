// Starting a thread of ours inside somebody else's process: no signal of theirs is delivered to it, it has a name that
// top and gdb show, and it runs on the CPUs that we say, not on those its creator happens to be bound to.
#pragma once

#include <sched.h>

#include <functional>
#include <string>
#include <thread>

#include "base/status.h"

namespace bagua_net {

// affinity == nullptr: the creator's CPUs. name: at most 15 characters.
// on_failure: what the body throws, as when there is no memory, ends the thread and not the process. It is told why, in
// that thread, and has to fail whatever waits for it. An exception of its own is dropped. Without it, nothing is
// caught.
Status start_background_thread(const std::string& name, const cpu_set_t* affinity, std::function<void()> body,
                               std::thread* thread, std::function<void(const Status&)> on_failure = nullptr);

}  // namespace bagua_net
