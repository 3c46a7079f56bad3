#include "trace/event_json.h"

#include <charconv>
#include <cstring>

namespace bagua_net {
namespace {

template <typename Number>
void append_number(Number number, std::string* lines) {
  char text[24];
  lines->append(text, std::to_chars(text, text + sizeof text, number).ptr);
}

void append_quoted(const char* text, std::size_t length, std::string* lines) {
  *lines += '"';
  for (const char* at = text; at != text + length; ++at) {
    const auto byte = static_cast<unsigned char>(*at);
    if (*at == '"' || *at == '\\') {
      *lines += '\\';
      *lines += *at;
    } else if (byte < 0x20 || byte >= 0x7f) {
      *lines += '?';  // what is not ASCII may not be UTF-8 either
    } else {
      *lines += *at;
    }
  }
  *lines += '"';
}

// Microseconds, exact.
void append_time(const char* key, std::int64_t ns, std::string* lines) {
  *lines += key;
  append_number(ns / 1000, lines);
  const auto rest = static_cast<int>(ns % 1000);
  const char digits[] = {'.', static_cast<char>('0' + rest / 100), static_cast<char>('0' + rest / 10 % 10),
                         static_cast<char>('0' + rest % 10)};
  lines->append(digits, sizeof digits);
}

}  // namespace

std::string EventJson::quoted(const std::string& text) {
  std::string json;
  append_quoted(text.data(), text.size(), &json);
  return json;
}

void EventJson::begin(char phase, std::uint32_t track, std::string* lines) const {
  *lines += R"({"ph":")";
  *lines += phase;
  *lines += R"(","pid":)";
  append_number(process_id_, lines);
  *lines += R"(,"tid":)";
  append_number(track, lines);
}

void EventJson::append(const TraceEvent& event, std::string* lines) const {
  begin(event.is_instant() ? 'i' : 'X', event.track(), lines);
  if (event.is_instant()) *lines += R"(,"s":"t")";
  append_time(R"(,"ts":)", event.begin_ns() - base_ns_, lines);
  if (!event.is_instant()) append_time(R"(,"dur":)", event.duration_ns(), lines);
  *lines += R"(,"cat":")";
  *lines += event.category();
  *lines += R"(","name":)";
  append_quoted(event.name(), std::strlen(event.name()), lines);
  *lines += R"(,"args":{)";
  const char* separator = "\"";
  for (const TraceEvent::Argument& argument : event) {
    *lines += separator;
    *lines += argument.key;
    *lines += "\":";
    if (argument.is_text) {
      append_quoted(argument.text, std::strlen(argument.text), lines);
    } else {
      append_number(argument.number, lines);
    }
    separator = ",\"";
  }
  *lines += "}},\n";
}

void EventJson::append_note(std::uint32_t track, const std::string& name, const std::string& detail, std::int64_t at_ns,
                            std::string* lines) const {
  begin('i', track, lines);
  *lines += R"(,"s":"t")";
  append_time(R"(,"ts":)", at_ns - base_ns_, lines);
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
