// SendStream's part in its end: in order, or with chunks that are to be sent again.
#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/stream/send_stream.h"

namespace bagua_net {

StreamProgress SendStream::end_of_output(int error_number) {
  if (error_number != 0) {
    if (!recovers()) {
      end();
      return fail(Status::remote_error(Status::system_error("send", error_number).message()));
    }
    // The peer may have said why before it closed the connection.
    if (!is_over()) listen();
    if (!is_over()) peer_is_gone(error_number);
  }
  if (state() == StreamState::kLost || is_given_back_) return StreamProgress::kEnded;
  // The peer has ended the stream in order, although there is more to send.
  if (has_chunk_ || take_chunk()) {
    return fail(Status::remote_error("the peer closed the connection before it had received message " +
                                     std::to_string(chunk_.message_number) +
                                     ": its process ended or aborted; see that rank's log"));
  }
  return StreamProgress::kEnded;
}

void SendStream::peer_is_gone(int error_number) {
  const std::string how = error_number == 0 ? "the peer closed the connection"
                                            : Status::system_error("the connection was lost", error_number).message();
  if (recovers() && !unacknowledged_.peer_has_closed()) {
    lose(Status::remote_error(how));
    return;
  }
  end();
  if (!unacknowledged_.has_requests() && !has_chunk_) return;
  const std::uint64_t message =
      unacknowledged_.has_requests() ? unacknowledged_.first_message() : chunk_.message_number;
  fail(Status::remote_error(how + " before the peer had received message " + std::to_string(message) +
                            ": its process ended or aborted; see that rank's log"));
}

std::vector<Chunk> SendStream::take_unfinished() {
  std::vector<Chunk> chunks = unacknowledged_.take_all();
  if (std::exchange(has_chunk_, false)) chunks.push_back(std::move(chunk_));
  // A copy that asks follows its chunk, and the peer may still have it: the chunk is sent again with a later attempt.
  for (std::size_t i = chunks.size(); i > 1; --i) {
    if (chunks[i - 1].asks_only) chunks[i - 2].attempt = chunks[i - 1].attempt;
  }
  chunks.erase(std::remove_if(chunks.begin(), chunks.end(), [](const Chunk& chunk) { return chunk.asks_only; }),
               chunks.end());
  for (Chunk& chunk : chunks) {
    ++chunk.attempt;
    chunk.by_reference = false;
  }
  return chunks;
}

// Otherwise the peer would read memory that belongs to the application again, and take its contents for the message.
void SendStream::release_memory() {
  if (unacknowledged_.has_references() || (has_chunk_ && chunk_.by_reference)) reset();
}

void SendStream::send_end(std::uint64_t messages, bool of_stream) {
  if (!recovers() || is_over() || has_chunk_) return;
  FrameHeader end;
  end.end = true;
  end.acknowledge = of_stream;
  end.message_number = messages;
  encode_frame_header(end, header_.data());
  if (checksums_) append_frame_checksums(0, header_.data());
  const iovec piece{header_.data(), header_bytes_};
  // If there is no room for the whole frame, the peer waits for another connection, until it finds that the comm is
  // gone.
  [[maybe_unused]] const ssize_t ignored = write(&piece, 1, header_bytes_);
}

bool SendStream::end_in_order() {
  set_blocked(true);  // until the poller reports the acknowledgement
  listen();
  if (is_over()) return true;
  if (!unacknowledged_.is_empty()) {
    ask_for_acknowledgement();
    return !has_chunk_;
  }
  give_back();
  is_given_back_ = true;
  end();
  return true;
}

bool SendStream::is_delivered() {
  if (!is_over() && !unacknowledged_.is_empty()) listen();
  if (state() == StreamState::kEnded) return true;
  if (has_chunk_) return false;
  // As long as the stream is not lost, data in the peer's kernel counts as delivered.
  return unacknowledged_.is_empty() || (!is_over() && undelivered_bytes() == 0);
}

void SendStream::ask_for_acknowledgement() {
  if (!recovers() || is_over() || has_chunk_ || unasked_chunks_ == 0) return;
  if (unacknowledged_.is_empty() || unacknowledged_.is_full()) return;
  const Chunk& last = unacknowledged_.last();  // a copy, since others ask
  chunk_ = Chunk{};
  chunk_.asks_only = true;
  chunk_.message_number = last.message_number;
  chunk_.message_bytes = last.message_bytes;
  chunk_.offset = last.offset;
  chunk_.bytes = last.bytes;
  chunk_.attempt = last.attempt + 1;
  chunk_.copy = blocks_.take(header_bytes_ + last.bytes);
  std::uint8_t* const payload = chunk_.copy.bytes.get() + header_bytes_;
  if (last.bytes > 0) std::memcpy(payload, last.data, last.bytes);
  chunk_.data = payload;
  has_chunk_ = true;
  begin_chunk();
}

}  // namespace bagua_net
