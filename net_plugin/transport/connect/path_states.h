// PathStates: what this process knows of its paths ([Note: pairs of interfaces] in transport/connect/nic_paths.h). One
// record for each interface of this host and host that is reached over it, and no other record of that: handshakes,
// comms and the recovery thread report what they find out, and ask before they use a path. Comms with one path have
// none here.
//
//   untried   nothing is known of it
//   works     it has connected, or a packet was answered
//   refused   it has never worked, and two connections in a row have failed
//   silent    data was not answered, while the peer's host answered over another path; or the last probe or connections
//             were not
//   gone      announced: the interface has no link, there is no route any more, or the peer has lost its address
//
//   untried, refused  --it connects--> works
//   untried  --two failures--> refused  --a minute--> untried
//   works  --no answer (transport/comm/peer_silence.h)--> silent  --it connects, a packet is answered--> works
//   any  --the kernel of this host--> gone  --the kernel takes it back--> what it was
//   any  --the peer, of its address--> gone  --it connects, a packet is answered--> works
//
// Connections go over paths that are untried or work; where there is none, over any. Streams that have left a path move
// back once it works, which a probe finds out (PathProbe). A listener sees one a second, however
// many comms ask.
//
// Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/log_sink.h"
#include "base/mutex.h"
#include "base/status.h"
#include "transport/chunks/path_shares.h"
#include "transport/connect/nic_paths.h"

namespace bagua_net {

// PathProbe: whether packets as large as those of a chunk are answered over a path. A connection of its own to the
// peer's listener, and one packet: a hello that names nothing, and zeros behind it. Never blocks; ends when it is
// destroyed.
class PathProbe {
 public:
  enum class State {
    kConnecting,
    kWaiting,   // the packet is under way
    kAnswered,  // the peer's kernel has it
    kFailed,    // to connect
  };
  virtual ~PathProbe() = default;
  virtual State look() = 0;
  // From kWaiting on.
  virtual std::size_t packet_bytes() const = 0;
};

// nullptr: this host cannot, having no route or no descriptor.
std::unique_ptr<PathProbe> begin_tcp_probe(const NicPath& path);

// What begins one; tests have another network.
using BeginProbe = std::function<std::unique_ptr<PathProbe>(const NicPath&)>;

class PathStates {
 public:
  // turn: differs between the processes of a host.
  explicit PathStates(std::size_t turn = 0, BeginProbe begin_probe = begin_tcp_probe)
      : turn_(turn), begin_probe_(std::move(begin_probe)) {}

  // What the kernel of this host announces.
  void set_link(const NetworkInterface& interface, bool is_usable);
  void look_at_routes();
  // What the peer announces.
  void on_address_lost(const NicPath& path);
  // "the network interface eth1 is gone", or another reason; empty: it is not gone.
  std::string why_gone(const NicPath& path);
  // The same of an address of this host, which only its interface can lose.
  std::string why_gone(const SocketAddress& own);

  // Of these, the paths to use, by index. Never empty.
  std::vector<std::size_t> usable(const std::vector<NicPath>& paths, std::int64_t now_ms);
  bool is_left_out(const NicPath& path, std::int64_t now_ms);
  bool has_worked(const NicPath& path);
  // round_trip_us: of the handshake; 0: unknown.
  void on_connected(const NicPath& path, std::int64_t round_trip_us, std::int64_t now_ms);
  // No answer, or not from the listener. Returns what the log is to say; without a text: nothing.
  RareLog::Line on_failed(const NicPath& path, const Status& why, std::int64_t now_ms);
  // Of the paths to use, the one for the first stream of a new comm, which carries small messages: the fastest, by what
  // the kernel says, of those with about the shortest round trip. Several such take turns: with each comm to this peer,
  // and beginning with another one for each peer and process.
  std::size_t begin_comm(const std::vector<NicPath>& paths, std::int64_t now_ms);
  // `chosen`, or another path to use if its round trip is much shorter.
  std::size_t nearest(const std::vector<NicPath>& paths, std::size_t chosen, std::int64_t now_ms);

