#include "bench/rotating_traffic.h"

namespace bagua_net::bench {

RotatingTraffic::RotatingTraffic(RingTransport* transport, int comms, int in_flight, std::size_t max_message_bytes)
    : transport_(transport), comms_(comms), in_flight_(in_flight), max_message_bytes_(max_message_bytes) {
  for (Direction* direction : {&sent_, &received_}) {
    direction->under_way.reserve(static_cast<std::size_t>(in_flight));
    direction->waits_in_pass.assign(static_cast<std::size_t>(comms), 0);
  }
}

Status RotatingTraffic::allocate() {
  const auto slots = static_cast<std::size_t>(in_flight_);
  BAGUA_NET_RETURN_IF_ERROR(
      memory_.allocate(2 * slots * max_message_bytes_, std::to_string(2 * slots) + " messages under way"));
  for (std::size_t i = 0; i < slots; ++i) {
    sent_.free_slots.push(memory_.data() + i * max_message_bytes_);
    received_.free_slots.push(memory_.data() + (slots + i) * max_message_bytes_);
  }
  return Status::ok();
}

Status RotatingTraffic::register_memory() {
  for (int comm = 0; comm < comms_; ++comm) {
    BAGUA_NET_RETURN_IF_ERROR(transport_->register_buffer(comm, memory_.data(), memory_.bytes()));
  }
  return Status::ok();
}

void RotatingTraffic::free_memory() { memory_.reset(); }

void RotatingTraffic::begin(std::size_t message_bytes, std::uint64_t count, MessageAudit* audit) {
  message_bytes_ = message_bytes;
  count_ = count;
  audit_ = audit;
  for (Direction* direction : {&sent_, &received_}) direction->next = direction->completed = 0;
}

Status RotatingTraffic::pass(bool* progressed) {
  ++pass_;
  BAGUA_NET_RETURN_IF_ERROR(post(&received_, progressed));
  BAGUA_NET_RETURN_IF_ERROR(test(&received_, progressed));
  BAGUA_NET_RETURN_IF_ERROR(post(&sent_, progressed));
  return test(&sent_, progressed);
}

Status RotatingTraffic::post(Direction* direction, bool* progressed) {
  while (direction->next < count_ && !direction->free_slots.empty()) {
    Transfer transfer;
    transfer.slot = direction->free_slots.front();
    transfer.number = direction->next;
    const int comm = comm_of(transfer.number);
    if (direction == &sent_) {
      if (audit_ != nullptr) audit_->fill(transfer.number, transfer.slot, message_bytes_);
      BAGUA_NET_RETURN_IF_ERROR(transport_->isend(comm, transfer.slot, message_bytes_, &transfer.request));
    } else {
      BAGUA_NET_RETURN_IF_ERROR(transport_->irecv(comm, transfer.slot, message_bytes_, &transfer.request));
    }
    // No room. Later messages wait as well: the order of a comm's messages is what the peer relies on.
    if (transfer.request == nullptr) return Status::ok();
    direction->free_slots.pop();
    direction->under_way.push_back(transfer);
    ++direction->next;
    *progressed = true;
  }
  return Status::ok();
}

Status RotatingTraffic::test(Direction* direction, bool* progressed) {
  for (auto transfer = direction->under_way.begin(); transfer != direction->under_way.end();) {
    std::uint64_t& waits_in_pass = direction->waits_in_pass[static_cast<std::size_t>(comm_of(transfer->number))];
    if (waits_in_pass == pass_) {
      ++transfer;
      continue;
    }
    bool is_done = false;
    std::size_t bytes = 0;
    BAGUA_NET_RETURN_IF_ERROR(transport_->test(transfer->request, &is_done, &bytes));
    if (!is_done) {
      waits_in_pass = pass_;
      ++transfer;
      continue;
    }
    if (direction == &received_ && bytes != message_bytes_) {
      return Status::internal_error("message " + std::to_string(transfer->number) + " arrived with " +
                                    std::to_string(bytes) + " bytes instead of " + std::to_string(message_bytes_) +
                                    ": both ranks have to get the same command");
    }
    if (direction == &received_ && audit_ != nullptr) audit_->check(transfer->number, transfer->slot, message_bytes_);
    direction->free_slots.push(transfer->slot);
    transfer = direction->under_way.erase(transfer);
    ++direction->completed;
    *progressed = true;
  }
  return Status::ok();
}

std::string RotatingTraffic::describe() const {
  std::string text = std::to_string(received_.completed) + " of " + std::to_string(count_) + " messages received and " +
                     std::to_string(sent_.completed) + " sent";
  for (const Direction* direction : {&received_, &sent_}) {
    if (direction->under_way.empty()) continue;
    const std::uint64_t oldest = direction->under_way.front().number;
    text += std::string("; the oldest ") + (direction == &sent_ ? "send" : "receive") + " under way is message " +
            std::to_string(oldest) + " on comm " + std::to_string(comm_of(oldest));
  }
  return text;
}

}  // namespace bagua_net::bench
