#include "crypto/job_secret.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>

#include "base/log_sink.h"
#include "base/owned_fd.h"
#include "crypto/protected_memory.h"

namespace bagua_net {
namespace {

constexpr char kKeyLabel[] = "bagua-net job secret 3";
constexpr char kIdLabel[] = "bagua-net key id 3";

struct FileBytes {
  std::array<std::uint8_t, kMaxSecretBytes + 1> bytes;
};

Status unusable(const std::string& path, const std::string& why, const std::string& remedy) {
  return Status::invalid_usage("BAGUA_NET_SECRET_FILE=" + path + ": " + why +
                               ".\nThis rank does not use Bagua-Net without the secret that was asked for.\n" + remedy);
}

constexpr char kMakeOne[] = "Make one with `bagua-net secret new FILE`, and give every rank the same file.";

// The number of bytes, or -1 with errno set.
ssize_t read_all(int fd, std::uint8_t* bytes, std::size_t room) {
  std::size_t count = 0;
  while (count < room) {
    const ssize_t got = ::read(fd, bytes + count, room - count);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return -1;
    if (got == 0) break;
    count += static_cast<std::size_t>(got);
  }
  return static_cast<ssize_t>(count);
}

}  // namespace

Status JobSecret::read(const std::string& path, std::shared_ptr<const JobSecret>* secret) {
  const OwnedFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat state{};
  if (!file.is_open() || ::fstat(file.get(), &state) != 0) {
    const std::string why = std::string("the file cannot be opened (") + std::strerror(errno) + ")";
    // Shells expand it at the beginning of an unquoted value, and neither in quotes nor in YAML.
    if (path[0] == '~') return unusable(path, why, "Write the whole path: only a shell replaces ~, outside of quotes.");
    return unusable(path, why, kMakeOne);
  }
  if (!S_ISREG(state.st_mode)) return unusable(path, "this is not a file", kMakeOne);
  if ((state.st_mode & S_IWOTH) != 0) {
    return unusable(path, "every user of this host may write the file", "Take that right away: chmod o-w " + path);
  }
  const Protected<FileBytes> contents = make_protected<FileBytes>();
  const ssize_t count = read_all(file.get(), contents->bytes.data(), contents->bytes.size());
  if (count < 0) {
    return unusable(path, std::string("the file cannot be read (") + std::strerror(errno) + ")", kMakeOne);
  }
  const auto bytes = static_cast<std::size_t>(count);
  if (bytes < kMinSecretBytes || bytes > kMaxSecretBytes) {
    const std::string has =
        bytes > kMaxSecretBytes ? "more than " + std::to_string(kMaxSecretBytes) : std::to_string(bytes);
    return unusable(path,
                    "the file has " + has + " bytes, a secret has " + std::to_string(kMinSecretBytes) + " to " +
                        std::to_string(kMaxSecretBytes),
                    kMakeOne);
  }
  const std::uint8_t* const begin = contents->bytes.data();
  // A template that was not filled in, or a file that was made and never written.
  if (std::all_of(begin, begin + bytes, [](std::uint8_t byte) { return byte == 0 || std::isspace(byte) != 0; })) {
    return unusable(path, "the file has nothing but blanks, line ends and zeros", kMakeOne);
  }
  // Not refused: a group of the user alone (umask 002) and volumes with an fsGroup of Kubernetes make such files.
  if ((state.st_mode & S_IWGRP) != 0) {
    BAGUA_NET_WARN("Bagua-Net: the members of group " + std::to_string(state.st_gid) +
                   " can change BAGUA_NET_SECRET_FILE=" + path +
                   ", and join the job. Unless they are this user alone, take that right away: chmod g-w " + path);
  }
  if ((state.st_mode & S_IROTH) != 0) {
    BAGUA_NET_WARN("Bagua-Net: every user of this host can read BAGUA_NET_SECRET_FILE=" + path +
                   ", and join the job. Unless this host is the job's alone, take that right away: chmod o-r " + path);
  }
  *secret = derive(begin, bytes);
  return Status::ok();
}

std::shared_ptr<const JobSecret> JobSecret::derive(const std::uint8_t* bytes, std::size_t count) {
  Protected<JobSecret> secret = make_protected<JobSecret>();
  HmacSha256(bytes, count).add(kKeyLabel, sizeof kKeyLabel).finish(&secret->key_);
  const Mac id = HmacSha256(secret->key(), secret->key_bytes()).add(kIdLabel, sizeof kIdLabel).finish();
  std::copy_n(id.begin(), secret->id_.size(), secret->id_.begin());
  return secret;
}

std::string key_id_text(const KeyId& id) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : id) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace bagua_net
