// The plugin in processes that fork: a child that leaves it alone or uses it, and one that outlives its parent.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "abi_connection.h"

namespace abi_test {
namespace {

// What a forked child of a data loader or a launcher does with the library: nothing, or something of its own.
void survives_fork(int version, bool child_uses_it) {
  const Session session(version);
  const Net& net = session.net();
  Connection connection = connect_both_ends(net, session.ctx());
  exchange(net, connection, 300000, 300000, 0, 0, 1);
  Buffer buffer(100);
  void* const mhandle = register_buffer(net, connection.send, &buffer);
  void* const pending = Poster(net, connection.recv).try_irecv(buffer.data(), 100, nullptr);
  CHECK(pending != nullptr);

  int channel[2];
  CHECK_EQ(pipe(channel), 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    // The child's own deadline: a hang is what this is about.
    alarm(static_cast<unsigned>(20 * kSlowdown));
    std::string failure;
    try {
      // The parent's comms are errors here, at once; letting go of them is not.
      void* request = slot_content(2);
      CHECK_RESULT(net.isend(connection.send, buffer.data(), 100, 0, mhandle, &request), Result::kInternalError);
      CHECK(request == nullptr);
      int done = 1;
      CHECK_RESULT(net.test(pending, &done, nullptr), Result::kInternalError);
      CHECK(net.dereg_mr(connection.send, mhandle) != Result::kSuccess);
      CHECK_SUCCESS(net.close_recv(connection.recv));
      Handle handle{};
      void* comm = slot_content(2);
      CHECK_RESULT(net.listen(session.ctx(), 0, handle.data(), &comm), Result::kInternalError);
      CHECK(comm == nullptr);
      CHECK_SUCCESS(net.finalize(session.ctx()));
      if (child_uses_it) {
        void* ctx = nullptr;
        CHECK_SUCCESS(net.init(&ctx));
        transfer_once(net, ctx, 3);
        request = slot_content(2);
        CHECK_RESULT(net.isend(connection.send, buffer.data(), 100, 0, mhandle, &request), Result::kInternalError);
        CHECK_SUCCESS(net.close_send(connection.send));
        CHECK_SUCCESS(net.finalize(ctx));
      }
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if (write(channel[1], failure.data(), failure.size()) < 0) std::perror("write");
    // As multiprocessing ends a child; the parent's instance is unreachable here, which is no leak to report.
    _exit(failure.empty() ? 0 : 1);
  }
  close(channel[1]);
  std::string failure;
  char piece[1024];
  for (ssize_t got = 0; (got = read(channel[0], piece, sizeof piece)) > 0;) {
    failure.append(piece, static_cast<std::size_t>(got));
  }
  close(channel[0]);
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(failure, "");
  CHECK_EQ(status, 0);
  // The parent did not notice: its pending receive is still good.
  Buffer source(100);
  source.fill(5);
  void* const sending = Poster(net, connection.send).try_isend(source.data(), 100, nullptr);
  CHECK(sending != nullptr);
  wait_until("the parent's message", [&] { return is_done(net, sending, nullptr); });
  wait_until("the parent's receive", [&] { return is_done(net, pending, nullptr); });
  buffer.check(100, 5);
  CHECK_SUCCESS(net.dereg_mr(connection.send, mhandle));
  exchange(net, connection, 300000, 300000, 0, 0, 6);
  close_both_ends(net, &connection);
}

// A trainer is killed, and a data loader that it forked lives on.
void reports_a_killed_peer_whose_child_lives(int version) {
  int handles[2];
  int children[2];
  CHECK_EQ(pipe(handles), 0);
  CHECK_EQ(pipe(children), 0);
  Handle handle{};
  const pid_t trainer = fork();
  CHECK(trainer >= 0);
  if (trainer == 0) {
    alarm(static_cast<unsigned>(30 * kSlowdown));
    auto* const session = new Session(version);  // for its child, never closed
    void* send = nullptr;
    if (read(handles[0], handle.data(), handle.size()) != static_cast<ssize_t>(handle.size())) _exit(1);
    while (send == nullptr) {
      if (session->net().connect(session->ctx(), 0, handle.data(), &send) != Result::kSuccess) _exit(1);
    }
    const pid_t loader = fork();
    if (loader == 0) {
      alarm(static_cast<unsigned>(60 * kSlowdown));
    } else if (write(children[1], &loader, sizeof loader) < 0) {
      _exit(1);
    }
    for (;;) pause();
  }
  const Session session(version);
  const Net& net = session.net();
  void* listen = nullptr;
  CHECK_SUCCESS(net.listen(session.ctx(), 0, handle.data(), &listen));
  CHECK_EQ(write(handles[1], handle.data(), handle.size()), static_cast<ssize_t>(handle.size()));
  void* recv = nullptr;
  wait_until("the connection", [&] {
    CHECK_SUCCESS(net.accept(listen, &recv));
    return recv != nullptr;
  });
  Buffer buffer(100);
  void* const mhandle = register_buffer(net, recv, &buffer);
  void* const pending = Poster(net, recv).try_irecv(buffer.data(), 100, mhandle);
  pid_t loader = 0;
  CHECK_EQ(read(children[0], &loader, sizeof loader), static_cast<ssize_t>(sizeof loader));
  CHECK_EQ(kill(trainer, SIGKILL), 0);
  wait_until("the error", [&] {
    int done = 0;
    return net.test(pending, &done, nullptr) != Result::kSuccess;
  });
  CHECK_EQ(kill(loader, SIGKILL), 0);
  CHECK_EQ(waitpid(trainer, nullptr, 0), trainer);
  CHECK_SUCCESS(net.close_recv(recv));
  CHECK_SUCCESS(net.close_listen(listen));
}

bool register_fork_cases() {
  for (const int version : {8, kNewestVersion}) {
    const std::string suffix = "_v" + std::to_string(version);
    for (const char* workers : {"0", "2"}) {
      register_process_case("fork_of_a_child_that_does_nothing" + suffix, workers,
                            [=] { survives_fork(version, false); });
#if !defined(__SANITIZE_THREAD__)
      // TSan cannot follow a child that starts threads after its parent had some ("dup thread with used id").
      register_process_case("fork_of_a_child_that_uses_it" + suffix, workers, [=] { survives_fork(version, true); });
#endif
      register_process_case("killed_peer_whose_child_lives" + suffix, workers,
                            [=] { reports_a_killed_peer_whose_child_lives(version); });
    }
  }
  return true;
}

const bool fork_cases_registered = register_fork_cases();

}  // namespace
}  // namespace abi_test
