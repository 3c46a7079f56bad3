// The secret of a job: which files are taken, that both ends need the same one, and who is told of a difference.
#include "crypto/job_secret.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/check.h"
#include "support/connection_ends.h"
#include "support/kept_log.h"
#include "support/raw_handshake.h"
#include "support/temporary_tree.h"

namespace bagua_net {
namespace {

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct SecretFile {
  TemporaryTree tree;
  std::string path = tree.root() + "/secret";

  SecretFile(std::size_t bytes, mode_t mode, char letter = 's') {
    tree.write("secret", std::string(bytes, letter));
    CHECK_EQ(::chmod(path.c_str(), mode), 0);
  }
  Status read(std::shared_ptr<const JobSecret>* secret) const { return JobSecret::read(path, secret); }
  Status status() const {
    std::shared_ptr<const JobSecret> secret;
    return read(&secret);
  }
};

void check_refused(const Status& status, const std::string& why) {
  CHECK(status.code() == StatusCode::kInvalidUsage);
  CHECK(has(status.message(), why));
  CHECK_EQ(std::count(status.message().begin(), status.message().end(), '\n'), 2);
}

std::shared_ptr<const JobSecret> secret_of(char letter) {
  const std::vector<std::uint8_t> bytes(kMinSecretBytes, static_cast<std::uint8_t>(letter));
  return JobSecret::derive(bytes.data(), bytes.size());
}

HandshakeSettings with_secret(std::shared_ptr<const JobSecret> secret) {
  HandshakeSettings settings = settings_with(2);
  settings.secret = std::move(secret);
  return settings;
}

}  // namespace

TEST_CASE(a_file_of_enough_bytes_is_a_secret) {
  const KeptLog log;
  std::shared_ptr<const JobSecret> secret;
  std::shared_ptr<const JobSecret> same;
  CHECK_OK(SecretFile(kMinSecretBytes, 0600).read(&secret));
  CHECK_OK(SecretFile(kMinSecretBytes, 0440).read(&same));
  CHECK(secret->id() == same->id());
  CHECK(secret->id() != KeyId{});
  CHECK_EQ(KeptLog::text(), "");
  std::shared_ptr<const JobSecret> other;
  CHECK_OK(SecretFile(kMinSecretBytes + 1, 0600).read(&other));
  CHECK(secret->id() != other->id());
}

TEST_CASE(a_short_missing_or_writable_file_is_refused_in_three_lines) {
  check_refused(SecretFile(kMinSecretBytes - 1, 0600).status(), "has 31 bytes");
  check_refused(SecretFile(0, 0600).status(), "has 0 bytes");
  check_refused(SecretFile(kMaxSecretBytes + 1, 0600).status(), "more than 65536 bytes");
  check_refused(SecretFile(64, 0602).status(), "chmod o-w");
  const SecretFile file(64, 0600);
  std::shared_ptr<const JobSecret> secret;
  check_refused(JobSecret::read(file.path + "-missing", &secret), "No such file");
  check_refused(JobSecret::read(file.tree.root(), &secret), "not a file");
  check_refused(JobSecret::read("~/missing", &secret), "Write the whole path");
}

TEST_CASE(a_blank_file_is_no_secret) {
  for (const char letter : {'\0', '\n', ' '})
    check_refused(SecretFile(64, 0600, letter).status(), "nothing but blanks");
  const SecretFile file(0, 0600);
  file.tree.write("secret", std::string(40, '\n') + "x");
  CHECK_OK(file.status());
}

TEST_CASE(a_file_that_everyone_may_read_is_warned_of) {
  const KeptLog log;
  const SecretFile file(64, 0644);
  CHECK_OK(file.status());
  CHECK(has(KeptLog::text(), "every user of this host can read BAGUA_NET_SECRET_FILE=" + file.path));
  CHECK(!has(KeptLog::text(), "ssss"));
}

// Not refused: a group may be the user's own.
TEST_CASE(a_file_that_its_group_may_write_is_warned_of) {
  for (const mode_t mode : {0620, 0660}) {
    const KeptLog log;
    const SecretFile file(64, mode);
    CHECK_OK(file.status());
    CHECK(has(KeptLog::text(), "can change BAGUA_NET_SECRET_FILE=" + file.path));
    CHECK(has(KeptLog::text(), "chmod g-w"));
  }
}

TEST_CASE(a_link_to_a_file_is_followed) {  // as secret mounts of Kubernetes are
  const SecretFile file(64, 0600);
  const std::string link = file.tree.root() + "/link";
  CHECK_EQ(::symlink(file.path.c_str(), link.c_str()), 0);
  std::shared_ptr<const JobSecret> secret;
  CHECK_OK(JobSecret::read(link, &secret));
}

TEST_CASE(the_key_of_a_handshake_needs_secret_and_token) {
  const std::shared_ptr<const JobSecret> secret = secret_of('a');
  const HandshakeKey key = *handshake_key(Token{1}, secret.get());
  CHECK(key == *handshake_key(Token{1}, secret.get()));
  CHECK(key != *handshake_key(Token{2}, secret.get()));
  CHECK(key != *handshake_key(Token{1}, secret_of('b').get()));
  CHECK(key != *handshake_key(Token{1}));
}

// With and without, without and with, and two different ones.
TEST_CASE(ranks_with_different_secrets_are_named_at_both_ends) {
  const std::shared_ptr<const JobSecret> a = secret_of('a');
  const std::shared_ptr<const JobSecret> b = secret_of('b');
  const std::vector<std::pair<std::shared_ptr<const JobSecret>, std::shared_ptr<const JobSecret>>> pairs = {
      {a, nullptr}, {nullptr, a}, {a, b}};
  for (const auto& [listens_with, connects_with] : pairs) {
    const std::shared_ptr<const JobSecret>& listens = listens_with;  // a lambda may capture it
    const std::shared_ptr<const JobSecret>& connects = connects_with;
    const auto text = [](const std::shared_ptr<const JobSecret>& secret) {
      return secret == nullptr ? std::string("no secret") : "the secret " + key_id_text(secret->id());
    };
    const KeptLog log;
    ListeningService listening(with_secret(listens));
    ConnectingService connecting(listening.handle_bytes.data(), with_secret(connects));
    const std::int64_t begin_ms = monotonic_ms();
    const Status status = connecting.error();
    CHECK(status.code() == StatusCode::kInvalidUsage);
    CHECK(has(status.message(), "this rank has " + text(connects) + ", that rank has " + text(listens)));
    CHECK(monotonic_ms() - begin_ms < 30000);  // and not at the deadline of 60 s
    wait_until([&] { return has(KeptLog::text(), "this rank has " + text(listens)); }, "the listener's line");
    CHECK(has(KeptLog::text(), "that rank has " + text(connects)));
  }
}

}  // namespace bagua_net
