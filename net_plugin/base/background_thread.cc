#include "base/background_thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <utility>

namespace bagua_net {

Status start_background_thread(const std::string& name, const cpu_set_t* affinity, std::function<void()> body,
                               std::thread* thread) {
  // A new thread inherits the signal mask that is set around its creation.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status status;
  try {
    *thread = std::thread(std::move(body));
  } catch (const std::system_error& error) {
    status = Status::system_error("starting thread " + name, error.code().value());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!status.is_ok()) return status;
  pthread_setname_np(thread->native_handle(), name.c_str());
  // Best effort: a mask that is empty or no longer fits the machine leaves the inherited one.
  if (affinity != nullptr) pthread_setaffinity_np(thread->native_handle(), sizeof *affinity, affinity);
  return Status::ok();
}

}  // namespace bagua_net
