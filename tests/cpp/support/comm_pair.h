// A send and a receive comm of one process, without the handshake: over TCP on the loopback interface, or over pipes in
// memory.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "os/zero_copy.h"
#include "stats/comm_stats.h"
#include "support/check.h"
#include "support/comm_parts.h"
#include "support/loopback.h"
#include "support/two_way_pipe.h"
#include "transport/comm/recv_comm.h"
#include "transport/comm/send_comm.h"

namespace bagua_net {

struct CommPair {
  enum class Watched { kNothing, kSenders, kReceivers };
  struct Settings {
    std::size_t streams = 1;
    int sending_workers = 0;
    int receiving_workers = 0;
    SendPolicy sending = {};
    RecvPolicy receiving = {};
    Watched watched = Watched::kNothing;  // the ends of which `watched` has duplicates
    int buffer_bytes = 0;                 // of each direction of each socket; 0: the kernel's
    int receive_buffer_bytes = 0;
    bool msg_zerocopy = false;                  // by reference is as between hosts
    std::optional<TwoWayBehaviour> pipes = {};  // instead of sockets
    unsigned seed = 1;                          // of the pipes
  };

  WorkerPool sending_pool;
  WorkerPool receiving_pool;
  std::shared_ptr<StreamArrivals> sender_arrivals = std::make_shared<StreamArrivals>();
  std::shared_ptr<StreamArrivals> receiver_arrivals = std::make_shared<StreamArrivals>();
  std::vector<OwnedFd> watched;       // by stream index
  std::vector<TwoWayEnd*> near_ends;  // of pipes; as long as the comms
  std::vector<TwoWayEnd*> far_ends;
  const CommSlot* sending_slot = nullptr;
  const CommSlot* receiving_slot = nullptr;
  std::unique_ptr<SendComm> sender;
  std::unique_ptr<RecvComm> receiver;

  explicit CommPair(const Settings& settings)
      : sending_pool(settings.sending_workers, 50, any_cpu()),
        receiving_pool(settings.receiving_workers, 50, any_cpu()) {
    std::vector<std::unique_ptr<ByteStream>> near;
    std::vector<std::unique_ptr<ByteStream>> far;
    for (std::size_t i = 0; i < settings.streams; ++i) {
      if (settings.pipes.has_value()) {
        auto ends = TwoWayEnd::make(*settings.pipes, *settings.pipes, settings.seed + static_cast<unsigned>(2 * i));
        near_ends.push_back(ends.first.get());
        far_ends.push_back(ends.second.get());
        near.push_back(std::move(ends.first));
        far.push_back(std::move(ends.second));
        continue;
      }
      auto ends = tcp_pair();
      set_options(ends.first, settings);
      set_options(ends.second, settings);
      if (settings.msg_zerocopy) allow_zero_copy_sends(ends.first.get(), true);
      if (settings.watched != Watched::kNothing) {
        watch(settings.watched == Watched::kSenders ? ends.first : ends.second);
      }
      near.push_back(make_tcp_byte_stream(std::move(ends.first)));
      far.push_back(make_tcp_byte_stream(std::move(ends.second)));
    }
    CommStats sending_stats;
    CommStats receiving_stats;
    sending_slot = &sending_stats.slot();
    receiving_slot = &receiving_stats.slot();
    CHECK_OK(SendComm::create(std::move(near), "receiver", sender_arrivals, settings.sending, &sending_pool, &sender,
                              std::move(sending_stats)));
    CHECK_OK(RecvComm::create(std::move(far), "sender", receiver_arrivals, &receiving_pool, &receiver,
                              settings.receiving, std::move(receiving_stats)));
  }
  ~CommPair() {
    sender.reset();
    receiver.reset();
    sending_pool.stop();
    receiving_pool.stop();
  }
  CommPair(const CommPair&) = delete;
  CommPair& operator=(const CommPair&) = delete;

  void watch(const OwnedFd& end) { watched.emplace_back(::fcntl(end.get(), F_DUPFD_CLOEXEC, 0)); }

  Request* send(const void* data, std::size_t bytes, MemoryRegistration* registration = nullptr) {
    Request* request = nullptr;
    CHECK_OK(sender->isend(data, bytes, registration, &request));
    CHECK(request != nullptr);
    return request;
  }
  Request* send(const std::vector<std::uint8_t>& message) { return send(message.data(), message.size()); }
  Request* receive(void* data, std::size_t bytes, MemoryRegistration* registration = nullptr) {
    Request* request = nullptr;
    CHECK_OK(receiver->irecv(data, bytes, registration, &request));
    CHECK(request != nullptr);
    return request;
  }
  Request* receive(std::vector<std::uint8_t>& room) { return receive(room.data(), room.size()); }

 private:
  static void set_options(const OwnedFd& end, const Settings& settings) {
    if (settings.buffer_bytes > 0) set_buffer(end, SO_SNDBUF, settings.buffer_bytes);
    const int receive_bytes = std::max(settings.buffer_bytes, settings.receive_buffer_bytes);
    if (receive_bytes > 0) set_buffer(end, SO_RCVBUF, receive_bytes);
  }
};

inline CommPair::Settings over_pipes(std::size_t streams, TwoWayBehaviour behaviour = {}, unsigned seed = 1) {
  CommPair::Settings settings;
  settings.streams = streams;
  settings.pipes = behaviour;
  settings.seed = seed;
  return settings;
}
inline CommPair::Settings over_tcp(std::size_t streams, int workers) {
  CommPair::Settings settings;
  settings.streams = streams;
  settings.sending_workers = settings.receiving_workers = workers;
  return settings;
}

}  // namespace bagua_net
