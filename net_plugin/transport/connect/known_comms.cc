#include "transport/connect/known_comms.h"

#include <iterator>
#include <utility>

#include "os/process_room.h"

namespace bagua_net {

void AcceptedComms::add(const RandomId& comm_id, const RandomId& listen_id, HandshakeKeyRef key, const Reply& reply,
                        std::vector<std::uint32_t> serials, const std::shared_ptr<StreamArrivals>& arrivals) {
  for (auto comm = comms_.begin(); comm != comms_.end();) {
    comm = comm->second.arrivals.expired() ? comms_.erase(comm) : std::next(comm);
  }
  comms_[listen_id] = {std::move(key), comm_id, reply, std::move(serials), 0, arrivals};
}

HandshakeKeyRef AcceptedComms::find_key(const Hello& hello) const {
  const auto found = comms_.find(hello.listen_id);
  return found == comms_.end() || found->second.comm_id != hello.comm_id ? nullptr
                                                                         : find_key_of_listen(hello.listen_id);
}

HandshakeKeyRef AcceptedComms::find_key_of_listen(const RandomId& listen_id) const {
  const auto found = comms_.find(listen_id);
  return found == comms_.end() || found->second.arrivals.expired() ? nullptr : found->second.key;
}

HandshakeVerdict AcceptedComms::admit(const Hello& hello, Admission* admission) {
  const auto found = comms_.find(hello.listen_id);
  if (found == comms_.end() || found->second.comm_id != hello.comm_id) return HandshakeVerdict::kUnknownStream;
  Accepted& accepted = found->second;
  admission->arrivals = accepted.arrivals.lock();
  if (admission->arrivals == nullptr || admission->arrivals->is_closed()) return HandshakeVerdict::kUnknownStream;
  // One of the comm's first streams comes again if its connection was lost before the reply arrived.
  const bool is_first = hello.stream_index < accepted.reply.streams;
  const bool replaces_first = hello.stream_index == kReplacingFirstStream;
  // Of the others, each takes any place.
  std::uint32_t* const last =
      is_first || replaces_first ? &accepted.serials[replaces_first ? 0 : hello.stream_index] : nullptr;
  if (last != nullptr && !is_later(hello.serial, *last)) return HandshakeVerdict::kNoPlace;
  const bool recovers = (accepted.reply.features & kFeatureRecovery) != 0;
  if (hello.stream_index == kReplacingStream || replaces_first || (is_first && recovers)) {
    // Each may take the place of a stream of which only its sender knows that it is lost.
    if (!admission->arrivals->has_room(2 * kMaxStreams)) return HandshakeVerdict::kNoPlace;
    admission->joining = replaces_first || hello.stream_index == 0 ? Joining::kReplacesFirst : Joining::kReplaces;
  } else if (is_first && (accepted.returned & (std::uint64_t{1} << hello.stream_index)) == 0) {
    accepted.returned |= std::uint64_t{1} << hello.stream_index;
  } else if (!admission->arrivals->has_room(settings_.most_streams()) || optional_descriptors() == 0) {
    return HandshakeVerdict::kUnknownStream;
  }
  if (last != nullptr) *last = hello.serial;
  admission->arrivals->announce();
  admission->reply = accepted.reply;
  if (is_joining(hello.stream_index)) admission->reply.streams = 1;
  return HandshakeVerdict::kAccepted;
}

void OpenedComms::add(const JoinTicket& ticket, const std::shared_ptr<StreamArrivals>& arrivals) {
  for (auto comm = comms_.begin(); comm != comms_.end();) {
    comm = comm->second.arrivals.expired() ? comms_.erase(comm) : std::next(comm);
  }
  comms_[ticket.hello.comm_id] = {ticket.hello.listen_id, ticket.key, arrivals};
}

bool OpenedComms::has(const RandomId& comm_id) const {
  const auto found = comms_.find(comm_id);
  if (found == comms_.end()) return false;
  const std::shared_ptr<StreamArrivals> arrivals = found->second.arrivals.lock();
  return arrivals != nullptr && !arrivals->is_closed();
}

HandshakeKeyRef OpenedComms::find_key(const RandomId& listen_id) const {
  for (const auto& [comm_id, comm] : comms_) {
    if (comm.listen_id == listen_id) return comm.key;
  }
  return nullptr;
}

}  // namespace bagua_net
