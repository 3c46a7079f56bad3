// Comms over TCP on the loopback interface whose workers send by reference: a request is done when the peer has the
// bytes and not before, the memory is the caller's from then on, and whatever ends in between is an error with a name.
#include <fcntl.h>
#include <linux/sockios.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/monotonic_clock.h"
#include "os/page_pipe.h"
#include "support/check.h"
#include "support/tcp_pair.h"
#include "transport/event_loop_worker.h"
#include "transport/recv_comm.h"
#include "transport/send_comm.h"
#include "transport/send_stream.h"
#include "transport/transport_context.h"
#include "wire/acknowledgement.h"
#include "wire/frame_header.h"

namespace bagua_net {
namespace {

constexpr std::int64_t kDeadlineMs = 30000;
constexpr std::size_t kLeastChunk = 65536;
constexpr std::size_t kReferred = 1u << 20;  // large enough a message to go out by reference

cpu_set_t any_cpu() {
  cpu_set_t set;
  sched_getaffinity(0, sizeof set, &set);
  return set;
}

class Deadline {
 public:
  void check(const char* what) const {
    if (monotonic_ms() > end_ms_) check::fail(__FILE__, __LINE__, std::string("waited in vain for ") + what);
  }

 private:
  const std::int64_t end_ms_ = monotonic_ms() + kDeadlineMs;
};

template <typename Condition>
void wait_until(Condition condition, const char* what) {
  const Deadline deadline;
  while (!condition()) {
    deadline.check(what);
    sched_yield();
  }
}

std::vector<std::uint8_t> make_message(std::size_t number, std::size_t bytes) {
  std::vector<std::uint8_t> message(bytes);
  for (std::size_t i = 0; i < bytes; ++i) message[i] = static_cast<std::uint8_t>(number * 131 + i * 7 + i / 251);
  return message;
}

void set_buffer(const OwnedFd& socket, int option, int bytes) {
  CHECK_EQ(::setsockopt(socket.get(), SOL_SOCKET, option, &bytes, sizeof bytes), 0);
}

std::pair<OwnedFd, OwnedFd> connected(int buffer_bytes = 0) {
  auto pair = tcp_pair();
  const int one = 1;
  for (const OwnedFd* end : {&pair.first, &pair.second}) {
    CHECK_EQ(::setsockopt(end->get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one), 0);
    if (buffer_bytes == 0) continue;
    set_buffer(*end, SO_SNDBUF, buffer_bytes);
    set_buffer(*end, SO_RCVBUF, buffer_bytes);
  }
  return pair;
}

// The sending ends of the streams for workers, as far as the kernel is concerned.
class WrittenBytes {
 public:
  void watch(const OwnedFd& near) { duplicates_.emplace_back(::fcntl(near.get(), F_DUPFD_CLOEXEC, 0)); }
  // Of all streams together, since the connection began; then the sockets are the comm's alone.
  void wait_for(std::size_t bytes) {
    wait_until(
        [&] {
          std::size_t written = 0;
          for (const OwnedFd& socket : duplicates_) {
            tcp_info info{};
            socklen_t length = sizeof info;
            CHECK_EQ(::getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &length), 0);
            int queued = 0;
            CHECK_EQ(::ioctl(socket.get(), SIOCOUTQ, &queued), 0);
            // What was acknowledged in between is missed, and seen the next time. The first "byte" is the SYN.
            written += info.tcpi_bytes_acked - 1 + static_cast<std::size_t>(queued);
          }
          return written >= bytes;
        },
        "bytes of the sender");
    duplicates_.clear();
  }

 private:
  std::vector<OwnedFd> duplicates_;
};

SendPolicy referring() {
  SendPolicy policy;
  policy.inline_bytes = 0;
  policy.max_chunk_bytes = 4 * kLeastChunk;
  policy.refers = true;
  return policy;
}

bool is_done(Request* request) {
  bool done = false;
  std::size_t bytes = 0;
  CHECK_OK(request->test(&done, &bytes));
  return done;
}

Status test_until_done(Request* request) {
  Status status;
  wait_until(
      [&] {
        bool done = false;
        std::size_t bytes = 0;
        status = request->test(&done, &bytes);
        return done || !status.is_ok();
      },
      "a request");
  return status;
}

// Memory of messages, which threads may touch until the comms are gone.
class Buffers {
 public:
  std::vector<std::uint8_t>& keep(std::vector<std::uint8_t> bytes) { return kept_.emplace_back(std::move(bytes)); }
  std::vector<std::uint8_t>& room(std::size_t bytes) { return keep(std::vector<std::uint8_t>(bytes)); }

