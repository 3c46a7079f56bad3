// ConnectionService where a comm has several paths, or a device several interfaces. All of them lead over loopback.
#include <poll.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/check.h"
#include "support/connection_ends.h"
#include "support/cut_connections.h"
#include "transport/connect/path_health.h"

namespace bagua_net {
namespace {

constexpr in_addr_t kElsewhere = INADDR_LOOPBACK + 1;

NicPath path_to(const SocketAddress& address) { return {loopback(), address, 0}; }

// Nobody listens there.
SocketAddress refusing_address() { return RawListener().address; }

// A comm of one stream, and a ticket for another one instead.
struct Connected {
  ListeningService listening;
  ConnectingService connecting{listening.handle_bytes.data()};
  EstablishedConnection accepted = listening.accept_from(&connecting);
  std::shared_ptr<StreamArrivals> arrivals = std::make_shared<StreamArrivals>();

  void replace(std::vector<NicPath> paths, std::size_t first_path) {
    JoinTicket ticket = connecting.connection.ticket;
    ticket.paths = std::move(paths);
    ticket.first_path = first_path;
    ticket.hello.stream_index = kReplacingStream;
    connecting.service.join(ticket, 1, arrivals);
  }
};

}  // namespace

TEST_CASE(a_replacement_is_tried_over_its_path_and_then_over_the_others) {
  Connected comm;
  for (const std::size_t first : {0u, 1u, 2u}) {
    comm.replace({path_to(refusing_address()), path_to(comm.listening.address), path_to(refusing_address())}, first);
    std::vector<StreamArrivals::Arrival> arrived;
    wait_until(
        [&] {
          arrived = comm.arrivals->take();
          return !arrived.empty();
        },
        "the replacement");
    CHECK_EQ(arrived[0].path, std::size_t{1});
  }
}

// With one interface down, a killed process is noticed as soon as with all.
TEST_CASE(a_process_that_has_ended_is_noticed_though_another_path_is_silent) {
  Connected comm;
  SocketAddress silent = loopback(kElsewhere).address;
  OwnedFd listener;
  CHECK_OK(tcp_listen(&silent, &listener));
  silence(listener.get());
  comm.replace({path_to(silent), path_to(refusing_address())}, 0);
  std::vector<StreamArrivals::Failure> failures;
  wait_until(
      [&] {
        failures = comm.arrivals->take_failures();
        return !failures.empty();
      },
      "the failure");
  CHECK(failures[0].why.find("the peer's process has ended") != std::string::npos);
}

TEST_CASE(interfaces_without_their_address_are_left_out_of_the_handle) {
  ConnectionService service(settings_with(1));
  CHECK_OK(service.start());
  const NetworkInterface lost = interface_at("lost", 0x0a4d4d4d);  // 10.77.77.77
  HandleBytes bytes{};
  RandomId id{};
  ConnectHandle handle;
  CHECK_OK(service.listen({lost, loopback(), lost, loopback(kElsewhere)}, bytes.data(), &id));
  CHECK_OK(decode_connect_handle(bytes.data(), &handle));
  CHECK(handle.address == loopback().address.bytes());
  CHECK_EQ(handle.further.size(), std::size_t{1});
  // None is left.
  const Status status = service.listen({lost, lost}, bytes.data(), &id);
  CHECK(status.message().find("listening on interface lost (it has lost this address") != std::string::npos);
}

TEST_CASE(a_path_works_again_once_a_connection_was_opened_over_it) {
  PathHealth probes;
  std::optional<RawListener> listener(std::in_place);
  const NicPath path = path_to(listener->address);
  std::int64_t now_ms = 1000000;
  CHECK(!probes.works(path, now_ms));
  wait_until([&] { return probes.works(path, now_ms); }, "the connection");
  // All comms of the process get that answer, for a second.
  listener.reset();
  CHECK(probes.works(path, now_ms + 999));
  for (int look = 0; look < 5; ++look) {
    now_ms += 1000;
    CHECK(!probes.works(path, now_ms));
  }
}

// However many comms ask, and however soon the answer comes: a firewall may refuse a pair for as long as the job runs.
TEST_CASE(a_path_is_tried_once_a_second) {
  PathHealth probes;
  SocketAddress address = refusing_address();
  const NicPath path = path_to(address);
  std::int64_t now_ms = 1000000;
  CHECK(!probes.works(path, now_ms));
  OwnedFd listener;
  CHECK_OK(tcp_listen(&address, &listener));
  const auto was_tried = [&] {
    pollfd state{listener.get(), POLLIN, 0};
    return ::poll(&state, 1, 0) > 0;
  };
  for (int comm = 0; comm < 10; ++comm) CHECK(!probes.works(path, now_ms += 99));
  CHECK(!was_tried());
  CHECK(!probes.works(path, now_ms += 10));
  CHECK(was_tried());
}

}  // namespace bagua_net

CHECK_MAIN
