// Events as lines of a Chrome trace: "Trace Event Format", https://chromium.googlesource.com/catapult (docs), which
// Perfetto and chrome://tracing read. A file is a JSON array of which the end may be missing.
#pragma once

#include <cstdint>
#include <string>

#include "trace/trace_event.h"

namespace bagua_net {

class EventJson {
 public:
  // base_ns: what the monotonic clock showed where the times of the file begin.
  EventJson(int process_id, std::int64_t base_ns) : process_id_(process_id), base_ns_(base_ns) {}

  // Each appends one line, with a comma at its end.
  void append(const TraceEvent& event, std::string* lines) const;
  void append_note(std::uint32_t track, const std::string& name, const std::string& detail, std::int64_t at_ns,
                   std::string* lines) const;
  // Metadata. `value` is JSON.
  void append_metadata(std::uint32_t track, const char* name, const char* key, const std::string& value,
                       std::string* lines) const;

  // Text from anywhere, also from the network, as a JSON string.
  static std::string quoted(const std::string& text);

 private:
  void begin(char phase, std::uint32_t track, std::string* lines) const;

  const int process_id_;
  const std::int64_t base_ns_;
};

}  // namespace bagua_net
