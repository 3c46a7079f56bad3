#include "bench/command_line.h"

#include <algorithm>
#include <charconv>

namespace bagua_net::bench {
namespace {

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

}  // namespace

Status parse_integer(const std::string& name, const std::string& text, std::int64_t least, std::int64_t most,
                     std::int64_t* value) {
  std::int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || number < least || number > most) {
    return Status::invalid_argument(name + " is \"" + text + "\", but must be a whole number from " +
                                    std::to_string(least) + " to " + std::to_string(most));
  }
  *value = number;
  return Status::ok();
}

Status CommandLine::parse(const std::vector<std::string>& words, const std::vector<std::string>& known,
                          CommandLine* command_line) {
  for (std::size_t i = 0; i < words.size(); i += 2) {
    const std::string& name = words[i];
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      return Status::invalid_argument("unknown option \"" + name + "\"; this mode knows " + join(known));
    }
    if (i + 1 == words.size()) return Status::invalid_argument("option " + name + " needs a value behind it");
    if (!command_line->values_.emplace(name, words[i + 1]).second) {
      return Status::invalid_argument("option " + name + " is given twice: keep one");
    }
  }
  return Status::ok();
}

Status CommandLine::text(const std::string& name, std::string* value) const {
  const auto found = values_.find(name);
  if (found == values_.end()) return Status::invalid_argument("option " + name + " is missing and has no default");
  *value = found->second;
  return Status::ok();
}

std::string CommandLine::text_or(const std::string& name, const std::string& default_value) const {
  const auto found = values_.find(name);
  return found == values_.end() ? default_value : found->second;
}

Status CommandLine::integer(const std::string& name, std::int64_t least, std::int64_t most, std::int64_t* value) const {
  std::string word;
  BAGUA_NET_RETURN_IF_ERROR(text(name, &word));
  return parse_integer(name, word, least, most, value);
}

Status CommandLine::integer_or(const std::string& name, std::int64_t least, std::int64_t most,
                               std::int64_t default_value, std::int64_t* value) const {
  if (has(name)) return integer(name, least, most, value);
  *value = default_value;
  return Status::ok();
}

Status CommandLine::choice(const std::string& name, const std::vector<std::string>& choices, std::string* value) const {
  BAGUA_NET_RETURN_IF_ERROR(text(name, value));
  if (std::find(choices.begin(), choices.end(), *value) == choices.end()) {
    return Status::invalid_argument(name + " is \"" + *value + "\", but must be one of " + join(choices));
  }
  return Status::ok();
}

}  // namespace bagua_net::bench
