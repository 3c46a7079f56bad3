// RecvComm: the receiving end of a connection. Whatever stream a chunk comes on, it is read straight into the receive
// that it belongs to.
#pragma once

#include "transport/comm.h"
#include "transport/established_connection.h"
#include "transport/receive_table.h"

namespace bagua_net {

class RecvComm final : public Comm {
 public:
  static Status create(EstablishedConnection connection, WorkerPool* pool, std::unique_ptr<RecvComm>* comm,
                       CommStats stats = {});
  // The same over any byte streams: what create() does with sockets, and the tests with fakes.
  static Status create(std::vector<std::unique_ptr<ByteStream>> streams, std::string peer,
                       std::shared_ptr<StreamArrivals> arrivals, WorkerPool* pool, std::unique_ptr<RecvComm>* comm,
                       Path path = Path::kWithinHost, CommStats stats = {});
  ~RecvComm() override { stop_streams(); }

  // *request == nullptr: no room now, call again.
  Status irecv(void* data, std::size_t bytes, MemoryRegistration* registration, Request** request);

 private:
  using Comm::Comm;

  std::unique_ptr<DataStream> make_stream(std::unique_ptr<ByteStream> bytes, int index) override;
  Status check_progress_possible() override;
  bool has_own_work(const Request&) const override { return true; }  // any message may come on stream 0
  std::size_t message_bytes(const Request& request) const override;
  void on_finished(const Request& request) override;

  int first_streams_ = 0;  // that the comm began with
  ReceiveTable table_;
  // Streams that the peer ended between two frames. When all have, or all but parked ones, nothing more can come for
  // what is posted. Release by the driver, acquire by test: a message completed before the end is seen as complete.
  std::atomic<std::size_t> ended_streams_{0};
};

}  // namespace bagua_net
