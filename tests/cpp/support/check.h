// Named test cases and checks for the C++ tests: no C++ test framework comes from a Python package registry, and the
// build may need nothing else. `program --list` prints the cases as FILE.CASE, `program FILE.CASE` runs one, `program
// FILE` those of a file, and `program` runs all.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Case {
  std::string file;  // without folder and extension: cases of two files may have the same name
  std::string name;
  std::function<void()> body;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

// `file` is the caller's: what __FILE__ or __builtin_FILE() gives.
inline void add_case(const char* file, const std::string& name, std::function<void()> body) {
  const std::string path = file;
  const std::string base = path.substr(path.rfind('/') + 1);
  cases().push_back({base.substr(0, base.rfind('.')), name, std::move(body)});
}

struct Registrar {
  Registrar(const char* file, const char* name, std::function<void()> body) { add_case(file, name, std::move(body)); }
};

// How often something random is tried: a sanitizer looks at code, and takes ten times as long.
constexpr int rounds(int usual) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return usual < 24 ? (usual < 3 ? usual : 3) : usual / 8;
#else
  return usual;
#endif
}

// How many seeds are tried where one takes seconds with a sanitizer: then it is one.
constexpr unsigned seeds([[maybe_unused]] unsigned usual) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return 1;
#else
  return usual;
#endif
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline bool is_close(double value, double expected) { return value > 0.99 * expected && value < 1.01 * expected; }

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename Left, typename Right>
void equal(const Left& left, const Right& right, const char* text, const char* file, int line) {
  if (left == right) return;
  std::ostringstream message;
  message << text << ": " << left << " is not " << right;
  fail(file, line, message.str());
}

inline int run_main(int argc, char** argv) {
  const std::string chosen = argc > 1 ? argv[1] : "";
  int ran = 0;
  int failed = 0;
  for (const Case& one : cases()) {
    const std::string full_name = one.file + "." + one.name;
    if (chosen == "--list") {
      std::printf("%s\n", full_name.c_str());
      continue;
    }
    if (!chosen.empty() && chosen != full_name && chosen != one.file) continue;
    ++ran;
    try {
      one.body();
      std::printf("ok      %s\n", full_name.c_str());
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED  %s\n        %s\n", full_name.c_str(), error.what());
    }
    std::fflush(stdout);
  }
  if (chosen == "--list") return EXIT_SUCCESS;
  if (ran == 0) std::printf("no such case: %s\n", chosen.empty() ? "(none registered)" : chosen.c_str());
  return failed == 0 && ran > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace check

#define TEST_CASE(name)                                                   \
  static void name();                                                     \
  static const check::Registrar name##_registrar(__FILE__, #name, &name); \
  static void name()

#define CHECK(condition)                                                        \
  do {                                                                          \
    if (!(condition)) check::fail(__FILE__, __LINE__, "not true: " #condition); \
  } while (false)
#define CHECK_EQ(left, right) check::equal((left), (right), #left " == " #right, __FILE__, __LINE__)
#define CHECK_OK(status)                                                                                 \
  do {                                                                                                   \
    const auto& check_status_ = (status);                                                                \
    if (!check_status_.is_ok()) check::fail(__FILE__, __LINE__, #status ": " + check_status_.message()); \
  } while (false)