  // A stream over the path was not answered.
  void on_silent(const NicPath& path, std::int64_t now_ms);
  // When that was last; 0: never.
  std::int64_t silent_ms(const NicPath& path);
  // Never blocks. True: a packet was answered within the last second. Otherwise it is being tried, and the answer is
  // that of a later call.
  bool works(const NicPath& path, std::int64_t now_ms);
  // A connection is open, and the packet under way: the answer is expected within a round trip.
  bool is_due(const NicPath& path);
  // When the last packet was sent that was answered; 0: never.
  std::int64_t answered_ms(const NicPath& path);
  // Connections can be opened, and packets of this size are not answered: of each such time, to the first who asks.
  // Otherwise 0.
  std::size_t take_lost_packet_bytes(const NicPath& path);

  // A path that works for connections and loses their data is returned to less and less often. Streams have left it,
  // and have returned to it.
  void on_left(const NicPath& path, std::int64_t now_ms);
  void on_returned(const NicPath& path, std::int64_t now_ms);
  bool may_return(const NicPath& path, std::int64_t now_ms);

  // What is under way over it, of all comms. rate: what the kernel says of the interface, bytes per ns; 0: nothing.
  std::shared_ptr<PathLoad> load(const NicPath& path, double rate);

 private:
  struct Record {
    NicPath path;
    bool is_routed = false;         // when that was looked at last
    bool has_lost_route = false;    // it had one before
    bool has_lost_address = false;  // the peer says so

    bool has_worked = false;
    std::int64_t worked_ms = 0;      // when it connected last, or a packet was found to be answered
    std::int64_t round_trip_us = 0;  // the shortest of its handshakes; 0: unknown
    int handshakes = 0;              // of known round trip
    int failures = 0;                // connections in a row
    std::int64_t refused_until_ms = 0;
    std::int64_t silent_ms = 0;

    std::unique_ptr<PathProbe> probe;
    std::int64_t asked_ms = 0;       // when it began
    std::int64_t sent_ms = 0;        // when a packet was sent over it; 0: it is not open yet
    std::int64_t found_ms = 0;       // when the last packet was found to be answered; 0: never
    std::int64_t answered_ms = 0;    // when that packet was sent
    std::int64_t unanswered_ms = 0;  // when that was last found of a probe, or of two connections in a row
    int lost_packets = 0;            // in a row
    bool is_told = false;            // of them
    std::size_t packet_bytes = 0;

    std::int64_t return_ms = 0;  // from when on streams may return
    std::int64_t pause_ms = 0;
    std::int64_t returned_ms = 0;
    std::shared_ptr<PathLoad> load;
  };
  using Key = std::pair<std::string, std::string>;

  Record& record(const NicPath& path) REQUIRES(mutex_);
  // nullptr: it is untried.
  const Record* find(const NicPath& path) const REQUIRES(mutex_);
  std::string describe_gone(const Record& record) const REQUIRES(mutex_);
  bool leaves_out(const NicPath& path, std::int64_t now_ms) const REQUIRES(mutex_);
  std::vector<std::size_t> usable_of(const std::vector<NicPath>& paths, std::int64_t now_ms) const REQUIRES(mutex_);
  std::size_t nearest_of(const std::vector<NicPath>& paths, std::size_t chosen, std::int64_t now_ms) const
      REQUIRES(mutex_);
  // The round trip over this path is more than twice as long, and longer by more than noise_us.
  bool is_longer(const NicPath& path, const NicPath& than, std::int64_t noise_us) const REQUIRES(mutex_);
  void look_for_answer(Record& record, std::int64_t now_ms) REQUIRES(mutex_);
  static void note_working(Record& record, std::int64_t now_ms);

  const std::size_t turn_;
  const BeginProbe begin_probe_;
  Mutex mutex_;
  std::map<Key, Record> records_ GUARDED_BY(mutex_);  // by the interface's name and the peer's address
  std::map<std::string, NetworkInterface> lost_links_ GUARDED_BY(mutex_);
  std::map<std::string, std::size_t> turns_ GUARDED_BY(mutex_);  // of the next comm, by the peer's address
};

}  // namespace bagua_net