 private:
  std::deque<std::vector<std::uint8_t>> kept_;
};

// Stream 0 and as many for workers, between two comms of one process.
struct Connection {
  struct Settings {
    std::size_t worker_streams = 2;
    int receiving_workers = 2;
    int buffer_bytes = 0;
    int receive_buffer_bytes = 0;
    SendPolicy policy = referring();
  };

  Buffers buffers;
  WorkerPool sending_pool;
  WorkerPool receiving_pool;
  WrittenBytes written;
  std::vector<OwnedFd> fars;  // duplicates of the receiving ends, where their buffers are set
  bool has_large_receive_buffers = true;
  std::unique_ptr<SendComm> sender;
  std::unique_ptr<RecvComm> receiver;

  Connection() : Connection(Settings()) {}
  explicit Connection(Settings settings)
      : sending_pool(2, 50, any_cpu()), receiving_pool(settings.receiving_workers, 50, any_cpu()) {
    std::vector<std::unique_ptr<ByteStream>> sending;
    std::vector<std::unique_ptr<ByteStream>> receiving;
    for (std::size_t i = 0; i <= settings.worker_streams; ++i) {
      auto [near, far] = connected(settings.buffer_bytes);
      if (i > 0) written.watch(near);
      if (settings.receive_buffer_bytes > 0) {
        set_buffer(far, SO_RCVBUF, settings.receive_buffer_bytes);
        int granted = 0;
        socklen_t length = sizeof granted;
        CHECK_EQ(::getsockopt(far.get(), SOL_SOCKET, SO_RCVBUF, &granted, &length), 0);
        has_large_receive_buffers &= granted >= settings.receive_buffer_bytes;
        fars.emplace_back(::fcntl(far.get(), F_DUPFD_CLOEXEC, 0));
      }
      sending.push_back(make_tcp_byte_stream(std::move(near)));
      receiving.push_back(make_tcp_byte_stream(std::move(far)));
    }
    CHECK_OK(SendComm::create(std::move(sending), "receiver", nullptr, settings.policy, &sending_pool, &sender));
    CHECK_OK(RecvComm::create(std::move(receiving), "sender", nullptr, &receiving_pool, &receiver));
  }
  ~Connection() {
    sender.reset();
    receiver.reset();
    sending_pool.stop();
    receiving_pool.stop();
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  Request* send(const void* data, std::size_t bytes, MemoryRegistration* registration = nullptr) {
    Request* request = nullptr;
    CHECK_OK(sender->isend(data, bytes, registration, &request));
    CHECK(request != nullptr);
    return request;
  }
  Request* receive(void* data, std::size_t bytes) {
    Request* request = nullptr;
    CHECK_OK(receiver->irecv(data, bytes, nullptr, &request));
    CHECK(request != nullptr);
    return request;
  }
};

// Every large message is one chunk.
Connection::Settings one_worker_stream(int receiving_workers = 2) {
  Connection::Settings settings;
  settings.worker_streams = 1;
  settings.receiving_workers = receiving_workers;
  return settings;
}

// Sends a message, and one behind it of so many bytes; when the first is where it should be, the sender gives up, and
// its caller overwrites the memory.
void abort_and_overwrite(Connection& connection, std::size_t bytes_behind, bool closes,
                         const std::function<void(std::size_t bytes)>& wait_until_there) {
  std::vector<std::uint8_t>& message = connection.buffers.keep(make_message(0, kReferred));
  MemoryRegistration* registration = nullptr;
  CHECK_OK(connection.sender->register_memory(message.data(), message.size(), &registration));
  connection.send(message.data(), message.size(), registration);
  if (bytes_behind > 0) connection.send(connection.buffers.room(bytes_behind).data(), bytes_behind);
  wait_until_there(kFrameHeaderBytes + message.size());
  CHECK_OK(connection.sender->deregister_memory(registration));
  if (closes) connection.sender.reset();
  std::fill(message.begin(), message.end(), std::uint8_t{0x5a});
}

void receive_nothing_forged(Connection& connection) {
  std::vector<std::uint8_t>& room = connection.buffers.room(kReferred);
  Request* receive = connection.receive(room.data(), room.size());
  if (test_until_done(receive).is_ok()) CHECK(room == make_message(0, kReferred));
}

// Messages of these sizes, with as many under way as the comm takes; the sender overwrites each the moment that it is
// done, and receives are posted when so many messages were sent.
void exchange(Connection& connection, const std::vector<std::size_t>& sizes, std::size_t lag) {
  std::vector<std::vector<std::uint8_t>*> sent;
  std::vector<std::vector<std::uint8_t>*> received;
  std::vector<Request*> sends;
  std::vector<Request*> receives;
  std::size_t sends_done = 0;
  std::size_t receives_done = 0;
  const Deadline deadline;
  while (sends_done < sizes.size() || receives_done < sizes.size()) {
    deadline.check("messages");
    Request* request = nullptr;
    if (sends.size() < sizes.size()) {
      if (sent.size() == sends.size()) {
        sent.push_back(&connection.buffers.keep(make_message(sends.size(), sizes[sends.size()])));
      }
      const std::vector<std::uint8_t>& message = *sent.back();
      CHECK_OK(connection.sender->isend(message.data(), message.size(), nullptr, &request));
      if (request != nullptr) sends.push_back(request);
    }
    if (receives.size() < sizes.size() && (receives.size() + lag < sends.size() || sends.size() == sizes.size())) {
      if (received.size() == receives.size()) {
        const std::size_t bytes = sizes[receives.size()] + 1;
        received.push_back(&connection.buffers.keep(std::vector<std::uint8_t>(bytes, 0xee)));
      }
      std::vector<std::uint8_t>& room = *received.back();
      CHECK_OK(connection.receiver->irecv(room.data(), room.size(), nullptr, &request));
      if (request != nullptr) receives.push_back(request);
    }
    if (sends_done < sends.size() && is_done(sends[sends_done])) {
      std::fill(sent[sends_done]->begin(), sent[sends_done]->end(), std::uint8_t{0x5a});
      ++sends_done;
    }
    if (receives_done < receives.size() && is_done(receives[receives_done])) {
      std::vector<std::uint8_t>& room = *received[receives_done];
      CHECK_EQ(int{room.back()}, 0xee);
      room.pop_back();
      CHECK(room == make_message(receives_done, sizes[receives_done]));
      ++receives_done;
    }
  }
}

std::vector<std::size_t> random_sizes(std::mt19937& random, std::size_t count) {
  std::vector<std::size_t> sizes;
  for (std::size_t i = 0; i < count; ++i) {
    sizes.push_back(random() % 4 == 0 ? random() % 1000 : random() % (4 * kReferred));
  }
  return sizes;
}

// A send comm with one stream for workers, of which the test is the peer.
struct Sender {
  Buffers buffers;
  WorkerPool pool{1, 50, any_cpu()};
  std::array<OwnedFd, 2> peers;  // by stream index
  WrittenBytes written;
  std::unique_ptr<SendComm> comm;

