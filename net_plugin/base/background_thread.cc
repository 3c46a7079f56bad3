#include "base/background_thread.h"

#include <pthread.h>
#include <signal.h>

#include <cerrno>
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

}  // namespace

Status start_background_thread(const std::string& name, const cpu_set_t* affinity, std::function<void()> body,
                               std::thread* thread) {
  try {
    const SignalsBlocked blocked;
    *thread = std::thread(std::move(body));
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
