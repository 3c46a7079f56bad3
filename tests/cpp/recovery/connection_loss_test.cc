// What becomes of messages when all connections are lost while one end does not call the plugin, and when a comm has
// closed. Connections that are lost again and again: replay_model_test.cc and abi_fault_test.cc; before a sender
// closes: checksum_test.cc.
#include <cstdint>
#include <vector>

#include "support/context_pair.h"
#include "support/cut_connections.h"

namespace bagua_net {

// The sender waits for an answer on another comm, say: its message was done as soon as it was written.
TEST_CASE(a_small_message_comes_again_though_its_sender_does_not_call) {
  for (const int workers : {0, 2}) {
    for (const Cut how : {Cut::kReset, Cut::kEnd}) {
      ContextPair pair(recovering(workers), recovering(workers));
      const std::vector<std::uint8_t> message = make_message(0, 1000);
      std::vector<std::uint8_t> room(1000);
      Request* send = pair.send(message);
      CHECK_OK(outcome(send));
      cut_all(how);
      CHECK_OK(outcome(pair.receive(room)));
      CHECK(room == message);
    }
  }
}

// The receiver has the message, and the sender does not know.
TEST_CASE(a_send_finishes_though_its_receiver_does_not_call) {
  for (const int workers : {0, 2}) {
    ContextPair pair(recovering(workers), recovering(workers));
    const std::vector<std::uint8_t> message = make_message(0, 300000);
    std::vector<std::uint8_t> room(message.size());
    Request* receive = pair.receive(room);
    Request* send = pair.send(message);
    bool sent = false;
    wait_until(
        [&] {
          if (is_done(receive)) return true;
          if (!sent) sent = is_done(send);
          return false;
        },
        "the receive");
    cut_all(Cut::kReset);
    if (!sent) CHECK_OK(outcome(send));
    CHECK(room == message);
  }
}

TEST_CASE(a_peer_that_has_closed_its_comm_is_not_waited_for) {
  for (const int workers : {0, 2}) {
    ContextPair pair(recovering(workers), recovering(workers));
    std::vector<std::uint8_t> room(1000);
    Request* receive = pair.receive(room);
    pair.close_sender();
    check_names(outcome(receive), "the peer closed the connection while this rank waits for message 0");
    ContextPair other(recovering(workers), recovering(workers));
    const std::vector<std::uint8_t> message = make_message(0, 8u << 20);
    Request* send = other.send(message);
    other.close_receiver();
    check_names(outcome(send), "the peer closed the connection before");
  }
}

TEST_CASE(without_recovery_a_lost_connection_is_an_error) {
  PluginConfig off = recovering(0);
  off.recovery = Recovery::kOff;
  for (const bool sender : {false, true}) {
    ContextPair pair(sender ? off : recovering(0), sender ? recovering(0) : off);
    std::vector<std::uint8_t> room(1000);
    Request* receive = pair.receive(room);
    cut_all(Cut::kReset);
    CHECK(outcome(receive).code() == StatusCode::kRemoteError);
  }
}

}  // namespace bagua_net