  explicit Sender(const SendPolicy& policy = referring()) {
    std::vector<std::unique_ptr<ByteStream>> streams;
    for (OwnedFd& peer : peers) {
      auto [near, far] = connected();
      if (&peer == &peers[1]) written.watch(near);
      streams.push_back(make_tcp_byte_stream(std::move(near)));
      peer = std::move(far);
    }
    CHECK_OK(SendComm::create(std::move(streams), "that host", nullptr, policy, &pool, &comm));
  }
  ~Sender() {
    comm.reset();
    pool.stop();
  }
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  Request* send(const std::vector<std::uint8_t>& message) {
    Request* request = nullptr;
    CHECK_OK(comm->isend(message.data(), message.size(), nullptr, &request));
    CHECK(request != nullptr);
    return request;
  }
};

std::vector<std::uint8_t> read_exactly(int socket, std::size_t count) {
  std::vector<std::uint8_t> bytes(count);
  std::size_t received = 0;
  const Deadline deadline;
  while (received < count) {
    deadline.check("bytes");
    pollfd readable{socket, POLLIN, 0};
    ::poll(&readable, 1, 1000);
    const ssize_t got = ::recv(socket, bytes.data() + received, count - received, MSG_DONTWAIT);
    CHECK(got > 0 || (got < 0 && errno == EAGAIN));
    if (got > 0) received += static_cast<std::size_t>(got);
  }
  return bytes;
}

struct Frame {
  FrameHeader header;
  std::vector<std::uint8_t> payload;
};

Frame read_frame(int socket) {
  Frame frame;
  const std::vector<std::uint8_t> header = read_exactly(socket, kFrameHeaderBytes);
  CHECK_OK(decode_frame_header(header.data(), &frame.header));
  frame.payload = read_exactly(socket, frame.header.payload_bytes);
  return frame;
}

void write_all(int socket, const std::vector<std::uint8_t>& bytes) {
  CHECK_EQ(::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

std::vector<std::uint8_t> acknowledgement(std::uint64_t received_bytes) {
  std::vector<std::uint8_t> bytes(kAcknowledgementBytes);
  encode_acknowledgement(received_bytes, bytes.data());
  return bytes;
}

void close_with_reset(OwnedFd& socket) {
  const linger at_once{1, 0};
  CHECK_EQ(::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once), 0);
  socket.reset();
}

void check_names(const Status& status, const std::string& what) {
  CHECK(status.code() == StatusCode::kRemoteError);
  if (status.message().find(what) == std::string::npos) {
    check::fail(__FILE__, __LINE__, "no \"" + what + "\" in: " + status.message());
  }
}

// Keeps its worker from looking after any other stream until it is released.
class StallingStream final : public DataStream {
 public:
  StallingStream(OwnedFd socket, FailureSink* failures)
      : DataStream(make_tcp_byte_stream(std::move(socket)), failures, 0) {}

  StreamProgress progress(std::size_t) override {
    std::unique_lock<std::mutex> lock(mutex_);
    stalling_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return released_; });
    return StreamProgress::kIdle;
  }
  std::uint32_t poll_flags() const override { return 0; }

