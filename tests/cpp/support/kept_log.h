// KeptLog: what is logged as long as it lives. One at a time.
#pragma once

#include <string>

#include "base/log_sink.h"
#include "base/mutex.h"

namespace bagua_net {

class KeptLog {
 public:
  KeptLog() {
    clear();
    set_log_function(&keep);
  }
  ~KeptLog() { set_log_function(nullptr); }
  KeptLog(const KeptLog&) = delete;
  KeptLog& operator=(const KeptLog&) = delete;

  // All lines so far.
  static std::string text() {
    const MutexLock lock(mutex_);
    return text_;
  }
  static bool has(const std::string& part) { return text().find(part) != std::string::npos; }

 private:
  static void keep(LogLevel, const char*, int, const char* message) {
    const MutexLock lock(mutex_);
    text_ += std::string(message) + "\n";
  }
  static void clear() {
    const MutexLock lock(mutex_);
    text_.clear();
  }

  inline static Mutex mutex_;
  inline static std::string text_ GUARDED_BY(mutex_);
};

}  // namespace bagua_net
