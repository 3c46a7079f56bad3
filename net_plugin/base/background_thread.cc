#include "base/background_thread.h"

#include <pthread.h>
#include <signal.h>

#include <cerrno>
#include <exception>
#include <new>
#include <system_error>
#include <utility>

namespace bagua_net {
namespace {

// A new thread inherits the signal mask that is set around its creation. The creator's own is restored in any case:
// there may be no memory for the thread.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// no_memory: made beforehand.
void run_guarded(const std::string& name, const Status& no_memory, const std::function<void()>& body,
                 const std::function<void(const Status&)>& on_failure) noexcept {
  if (on_failure == nullptr) return body();
  try {
    try {
      body();
    } catch (const std::bad_alloc&) {
      on_failure(no_memory);
    } catch (const std::exception& error) {
      on_failure(Status::internal_error("thread " + name + ": unexpected exception: " + error.what()));
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): no memory to tell anybody
  }
}

}  // namespace

Status start_background_thread(const std::string& name, const cpu_set_t* affinity, std::function<void()> body,
                               std::thread* thread, std::function<void(const Status&)> on_failure) {
  try {
    const SignalsBlocked blocked;
    *thread = std::thread(run_guarded, name, Status::system_error("thread " + name, ENOMEM), std::move(body),
                          std::move(on_failure));
  } catch (const std::system_error& error) {
    return Status::system_error("starting thread " + name, error.code().value());
  } catch (const std::bad_alloc&) {
    return Status::system_error("starting thread " + name, ENOMEM);
  }
  pthread_setname_np(thread->native_handle(), name.c_str());
  // Best effort: a mask that is empty or no longer fits the machine leaves the inherited one.
  if (affinity != nullptr) pthread_setaffinity_np(thread->native_handle(), sizeof *affinity, affinity);
  return Status::ok();
}

}  // namespace bagua_net