  void wait_until_stalling() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return stalling_; });
  }
  void release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stalling_ = false;
  bool released_ = false;
};

struct FirstFailure final : FailureSink {
  void fail(Status status) override {
    const std::lock_guard<std::mutex> lock(mutex);
    if (failure.is_ok()) failure = std::move(status);
  }
  Status get() {
    const std::lock_guard<std::mutex> lock(mutex);
    return failure;
  }
  std::mutex mutex;
  Status failure;
};

}  // namespace

TEST_CASE(messages_survive_a_sender_that_overwrites_them) {
  for (unsigned seed = 1; seed <= 6; ++seed) {
    std::mt19937 random(seed);
    Connection::Settings settings;
    settings.worker_streams = 1 + seed % 3;
    settings.receiving_workers = seed % 2 == 0 ? 0 : 2;  // the peer's settings may differ
    Connection connection(settings);
    exchange(connection, random_sizes(random, 60), seed % 3 == 0 ? 30 : random() % 4);
  }
}

TEST_CASE(messages_survive_small_socket_buffers) {
  for (const int receiving_workers : {0, 2}) {
    std::mt19937 random(1);
    Connection::Settings settings;
    settings.receiving_workers = receiving_workers;
    settings.buffer_bytes = 30000;
    Connection connection(settings);
    exchange(connection, random_sizes(random, 20), 3);
  }
}

TEST_CASE(more_chunks_than_can_be_unacknowledged) {
  Connection::Settings settings;
  settings.policy.max_chunk_bytes = kLeastChunk;
  Connection connection(settings);
  exchange(connection, {32 * kReferred, kReferred, 32 * kReferred}, 2);
}

TEST_CASE(a_send_is_done_when_the_receiver_has_it_and_not_before) {
  for (const int receiving_workers : {0, 2}) {
    Connection connection(one_worker_stream(receiving_workers));
    std::vector<std::uint8_t>& message = connection.buffers.keep(make_message(0, kReferred));
    Request* send = connection.send(message.data(), message.size());
    connection.written.wait_for(kFrameHeaderBytes + message.size());
    for (int i = 0; i < 1000; ++i) CHECK(!is_done(send));
    std::vector<std::uint8_t>& room = connection.buffers.room(message.size());
    Request* receive = connection.receive(room.data(), room.size());
    CHECK_OK(test_until_done(receive));
    CHECK_OK(test_until_done(send));
    std::fill(message.begin(), message.end(), std::uint8_t{0x5a});
    CHECK(room == make_message(0, kReferred));
  }
}

