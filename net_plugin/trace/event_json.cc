#include "trace/event_json.h"

#include <cstdio>

namespace bagua_net {

std::string EventJson::quoted(const std::string& text) {
  std::string json = "\"";
  for (const char letter : text) {
    const auto byte = static_cast<unsigned char>(letter);
    if (letter == '"' || letter == '\\') {
      json += '\\';
      json += letter;
    } else if (byte < 0x20 || byte >= 0x7f) {
      json += '?';  // what is not ASCII may not be UTF-8 either
    } else {
      json += letter;
    }
  }
  return json += '"';
}

void EventJson::begin(char phase, std::uint32_t track, std::string* lines) const {
  char text[96];
  std::snprintf(text, sizeof text, R"({"ph":"%c","pid":%d,"tid":%u)", phase, process_id_, track);
  *lines += text;
}

void EventJson::append_time(const char* key, std::int64_t ns, std::string* lines) const {
  char text[64];
  std::snprintf(text, sizeof text, R"(,"%s":%lld.%03d)", key, static_cast<long long>(ns / 1000),
                static_cast<int>(ns % 1000));
  *lines += text;
}

void EventJson::append(const TraceEvent& event, std::string* lines) const {
  begin(event.is_instant() ? 'i' : 'X', event.track(), lines);
  if (event.is_instant()) *lines += R"(,"s":"t")";
  append_time("ts", event.begin_ns() - base_ns_, lines);
  if (!event.is_instant()) append_time("dur", event.duration_ns(), lines);
  *lines += R"(,"cat":")";
  *lines += event.category();
  *lines += R"(","name":)" + quoted(event.name()) + R"(,"args":{)";
  const char* separator = "";
  for (const TraceEvent::Argument& argument : event) {
    *lines += separator;
    *lines += '"';
    *lines += argument.key;
    *lines += "\":";
    *lines += argument.is_text ? quoted(argument.text) : std::to_string(argument.number);
    separator = ",";
  }
  *lines += "}},\n";
}

void EventJson::append_note(std::uint32_t track, const std::string& name, const std::string& detail, std::int64_t at_ns,
                            std::string* lines) const {
  begin('i', track, lines);
  *lines += R"(,"s":"t")";
  append_time("ts", at_ns - base_ns_, lines);
  *lines += R"(,"cat":"note","name":)" + quoted(name) + R"(,"args":{"detail":)" + quoted(detail) + "}},\n";
}

void EventJson::append_metadata(std::uint32_t track, const char* name, const char* key, const std::string& value,
                                std::string* lines) const {
  begin('M', track, lines);
  *lines += R"(,"ts":0,"name":")";
  *lines += name;
  *lines += R"(","args":{")";
  *lines += key;
  *lines += "\":" + value + "}},\n";
}

}  // namespace bagua_net
