// Between two looks at what a test waits for. What takes long is looked at less often: other tests need the CPU.
#pragma once

#include <sched.h>

#include <chrono>
#include <thread>

class Pause {
 public:
  void operator()() {
    if (std::chrono::steady_clock::now() - began_ < std::chrono::milliseconds(2)) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  // Something has come.
  void begin_again() { began_ = std::chrono::steady_clock::now(); }

 private:
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};