// All pipes that this process may have are taken.
TEST_CASE(without_pipes_messages_are_copied) {
  std::vector<std::unique_ptr<PagePipe>> pipes;
  while (auto pipe = PagePipe::open()) pipes.push_back(std::move(pipe));
  Connection connection;
  exchange(connection, std::vector<std::size_t>(8, kReferred), 0);
  // Streams that were refused once do not ask again: these are done without the receiver.
  std::vector<std::uint8_t>& message = connection.buffers.keep(make_message(8, kReferred));
  Request* send = connection.send(message.data(), message.size());
  CHECK_OK(test_until_done(send));
}

// Pages that the kernel cannot refer to any more when the message is half sent: it is an error, and no other byte
// arrives in its place.
TEST_CASE(memory_that_cannot_be_read_is_an_error) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  Sender sender;
  void* const data = ::mmap(nullptr, kReferred, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(data != MAP_FAILED);
  CHECK_EQ(::mprotect(static_cast<char*>(data) + kReferred / 2, page, PROT_NONE), 0);
  Request* send = nullptr;
  CHECK_OK(sender.comm->isend(data, kReferred, nullptr, &send));
  const Status status = test_until_done(send);
  check_names(status, "Bad address");
  check_names(status, "that host");
  ::munmap(data, kReferred);
}

TEST_CASE(small_chunks_and_the_first_stream_ask_for_nothing) {
  const std::vector<std::uint8_t> whole(200, 1);      // on stream 0
  const std::vector<std::uint8_t> striped(10000, 2);  // for the worker
  SendPolicy policy = referring();
  policy.inline_bytes = 1000;
  Sender sender(policy);
  CHECK_OK(test_until_done(sender.send(whole)));
  CHECK_OK(test_until_done(sender.send(striped)));
  CHECK(!read_frame(sender.peers[0].get()).header.acknowledge);
  CHECK(!read_frame(sender.peers[1].get()).header.acknowledge);
}

TEST_CASE(one_stream_asks_for_nothing) {
  const std::vector<std::uint8_t> message = make_message(0, kReferred);
  WorkerPool pool(1, 50, any_cpu());
  std::vector<std::unique_ptr<ByteStream>> streams;
  auto [near, far] = connected();
  streams.push_back(make_tcp_byte_stream(std::move(near)));
  std::unique_ptr<SendComm> comm;
  CHECK_OK(SendComm::create(std::move(streams), "receiver", nullptr, referring(), &pool, &comm));
  Request* send = nullptr;
  CHECK_OK(comm->isend(message.data(), message.size(), nullptr, &send));
  // Only the beginning: the calling thread writes no more while nobody tests the request.
  FrameHeader header;
  CHECK_OK(decode_frame_header(read_exactly(far.get(), kFrameHeaderBytes).data(), &header));
  CHECK(!header.acknowledge);
  comm.reset();
  pool.stop();
}

TEST_CASE(a_peer_that_cannot_acknowledge_gets_copies) {
  SendPolicy policy = referring();
  policy.refers = false;
  Sender sender(policy);
  std::vector<std::uint8_t>& message = sender.buffers.keep(make_message(0, kReferred));
  Request* send = sender.send(message);
  const Frame frame = read_frame(sender.peers[1].get());
  CHECK(!frame.header.acknowledge);
  CHECK(frame.payload == message);
  CHECK_OK(test_until_done(send));
  // What it says in the other direction nevertheless is not read, and stops nothing, not even in masses.
  std::vector<std::uint8_t> garbage(100000, 0xff);
  while (::send(sender.peers[1].get(), garbage.data(), garbage.size(), MSG_NOSIGNAL | MSG_DONTWAIT) > 0) continue;
  for (int i = 0; i < 20; ++i) {
    send = sender.send(message);
    CHECK(read_frame(sender.peers[1].get()).payload == message);
    CHECK_OK(test_until_done(send));
  }
}

TEST_CASE(an_acknowledgement_may_come_byte_by_byte) {
  Sender sender;
  std::vector<std::uint8_t>& message = sender.buffers.keep(make_message(0, kReferred));
  Request* send = sender.send(message);
  CHECK(read_frame(sender.peers[1].get()).payload == message);
  const std::vector<std::uint8_t> bytes = acknowledgement(kReferred);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (int j = 0; j < 100; ++j) CHECK(!is_done(send));
    write_all(sender.peers[1].get(), {bytes[i]});
  }
  CHECK_OK(test_until_done(send));
}

