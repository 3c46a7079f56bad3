#include "config/fault_plan.h"

#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "base/text_parsing.h"

namespace bagua_net {
namespace {

constexpr double kMaxRate = 1000;  // per second
constexpr double kMaxDelayUs = 10e6;

constexpr char kSyntax[] =
    "a comma-separated list of cut=RATE, drop=RATE, delay=TIME@PROBABILITY, flip=PROBABILITY and seed=NUMBER, such as "
    "seed=7,cut=1/s,delay=5ms@0.01,flip=1e-6";

// Splits at the first mark; without one, all is in the first half.
std::pair<std::string_view, std::optional<std::string_view>> cut(std::string_view text, char mark) {
  const std::size_t position = text.find(mark);
  if (position == std::string_view::npos) return {text, std::nullopt};
  return {text.substr(0, position), text.substr(position + 1)};
}

// Written so that a NaN is refused.
bool is_probability(double number) { return number >= 0 && number <= 1; }

// Each returns what the value must be, or "".
std::string_view parse_rate(std::string_view text, double* per_s) {
  const auto [number, unit] = cut(text, '/');
  const auto rate = parse_number<double>(number);
  if (!rate || unit != "s" || !(*rate >= 0 && *rate <= kMaxRate)) return "a rate from 0/s to 1000/s, such as 0.5/s";
  *per_s = *rate;
  return "";
}

std::string_view parse_probability(std::string_view text, double* probability) {
  const auto number = parse_number<double>(text);
  if (!number || !is_probability(*number)) return "a probability from 0 to 1, such as 1e-6";
  *probability = *number;
  return "";
}

std::string_view parse_delay(std::string_view text, FaultPlan* plan) {
  static constexpr char kRequirement[] = "a time from 0us to 10s and a probability from 0 to 1, such as 5ms@0.01";
  const auto [time, share] = cut(text, '@');
  const std::size_t digits = time.find_last_of("0123456789.");
  if (digits == std::string_view::npos) return kRequirement;
  const std::string_view unit = time.substr(digits + 1);
  const auto number = parse_number<double>(time.substr(0, digits + 1));
  const double unit_us = unit == "us" ? 1 : unit == "ms" ? 1e3 : unit == "s" ? 1e6 : -1;
  const auto probability = share ? parse_number<double>(*share) : 1.0;
  if (!number || unit_us < 0 || !probability || !is_probability(*probability)) return kRequirement;
  if (!(*number >= 0 && *number * unit_us <= kMaxDelayUs)) return kRequirement;
  plan->delay_us = static_cast<std::int64_t>(*number * unit_us);
  plan->delay_probability = *probability;
  return "";
}

std::string_view parse_part(std::string_view name, std::string_view value, FaultPlan* plan) {
  if (name == "cut") return parse_rate(value, &plan->cuts_per_s);
  if (name == "drop") return parse_rate(value, &plan->drops_per_s);
  if (name == "flip") return parse_probability(value, &plan->flip_probability);
  if (name == "delay") return parse_delay(value, plan);
  if (name != "seed") return "one of cut, drop, delay, flip and seed";
  const auto seed = parse_number<std::uint64_t>(value);
  if (!seed) return "an integer from 0 to 18446744073709551615";
  plan->seed = *seed;
  return "";
}

}  // namespace

std::string parse_fault_plan(const std::string& text, FaultPlan* plan) {
  const auto refusal = [](std::string_view part, std::string_view why) {
    return std::string(kSyntax) + ": \"" + std::string(part) + "\" " + std::string(why);
  };
  FaultPlan parsed;
  std::set<std::string_view> names;
  for (const std::string_view untrimmed : split(text, ',')) {
    const std::string_view part = trimmed(untrimmed);
    const auto [name, value] = cut(part, '=');
    if (!value) return refusal(part, "has no value");
    if (!names.insert(name).second) return refusal(part, "is named twice");
    const std::string_view requirement = parse_part(name, *value, &parsed);
    if (!requirement.empty()) return refusal(part, "is not " + std::string(requirement));
  }
  if (!parsed.any()) return refusal(text, "asks for no fault");
  *plan = parsed;
  return "";
}

}  // namespace bagua_net
