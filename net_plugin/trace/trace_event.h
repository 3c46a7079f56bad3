// TraceEvent: one event of the trace, as it lies in the ring: no pointer in it but to constants of ours, so that the
// thread that writes the file never looks at memory of the one that recorded it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace bagua_net {

class TraceEvent {
 public:
  static constexpr std::size_t kMaxArguments = 11;
  static constexpr std::size_t kNameBytes = 24;
  static constexpr std::size_t kTextBytes = 16;

  struct Argument {
    const char* key;  // a constant
    bool is_text;
    union {
      std::uint64_t number;
      char text[kTextBytes];
    };
  };

  TraceEvent() = default;
  // category: a constant. The name is copied, and cut where it is too long.
  TraceEvent(std::uint32_t track, const char* category, const char* name, std::int64_t begin_ns)
      : track_(track), category_(category), begin_ns_(begin_ns) {
    set_text(name_, name);
  }

  // Without an end it is an instant.
  void set_end(std::int64_t end_ns) {
    duration_ns_ = end_ns - begin_ns_;
    if (duration_ns_ < 0) duration_ns_ = 0;
  }
  void add(const char* key, std::uint64_t number) {
    if (Argument* argument = next(key, false)) argument->number = number;
  }
  // nullptr: there is none.
  void add(const char* key, const char* text) {
    if (text == nullptr) return;
    if (Argument* argument = next(key, true)) set_text(argument->text, text);
  }
  void append_to_name(const char* more) {
    const std::size_t length = std::strlen(name_);
    if (length + 1 < kNameBytes) copy_text(name_ + length, kNameBytes - length, more);
  }
  // The same thing elsewhere, from another time on.
  TraceEvent moved_to(std::uint32_t track, std::int64_t begin_ns) const {
    TraceEvent moved;
    copy_to(&moved);
    moved.track_ = track;
    moved.begin_ns_ = begin_ns;
    return moved;
  }
  // For the ring: what lies behind the arguments in use stays as it is.
  void copy_to(TraceEvent* other) const {
    std::memcpy(static_cast<void*>(other), static_cast<const void*>(this),
                offsetof(TraceEvent, arguments_) + used_ * sizeof(Argument));
  }

  std::uint32_t track() const { return track_; }
  const char* category() const { return category_; }
  const char* name() const { return name_; }
  std::int64_t begin_ns() const { return begin_ns_; }
  bool is_instant() const { return duration_ns_ < 0; }
  std::int64_t duration_ns() const { return duration_ns_; }
  const Argument* begin() const { return arguments_.data(); }
  const Argument* end() const { return arguments_.data() + used_; }

 private:
  static void copy_text(char* to, std::size_t bytes, const char* from) {
    std::size_t length = 0;
    while (length + 1 < bytes && from[length] != '\0') ++length;
    std::memcpy(to, from, length);
    to[length] = '\0';
  }
  template <std::size_t kBytes>
  static void set_text(char (&to)[kBytes], const char* from) {
    copy_text(to, kBytes, from);
  }
  Argument* next(const char* key, bool is_text) {
    if (used_ == kMaxArguments) return nullptr;
    Argument* argument = &arguments_[used_++];
    argument->key = key;
    argument->is_text = is_text;
    return argument;
  }

  std::uint32_t track_ = 0;
  std::uint32_t used_ = 0;
  const char* category_ = "";
  std::int64_t begin_ns_ = 0;  // monotonic
  std::int64_t duration_ns_ = -1;
  char name_[kNameBytes] = "";
  std::array<Argument, kMaxArguments> arguments_;
};

}  // namespace bagua_net
