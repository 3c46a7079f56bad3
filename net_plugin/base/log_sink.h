// LogSink: where the core's messages go. `abi` installs NCCL's logger; without one (unit tests, the Python module)
// messages are dropped.
// Any thread may log. Nothing in the hot path does.
#pragma once

#include <string>

namespace bagua_net {

enum class LogLevel { kWarn, kInfo };

// A plain function pointer: it can be swapped atomically, and NCCL's own logger is one.
using LogFunction = void (*)(LogLevel level, const char* file, int line, const char* message);

void set_log_function(LogFunction function);  // nullptr: drop messages
void log_message(LogLevel level, const char* file, int line, const std::string& message);

}  // namespace bagua_net

#define BAGUA_NET_WARN(message) ::bagua_net::log_message(::bagua_net::LogLevel::kWarn, __FILE__, __LINE__, (message))
#define BAGUA_NET_INFO(message) ::bagua_net::log_message(::bagua_net::LogLevel::kInfo, __FILE__, __LINE__, (message))