TEST_CASE(a_wrong_acknowledgement_fails_the_comm) {
  for (const std::uint64_t received : {std::uint64_t{5}, std::uint64_t{kReferred + 1}, ~std::uint64_t{0}}) {
    Sender sender;
    std::vector<std::uint8_t>& message = sender.buffers.keep(make_message(0, kReferred));
    Request* send = sender.send(message);
    CHECK(read_frame(sender.peers[1].get()).payload == message);
    write_all(sender.peers[1].get(), acknowledgement(received));
    const Status status = test_until_done(send);
    check_names(status, "acknowledged " + std::to_string(received) + " bytes");
    check_names(status, "that host");
    CHECK(has_ended(sender.peers[0].get()));
  }
}

TEST_CASE(the_end_names_the_message_that_is_not_acknowledged) {
  for (const bool resets : {false, true}) {
    for (const bool read_before : {false, true}) {
      Sender sender;
      std::vector<std::uint8_t>& message = sender.buffers.keep(make_message(0, kReferred));
      Request* first = sender.send(message);
      read_frame(sender.peers[1].get());
      write_all(sender.peers[1].get(), acknowledgement(kReferred));
      CHECK_OK(test_until_done(first));
      Request* second = sender.send(message);
      sender.written.wait_for(2 * (kReferred + kFrameHeaderBytes));
      if (read_before) read_frame(sender.peers[1].get());
      resets ? close_with_reset(sender.peers[1]) : sender.peers[1].reset();
      const Status status = test_until_done(second);
      check_names(status, "message 1");
      check_names(status, "that host");
      CHECK(has_ended(sender.peers[0].get()));
    }
  }
}

TEST_CASE(a_peer_that_ended_before_fails_the_next_message) {
  for (const bool resets : {false, true}) {
    Sender sender;
    resets ? close_with_reset(sender.peers[1]) : sender.peers[1].reset();
    std::vector<std::uint8_t>& message = sender.buffers.keep(make_message(0, 16 * kReferred));
    check_names(test_until_done(sender.send(message)), "that host");
  }
}

TEST_CASE(a_peer_that_ends_in_the_middle_of_a_message_fails_it) {
  for (const bool resets : {false, true}) {
    Sender sender;
    std::vector<std::uint8_t>& message = sender.buffers.keep(make_message(0, 64 * kReferred));
    Request* send = sender.send(message);
    read_exactly(sender.peers[1].get(), kReferred);
    resets ? close_with_reset(sender.peers[1]) : sender.peers[1].reset();
    check_names(test_until_done(send), "that host");
  }
}

// The worker looks at the stream when an acknowledgement and the end have both come: one event tells of both.
TEST_CASE(the_end_right_behind_an_acknowledgement_is_noticed) {
  for (const bool resets : {false, true}) {
    for (const std::size_t acknowledged : {1, 16}) {
      FirstFailure failures;
      auto [stalling_socket, stalling_peer] = connected();
      auto [near, far] = connected();
      StallingStream stalling(std::move(stalling_socket), &failures);
      Connection idle;  // the owner of the requests
      ChunkScheduler scheduler({2, kLeastChunk, kLeastChunk});
      SendStream stream(make_tcp_byte_stream(std::move(near)), &failures, 0, &scheduler, true, nullptr);
      EventLoopWorker worker(50, any_cpu());
      CHECK_OK(worker.start(0));
      std::uint64_t stream_id = 0;
      std::uint64_t stalling_id = 0;
      CHECK_OK(worker.attach(&stream, &stream_id));

      const std::vector<std::uint8_t> message = make_message(0, (acknowledged + 1) * kLeastChunk + kReferred);
      const std::size_t chunks = message.size() / kLeastChunk;
      Request request;
      request.start(idle.sender.get(), 7, const_cast<std::uint8_t*>(message.data()), message.size(), nullptr);
      scheduler.push(&request);
      worker.kick(stream_id);
      for (std::size_t i = 0; i < chunks; ++i) CHECK(read_frame(far.get()).header.acknowledge);

      CHECK_OK(worker.attach(&stalling, &stalling_id));
      worker.kick(stalling_id);
      stalling.wait_until_stalling();
      for (std::size_t i = 1; i <= acknowledged; ++i) write_all(far.get(), acknowledgement(i * kLeastChunk));
      resets ? close_with_reset(far) : far.reset();
      stalling.release();
      const std::int64_t end_ms = monotonic_ms() + 5000;
      while (failures.get().is_ok() && monotonic_ms() < end_ms) sched_yield();
      worker.detach(&stalling, stalling_id);
      worker.detach(&stream, stream_id);
      check_names(failures.get(), "message 7");
    }
  }
}

