#include "transport/recv_comm.h"

#include "transport/recv_stream.h"
#include "transport/thread_load.h"

namespace bagua_net {
namespace {

// What the sender goes by, in its default settings (send_comm.cc).
constexpr std::size_t kLargeBytes = 65536;
constexpr std::size_t kMediumBytes = 16384;

}  // namespace

Status RecvComm::create(EstablishedConnection connection, WorkerPool* pool, std::unique_ptr<RecvComm>* comm,
                        CommStats stats) {
  std::vector<std::unique_ptr<ByteStream>> streams;
  for (OwnedFd& socket : connection.sockets) streams.push_back(make_tcp_byte_stream(std::move(socket)));
  return create(std::move(streams), std::move(connection.peer), std::move(connection.arrivals), pool, comm,
                connection.same_host ? Path::kWithinHost : Path::kBetweenHosts, std::move(stats));
}

Status RecvComm::create(std::vector<std::unique_ptr<ByteStream>> streams, std::string peer,
                        std::shared_ptr<StreamArrivals> arrivals, WorkerPool* pool, std::unique_ptr<RecvComm>* comm,
                        Path path, CommStats stats) {
  std::unique_ptr<RecvComm> created(
      new RecvComm(std::move(peer), Direction::kReceive, path, pool, std::move(arrivals), std::move(stats)));
  created->first_streams_ = static_cast<int>(streams.size());
  BAGUA_NET_RETURN_IF_ERROR(created->start_streams(std::move(streams)));
  *comm = std::move(created);
  return Status::ok();
}

std::unique_ptr<DataStream> RecvComm::make_stream(std::unique_ptr<ByteStream> bytes, int index) {
  return std::make_unique<RecvStream>(
      std::move(bytes), this, index, &table_, [this] { ended_streams_.fetch_add(1, std::memory_order_release); },
      index >= first_streams_);
}

Status RecvComm::irecv(void* data, std::size_t bytes, MemoryRegistration* registration, Request** request) {
  *request = nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_failed()) return give_up();
  Request* posted = free_request();
  if (posted == nullptr) return Status::ok();
  std::uint64_t parked = table_.post(posted, this, next_number_++, data, bytes, registration);
  for (int index = 0; parked != 0; ++index, parked >>= 1) {
    if ((parked & 1) != 0) kick(index);
  }
  stats_.posted(posted->number_);
  // The calling thread's own streams are looked at by the next test: posting stays cheap.
  *request = posted;
  return Status::ok();
}

Status RecvComm::check_progress_possible() {
  const std::size_t ended = ended_streams_.load(std::memory_order_acquire);
  if (ended == 0) return Status::ok();
  // A parked stream does not come to its end before later receives are posted, which may wait for this one.
  if (ended < streams_.size() && ended + table_.parked_count() < streams_.size()) return Status::ok();
  // A stream that joined just now may bring what is missing; the next test takes it in.
  if (has_arrivals()) return Status::ok();
  // One that is done was merely not tested yet; any other waits in vain.
  for (const Request& request : requests_) {
    if (request.in_use_ && !request.is_done()) {
      fail(Status::remote_error("the peer closed the connection while this rank waits for message " +
                                std::to_string(request.number_) +
                                ": its process ended or aborted; see that rank's log"));
      return failure();
    }
  }
  return Status::ok();
}

void RecvComm::on_finished(const Request& request) {
  // The sender is about to wake its workers, for the same reason.
  const std::size_t bytes = request.message_bytes_;
  stats_.add_received(bytes);
  if (bytes > kLargeBytes || (bytes > kMediumBytes && ThreadLoad::of_this_thread().is_busy())) {
    rouse_workers((bytes + kLargeBytes - 1) / kLargeBytes);
  }
}

std::size_t RecvComm::message_bytes(const Request& request) const { return request.message_bytes_; }

}  // namespace bagua_net
