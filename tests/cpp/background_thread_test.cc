// Starting a thread where there is no memory for it.
#include "base/background_thread.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include "support/check.h"

namespace {

// Of this process: the next allocation fails.
std::atomic<bool> out_of_memory{false};

}  // namespace

void* operator new(std::size_t bytes) {
  void* const memory = out_of_memory.load() ? nullptr : std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace bagua_net {
namespace {

bool is_blocked(int signal) {
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, nullptr, &now);
  return sigismember(&now, signal) == 1;
}

}  // namespace

TEST_CASE(the_creator_takes_its_signals_again) {
  std::thread thread;
  bool is_blocked_there = false;
  CHECK_OK(start_background_thread("here", nullptr, [&] { is_blocked_there = is_blocked(SIGINT); }, &thread));
  thread.join();
  CHECK(is_blocked_there);
  CHECK(!is_blocked(SIGINT));
}

TEST_CASE(the_creator_takes_its_signals_again_without_memory) {
  const std::function<void()> body = [] {};
  const std::string name = "nowhere";
  std::thread thread;
  out_of_memory = true;
  bool has_failed = false;
  try {
    has_failed = !start_background_thread(name, nullptr, body, &thread).is_ok();
  } catch (const std::bad_alloc&) {
    has_failed = true;
  }
  out_of_memory = false;
  CHECK(has_failed);
  CHECK(!thread.joinable());
  CHECK(!is_blocked(SIGINT));
}

}  // namespace bagua_net

CHECK_MAIN