// A receiver that has everything closes at once, as at the end of a job.
TEST_CASE(a_receiver_that_is_done_may_close_at_once) {
  for (const int receiving_workers : {0, 2}) {
    for (int round = 0; round < 20; ++round) {
      Connection::Settings settings;
      settings.receiving_workers = receiving_workers;
      settings.policy.max_chunk_bytes = kLeastChunk;
      Connection connection(settings);
      std::vector<std::uint8_t>& message = connection.buffers.keep(make_message(0, 4 * kReferred));
      std::vector<std::uint8_t>& room = connection.buffers.room(message.size());
      Request* receive = connection.receive(room.data(), room.size());
      Request* send = connection.send(message.data(), message.size());
      CHECK_OK(test_until_done(receive));
      connection.receiver.reset();
      CHECK_OK(test_until_done(send));
      CHECK(room == message);
    }
  }
}

TEST_CASE(closing_a_sender_does_not_wait_for_acknowledgements) {
  Connection connection(one_worker_stream());
  std::vector<std::uint8_t>& message = connection.buffers.keep(make_message(0, kReferred));
  connection.send(message.data(), message.size());
  connection.written.wait_for(kFrameHeaderBytes + message.size());
  const std::int64_t begin_ms = monotonic_ms();
  connection.sender.reset();
  CHECK(monotonic_ms() - begin_ms < kDeadlineMs);
}

TEST_CASE(deregistered_memory_may_go_at_once) {
  for (const std::size_t bytes : {kReferred, 64 * kReferred}) {
    Connection connection;
    void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(data != MAP_FAILED);
    MemoryRegistration* registration = nullptr;
    CHECK_OK(connection.sender->register_memory(data, bytes, &registration));
    Request* send = connection.send(data, bytes, registration);
    connection.written.wait_for(kReferred);
    CHECK_OK(connection.sender->deregister_memory(registration));
    CHECK_EQ(::munmap(data, bytes), 0);
    const Status status = test_until_done(send);
    check_names(status, "aborted");
    // Nothing is left that could touch it: this would find the memory gone.
    std::vector<std::uint8_t>& room = connection.buffers.room(bytes);
    Request* receive = connection.receive(room.data(), room.size());
    [[maybe_unused]] const Status ignored = test_until_done(receive);
  }
}

// The caller may overwrite what it deregistered. Whatever the receiver reports as received must not be that, wherever
// the bytes are when the sender gives up: in its own socket,
TEST_CASE(an_aborted_sender_does_not_forge_messages) {
  for (const bool closes : {false, true}) {
    Connection connection(one_worker_stream());
    abort_and_overwrite(connection, 0, closes, [&](std::size_t bytes) { connection.written.wait_for(bytes); });
    receive_nothing_forged(connection);
  }
}

// in the receiver's,
TEST_CASE(an_aborted_sender_does_not_forge_messages_that_have_arrived) {
  Connection::Settings settings = one_worker_stream();
  settings.receive_buffer_bytes = 4 * kReferred;
  for (const bool closes : {false, true}) {
    Connection connection(settings);
    if (!connection.has_large_receive_buffers) {
      std::printf("        net.core.rmem_max is too small for a message\n");
      return;
    }
    abort_and_overwrite(connection, 0, closes, [&](std::size_t bytes) {
      wait_until([&] { return bytes_received(connection.fars[1].get()) >= bytes; }, "bytes at the receiver");
    });
    receive_nothing_forged(connection);
  }
}

// or in front of others that the receiver has no room for, and that an end of the stream would wait behind.
TEST_CASE(an_aborted_sender_does_not_forge_messages_with_others_behind_them) {
  for (const bool closes : {false, true}) {
    Connection connection(one_worker_stream());
    abort_and_overwrite(connection, 64 * kReferred, closes,
                        [&](std::size_t bytes) { connection.written.wait_for(bytes + kReferred / 2); });
    receive_nothing_forged(connection);
  }
}

