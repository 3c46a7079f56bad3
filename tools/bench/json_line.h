// JsonLine: writes one JSON object on one line. Only what the driver's protocol needs: flat objects, arrays of
// strings and of numbers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bagua_net::bench {

class JsonLine {
 public:
  explicit JsonLine(std::string_view event) { add("event", event); }

  JsonLine& add(std::string_view key, std::string_view value);
  JsonLine& add(std::string_view key, const char* value) { return add(key, std::string_view(value)); }
  JsonLine& add(std::string_view key, std::int64_t value);
  JsonLine& add(std::string_view key, double value);
  JsonLine& add_null(std::string_view key);
  JsonLine& add(std::string_view key, const std::vector<std::string>& values);
  JsonLine& add(std::string_view key, const std::vector<double>& values);

  std::string text() const { return text_ + "}"; }

 private:
  void begin_value(std::string_view key);

  std::string text_ = "{";
};

}  // namespace bagua_net::bench
