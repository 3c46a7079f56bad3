// ConnectionService: the thread of this process that opens connections in both directions, so that no call from NCCL
// waits for a peer, and unauthenticated peers do not delay a comm. It sleeps in epoll while no handshake is in
// progress. Any thread may call the public functions.
#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "os/epoll_poller.h"
#include "transport/connect/inbound_handshakes.h"
#include "transport/connect/outbound_handshakes.h"

namespace bagua_net {

class ConnectionService {
 public:
  explicit ConnectionService(HandshakeSettings settings);
  ~ConnectionService();  // closes everything unfinished, joins the thread

  Status start();

  Status listen(const std::vector<NetworkInterface>& interfaces, std::uint8_t* handle, RandomId* id);
  Status accept(const RandomId& id, bool* ready, EstablishedConnection* connection);
  void stop_listening(const RandomId& id);
  Status connect(const std::vector<NetworkInterface>& interfaces, std::uint8_t* handle, bool* ready,
                 EstablishedConnection* connection);
  // Opens `count` more streams of an established connection; those that the peer accepts come in through `arrivals`.
  void join(const JoinTicket& ticket, int count, const std::shared_ptr<StreamArrivals>& arrivals);

  // See OutboundHandshakes.
  Prepared prepare(const JoinTicket& ticket, std::size_t place, const std::shared_ptr<StreamArrivals>& arrivals);

  // There is no listen, and no connect in progress or not fetched yet (joins end with their comms).
  bool is_idle();
  // Only connects are left, which NCCL may have dropped without saying so: the thread ends with the last of them,
  // unless resume() is called before.
  void rest();
  bool resume();  // false: the thread has ended, and another service is needed

 private:
  void run();
  void fail(const Status& failure);

  const HandshakeSettings settings_;
  EpollPoller poller_;
  std::thread thread_;
  LoopMutex mutex_;  // never held while the thread waits or logs
  HandshakeLoop loop_ GUARDED_BY(mutex_){&poller_};
  OutboundHandshakes outbound_ GUARDED_BY(mutex_);
  InboundHandshakes inbound_ GUARDED_BY(mutex_);
  bool stopping_ GUARDED_BY(mutex_) = false;
  bool resting_ GUARDED_BY(mutex_) = false;
  bool has_ended_ GUARDED_BY(mutex_) = false;
  Status failure_ GUARDED_BY(mutex_);  // the thread has ended with it
};

}  // namespace bagua_net