// Streams are shut down while workers write: an error, and no signal that ends the process.
TEST_CASE(a_failure_in_mid_traffic_ends_both_comms) {
  for (int round = 0; round < 20; ++round) {
    Connection connection;
    std::vector<std::uint8_t>& message = connection.buffers.keep(make_message(0, 8 * kReferred));
    std::vector<std::uint8_t>& room = connection.buffers.room(message.size());
    Request* receive = connection.receive(room.data(), room.size());
    Request* send = connection.send(message.data(), message.size());
    connection.written.wait_for(static_cast<std::size_t>(round) * kLeastChunk + 1);
    const Status broken = Status::remote_error("broken");
    if (round % 2 == 0) {
      connection.sender->fail(broken);
    } else {
      connection.receiver->fail(broken);
    }
    const Status sent = test_until_done(send);
    const Status received = test_until_done(receive);
    if (sent.is_ok()) CHECK(room == message);
    CHECK(!received.is_ok() || room == message);
  }
}

// The other end does not read acknowledgements until there is no room for more: all are said in the end.
TEST_CASE(acknowledgements_that_found_no_room_are_written_later) {
  for (const int workers : {0, 1}) {
    constexpr std::size_t kChunks = 20000;
    std::vector<std::uint8_t> room(kChunks);
    std::uint8_t byte = 0;
    WorkerPool pool(workers, 50, any_cpu());
    std::vector<std::unique_ptr<ByteStream>> streams;
    std::array<OwnedFd, 2> peers;
    for (OwnedFd& peer : peers) {
      auto [near, far] = connected();
      set_buffer(near, SO_RCVBUF, 20000);
      set_buffer(far, SO_SNDBUF, 1);
      peer = std::move(near);
      streams.push_back(make_tcp_byte_stream(std::move(far)));
    }
    std::unique_ptr<RecvComm> comm;
    CHECK_OK(RecvComm::create(std::move(streams), "sender", nullptr, &pool, &comm));
    Request* receive = nullptr;
    CHECK_OK(comm->irecv(room.data(), room.size(), nullptr, &receive));
    const std::int64_t end_ms = monotonic_ms() + kDeadlineMs;
    std::vector<std::uint8_t> frames;
    for (std::size_t i = 0; i < kChunks; ++i) {
      std::vector<std::uint8_t> frame(kFrameHeaderBytes + 1, static_cast<std::uint8_t>(i));
      encode_frame_header({1, 0, i, kChunks, true}, frame.data());
      frames.insert(frames.end(), frame.begin(), frame.end());
    }
    std::size_t sent = 0;
    bool received = false;
    while (sent < frames.size() || !received) {
      CHECK(monotonic_ms() < end_ms);
      const ssize_t moved =
          ::send(peers[1].get(), frames.data() + sent, frames.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (moved > 0) sent += static_cast<std::size_t>(moved);
      if (!received) received = is_done(receive);
    }
    for (std::size_t i = 0; i < kChunks; ++i) CHECK_EQ(int{room[i]}, int{static_cast<std::uint8_t>(i)});
    // Without workers, it is the next call of the comm that goes on.
    CHECK_OK(comm->irecv(&byte, 1, nullptr, &receive));
    std::uint64_t last = 0;
    std::vector<std::uint8_t> bytes;
    while (last < kChunks) {
      CHECK(monotonic_ms() < end_ms);
      std::array<std::uint8_t, 1000> some;
      const ssize_t got = ::recv(peers[1].get(), some.data(), some.size(), MSG_DONTWAIT);
      if (got > 0) bytes.insert(bytes.end(), some.begin(), some.begin() + got);
      for (; bytes.size() >= kAcknowledgementBytes; bytes.erase(bytes.begin(), bytes.begin() + kAcknowledgementBytes)) {
        std::uint64_t acknowledged = 0;
        CHECK_OK(decode_acknowledgement(bytes.data(), &acknowledged));
        CHECK(acknowledged > last);
        last = acknowledged;
      }
      if (workers == 0) CHECK(!is_done(receive));
    }
    CHECK_EQ(last, std::uint64_t{kChunks});
    comm.reset();
    pool.stop();
  }
}

}  // namespace bagua_net

CHECK_MAIN
