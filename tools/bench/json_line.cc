#include "bench/json_line.h"

#include <cmath>
#include <cstdio>

namespace bagua_net::bench {
namespace {

void append_quoted(std::string_view value, std::string* text) {
  text->push_back('"');
  for (const char character : value) {
    const auto code = static_cast<unsigned char>(character);
    if (character == '"' || character == '\\') {
      text->push_back('\\');
      text->push_back(character);
    } else if (code < 0x20 || code >= 0x7f) {
      // Bytes above ASCII come from foreign text (a path, a host name) that need not be UTF-8: escaped one by one, the
      // line always parses.
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", code);
      *text += escape;
    } else {
      text->push_back(character);
    }
  }
  text->push_back('"');
}

void append_number(double value, std::string* text) {
  if (!std::isfinite(value)) {  // JSON has no word for it
    *text += "null";
    return;
  }
  char digits[32];
  std::snprintf(digits, sizeof digits, "%.9g", value);
  *text += digits;
}

}  // namespace

void JsonLine::begin_value(std::string_view key) {
  if (text_.size() > 1) text_ += ", ";
  append_quoted(key, &text_);
  text_ += ": ";
}

JsonLine& JsonLine::add(std::string_view key, std::string_view value) {
  begin_value(key);
  append_quoted(value, &text_);
  return *this;
}

JsonLine& JsonLine::add(std::string_view key, std::int64_t value) {
  begin_value(key);
  text_ += std::to_string(value);
  return *this;
}

JsonLine& JsonLine::add(std::string_view key, double value) {
  begin_value(key);
  append_number(value, &text_);
  return *this;
}

JsonLine& JsonLine::add_null(std::string_view key) {
  begin_value(key);
  text_ += "null";
  return *this;
}

JsonLine& JsonLine::add(std::string_view key, const std::vector<std::string>& values) {
  begin_value(key);
  text_ += '[';
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text_ += ", ";
    append_quoted(values[i], &text_);
  }
  text_ += ']';
  return *this;
}

JsonLine& JsonLine::add(std::string_view key, const std::vector<double>& values) {
  begin_value(key);
  text_ += '[';
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text_ += ", ";
    append_number(values[i], &text_);
  }
  text_ += ']';
  return *this;
}

}  // namespace bagua_net::bench
