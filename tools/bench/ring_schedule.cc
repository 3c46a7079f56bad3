#include "bench/ring_schedule.h"

#include <unistd.h>

#include "bench/driver_protocol.h"

namespace bagua_net::bench {

RingSchedule::RingSchedule(RingTransport* transport, const RingGeometry& geometry)
    : transport_(transport),
      geometry_(geometry),
      depth_(static_cast<std::size_t>(geometry.depth)),
      last_step_(2 * (geometry.nranks - 1) - 1),
      channels_(static_cast<std::size_t>(geometry.channels)) {}

void RingSchedule::allocate_slots() {
  // Slots begin on pages, as NCCL's do: no two of them share a cache line.
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t stride = (geometry_.slice_bytes + page - 1) / page * page;
  for (std::size_t index = 0; index < channels_.size(); ++index) {
    Channel& channel = channels_[index];
    channel.memory.allocate(2 * depth_ * stride, "slots of channel " + std::to_string(index));
    for (std::size_t slot = 0; slot < 2 * depth_; ++slot)
      channel.free_slots.push(channel.memory.data() + slot * stride);
    transport_->register_buffer(static_cast<int>(index), channel.memory.data(), channel.memory.bytes());
  }
}

void RingSchedule::begin(const RingPlan& plan, AllReduceKernel* kernel) {
  kernel_ = kernel;
  active_channels_ = plan.active_channels();
  unfinished_channels_ = active_channels_;
  for (int index = 0; index < active_channels_; ++index) {
    Channel& channel = channels_[static_cast<std::size_t>(index)];
    channel.next_receive = RingCursor(plan, index, RingDirection::kReceive);
    channel.next_send = RingCursor(plan, index, RingDirection::kSend);
    channel.received = 0;
    channel.sent = 0;
    channel.finished = false;
  }
}

bool RingSchedule::pass() {
  bool progressed = false;
  for (int index = 0; index < active_channels_; ++index) {
    Channel& channel = channels_[static_cast<std::size_t>(index)];
    if (channel.finished) continue;
    progressed |= post_receive(index, &channel);
    progressed |= test_receive(index, &channel);
    progressed |= post_send(index, &channel);
    progressed |= test_send(index, &channel);
    if (channel.next_receive.at_end() && channel.next_send.at_end() && channel.receives.empty() &&
        channel.sends.empty()) {
      channel.finished = true;
      --unfinished_channels_;
      progressed = true;
    }
  }
  return progressed;
}

bool RingSchedule::post_receive(int index, Channel* channel) {
  if (channel->next_receive.at_end() || channel->receives.size() + channel->ready_slots.size() >= depth_) return false;
  Transfer transfer{nullptr, channel->free_slots.front(), channel->next_receive.message()};
  // The whole slot, as NCCL posts it: the sender decides how much comes.
  transfer.request = transport_->irecv(index, transfer.slot, geometry_.slice_bytes);
  if (transfer.request == nullptr) return false;
  channel->free_slots.pop();
  channel->receives.push(transfer);
  channel->next_receive.advance();
  return true;
}

bool RingSchedule::test_receive(int index, Channel* channel) {
  if (channel->receives.empty()) return false;
  const Transfer transfer = channel->receives.front();
  const std::optional<std::size_t> bytes = transport_->test(transfer.request);
  if (!bytes) return false;
  if (*bytes != transfer.message.bytes) {
    throw Failure("channel " + std::to_string(index) + " received a message of " + std::to_string(*bytes) +
                  " bytes where step " + std::to_string(transfer.message.step) + " has " +
                  std::to_string(transfer.message.bytes) + ": give all ranks the same sizes and options");
  }
  channel->receives.pop();
  ++channel->received;
  if (kernel_ != nullptr) kernel_->receive(transfer.message, transfer.slot);
  if (transfer.message.step == last_step_) {
    channel->free_slots.push(transfer.slot);
  } else {
    channel->ready_slots.push(transfer.slot);
  }
  return true;
}

bool RingSchedule::post_send(int index, Channel* channel) {
  if (channel->next_send.at_end() || channel->sends.size() >= depth_) return false;
  const RingMessage& message = channel->next_send.message();
  const bool is_own = message.step == 0;
  if (!is_own && channel->ready_slots.empty()) return false;
  Transfer transfer{nullptr, is_own ? channel->free_slots.front() : channel->ready_slots.front(), message};
  if (is_own && kernel_ != nullptr) kernel_->fill(message, transfer.slot);
  transfer.request = transport_->isend(index, transfer.slot, message.bytes);
  if (transfer.request == nullptr) return false;
  if (is_own) {
    channel->free_slots.pop();
  } else {
    channel->ready_slots.pop();
  }
  channel->sends.push(transfer);
  channel->next_send.advance();
  return true;
}

bool RingSchedule::test_send(int index, Channel* channel) {
  if (channel->sends.empty()) return false;
  const Transfer transfer = channel->sends.front();
  const std::optional<std::size_t> bytes = transport_->test(transfer.request);
  if (!bytes) return false;
  if (*bytes != transfer.message.bytes) {
    throw Failure("channel " + std::to_string(index) + ": test reports " + std::to_string(*bytes) +
                  " bytes for a send of " + std::to_string(transfer.message.bytes) + ": a defect of the transport");
  }
  channel->sends.pop();
  ++channel->sent;
  channel->free_slots.push(transfer.slot);
  return true;
}

std::string RingSchedule::describe() const {
  std::string text;
  for (int index = 0; index < active_channels_; ++index) {
    const Channel& channel = channels_[static_cast<std::size_t>(index)];
    text += (index == 0 ? "channel " : "; channel ") + std::to_string(index) + ": ";
    text += channel.finished ? "finished"
                             : std::to_string(channel.received) + " messages received and " +
                                   std::to_string(channel.sent) + " sent, " + std::to_string(channel.receives.size()) +
                                   " receives and " + std::to_string(channel.sends.size()) + " sends under way";
  }
  return text;
}

}  // namespace bagua_net::bench
