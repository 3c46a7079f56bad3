// CommandLine: `--name value` options after the mode word. Every value is checked; an error names the option, what
// was given and what is allowed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/status.h"

namespace bagua_net::bench {

// Decimal, nothing before or behind it, within [least, most]. `name` is what the error calls it.
Status parse_integer(const std::string& name, const std::string& text, std::int64_t least, std::int64_t most,
                     std::int64_t* value);

class CommandLine {
 public:
  // words: argv behind the mode. An option that is not in `known`, is given twice or lacks its value is an error.
  static Status parse(const std::vector<std::string>& words, const std::vector<std::string>& known,
                      CommandLine* command_line);

  bool has(const std::string& name) const { return values_.count(name) > 0; }
  // An option that was not given has the default; without a default it is an error.
  Status text(const std::string& name, std::string* value) const;
  std::string text_or(const std::string& name, const std::string& default_value) const;
  Status integer(const std::string& name, std::int64_t least, std::int64_t most, std::int64_t* value) const;
  Status integer_or(const std::string& name, std::int64_t least, std::int64_t most, std::int64_t default_value,
                    std::int64_t* value) const;
  // The value has to be one of `choices`.
  Status choice(const std::string& name, const std::vector<std::string>& choices, std::string* value) const;

 private:
  std::map<std::string, std::string> values_;
};

}  // namespace bagua_net::bench
