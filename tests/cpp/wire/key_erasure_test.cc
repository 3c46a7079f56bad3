// No key is in what a core dump has of a process that encrypts, which are the mappings that the kernel would write, as
// gcore reads them: neither the secret nor what is derived from it.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "support/connection_ends.h"
#include "support/temporary_tree.h"

namespace bagua_net {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::uint8_t kMask = 0x5a;

// What is looked for must not be in memory itself.
class Needle {
 public:
  Needle(const char* name, const std::uint8_t* bytes, std::size_t count) : name_(name) {
    for (std::size_t i = 0; i < count; ++i) masked_.push_back(static_cast<std::uint8_t>(bytes[i] ^ kMask));
  }
  const char* name() const { return name_; }
  Needle(const char* name, std::vector<std::uint8_t> masked) : name_(name), masked_(std::move(masked)) {}
  bool is_in(const std::uint8_t* begin, const std::uint8_t* end) const {
    const auto is_same = [](std::uint8_t byte, std::uint8_t masked) { return byte == (masked ^ kMask); };
    return std::search(begin, end, masked_.begin(), masked_.end(), is_same) != end;
  }

 private:
  const char* name_;
  Bytes masked_;
};

struct Mapping {
  const std::uint8_t* begin;
  const std::uint8_t* end;
};

// Those that a dump has: private or shared memory that can be read, without the flag `dd`.
std::vector<Mapping> dumped_mappings() {
  std::vector<Mapping> mappings;
  std::ifstream smaps("/proc/self/smaps");
  Mapping current{};
  bool is_readable = false;
  for (std::string line; std::getline(smaps, line);) {
    std::istringstream words(line);
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    char dash = 0;
    std::string rights;
    if (words >> std::hex >> begin >> dash >> end >> rights && dash == '-') {
      current = {reinterpret_cast<const std::uint8_t*>(begin), reinterpret_cast<const std::uint8_t*>(end)};
      is_readable = rights[0] == 'r' && rights[1] == 'w';
    }
    const bool has_flags = line.rfind("VmFlags:", 0) == 0;
    line += ' ';
    if (has_flags && is_readable && line.find(" dd ") == std::string::npos && line.find(" io ") == std::string::npos) {
      mappings.push_back(current);
    }
  }
  return mappings;
}

bool is_dumped(const Needle& needle) {
  const std::vector<Mapping> mappings = dumped_mappings();
  CHECK(!mappings.empty());
  return std::any_of(mappings.begin(), mappings.end(),
                     [&](const Mapping& mapping) { return needle.is_in(mapping.begin, mapping.end); });
}

// Written by another process, and read byte by byte: this one never has it as a whole.
Needle make_secret(const std::string& path) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::array<std::uint8_t, 32> random{};
    const OwnedFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    const bool is_written = fill_random(random.data(), random.size()).is_ok() &&
                            ::write(file.get(), random.data(), random.size()) == static_cast<ssize_t>(random.size());
    ::_exit(is_written ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  const OwnedFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  Bytes masked;
  for (std::uint8_t byte = 0; ::read(file.get(), &byte, 1) == 1;) masked.push_back(byte ^ kMask);
  CHECK_EQ(masked.size(), 32u);
  return {"the file", masked};
}

}  // namespace

TEST_CASE(no_key_of_a_process_that_encrypts_would_be_dumped) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return;  // they keep copies of their own, in terabytes of address space
#endif
  const TemporaryTree tree;
  std::vector<Needle> needles;
  needles.push_back(make_secret(tree.root() + "/secret"));
  HandshakeSettings settings = settings_with(1);
  CHECK_OK(JobSecret::read(tree.root() + "/secret", &settings.secret));
  settings.encrypts = true;
  ListeningService listening(settings);
  ConnectingService connecting(listening.handle_bytes.data(), settings);
  const EstablishedConnection accepted = listening.accept_from(&connecting);
  needles.emplace_back("the key of the secret", settings.secret->key(), settings.secret->key_bytes());
  needles.emplace_back("the key of the handshake", accepted.contact.key->data(), accepted.contact.key->size());
  const ConnectionKeys& keys = *accepted.sockets[0].keys;
  needles.emplace_back("the key of what comes", keys.in.key(), kKeyBytes);
  needles.emplace_back("the key of what goes", keys.out.key(), kKeyBytes);
  for (const Needle& needle : needles) {
    if (is_dumped(needle))
      check::fail(__FILE__, __LINE__, std::string(needle.name()) + " is in memory that a core dump has");
  }
  // Or the test sees nothing.
  const Bytes copy(keys.in.key(), keys.in.key() + kKeyBytes);
  CHECK(is_dumped(needles[3]));
}

}  // namespace bagua_net
