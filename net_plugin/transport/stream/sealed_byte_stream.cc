#include "transport/stream/sealed_byte_stream.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "wire/byte_order.h"

namespace bagua_net {
namespace {

// Sealed and written at a time: it stays in the cache until the kernel has copied it.
constexpr std::size_t kBatchBytes = 4 * kMaxRecordBytes;
constexpr std::size_t kFirstReadBytes = 4096;
// A chunk of the default size and its header. With half of it, both ends together take 5 to 12 % more CPU time.
constexpr std::size_t kMaxReadBytes = 17 * kMaxRecordBytes;
// A header gets a record of its own before a payload of this size, which can then be opened in its place.
constexpr std::size_t kOwnRecordBytes = 8192;

// Memory that grows, and keeps what it holds in [begin, end).
struct Buffer {
  std::unique_ptr<std::uint8_t[]> memory;
  std::size_t capacity = 0;
  std::size_t begin = 0;
  std::size_t end = 0;

  std::uint8_t* data() { return memory.get() + begin; }
  std::size_t size() const { return end - begin; }
  std::size_t room() const { return capacity - end; }
  void resize(std::size_t bytes) {
    if (bytes > capacity) {
      std::unique_ptr<std::uint8_t[]> larger(new std::uint8_t[bytes]);
      if (size() > 0) std::memcpy(larger.get(), data(), size());
      memory = std::move(larger);
      capacity = bytes;
    } else if (begin > 0) {
      std::memmove(memory.get(), data(), size());
    }
    end = size();
    begin = 0;
  }
};

// A place in pieces, which goes forward.
class Place {
 public:
  Place(const iovec* pieces, std::size_t count) : piece_(pieces), end_(pieces + count) { skip_empty(); }

  bool is_at_end() const { return piece_ == end_; }
  std::uint8_t* data() const { return static_cast<std::uint8_t*>(piece_->iov_base) + offset_; }
  std::size_t contiguous() const { return is_at_end() ? 0 : piece_->iov_len - offset_; }
  std::size_t next_contiguous() const { return piece_ + 1 < end_ ? piece_[1].iov_len : 0; }
  std::size_t left() const {
    std::size_t bytes = contiguous();
    if (is_at_end()) return 0;
    for (const iovec* next = piece_ + 1; next < end_; ++next) bytes += next->iov_len;
    return bytes;
  }
  void advance(std::size_t bytes) {
    while (bytes > 0 && !is_at_end()) {
      const std::size_t step = std::min(bytes, contiguous());
      offset_ += step;
      bytes -= step;
      skip_empty();
    }
  }
  // Both advance by what was copied.
  void copy_to(std::uint8_t* out, std::size_t bytes) {
    for (std::size_t done = 0; done < bytes;) {
      const std::size_t step = std::min(bytes - done, contiguous());
      std::memcpy(out + done, data(), step);
      done += step;
      advance(step);
    }
  }
  std::size_t fill_from(const std::uint8_t* in, std::size_t bytes) {
    std::size_t done = 0;
    while (done < bytes && !is_at_end()) {
      const std::size_t step = std::min(bytes - done, contiguous());
      std::memcpy(data(), in + done, step);
      done += step;
      advance(step);
    }
    return done;
  }

 private:
  void skip_empty() {
    while (!is_at_end() && offset_ == piece_->iov_len) {
      ++piece_;
      offset_ = 0;
    }
  }

  const iovec* piece_;
  const iovec* const end_;
  std::size_t offset_ = 0;
};

class SealedByteStream final : public ByteStream {
 public:
  SealedByteStream(std::unique_ptr<ByteStream> bytes, Protected<ConnectionKeys> keys, std::uint64_t records_per_key)
      : bytes_(std::move(bytes)), keys_(std::move(keys)), records_per_key_(records_per_key) {}

  ssize_t read(const iovec* pieces, std::size_t count) override {
    Place place(pieces, count);
    std::size_t done = 0;
    bool is_drained = false;
    while (!place.is_at_end()) {
      if (opened_ > 0) {
        const std::size_t copied = place.fill_from(in_.data(), opened_);
        done += copied;
        take_opened(copied);
        continue;
      }
      const ssize_t opened = open_record(&place);
      if (opened < 0) return -1;  // nothing that came with it is used, either
      if (opened > 0) {
        done += static_cast<std::size_t>(opened);
        continue;
      }
      if (opened_ > 0) continue;
      // With nothing to show, it has to see the end of input, if that is what comes.
      if (is_drained && done > 0) break;
      const ssize_t received = receive(&is_drained);
      if (received > 0) continue;
      if (done == 0) return received;
      break;
    }
    return static_cast<ssize_t>(done);
  }

  ssize_t write(const iovec* pieces, std::size_t count) override {
    Place place(pieces, count);
    if (place.left() < pending_) {
      errno = EINVAL;
      return -1;
    }
    place.advance(pending_);
    std::size_t done = 0;
    int error_number = EAGAIN;
    while (out_.size() > 0 || !place.is_at_end()) {
      if (out_.size() == 0 && !seal_batch(&place)) {
        error_number = EOVERFLOW;  // after more records than any connection carries
        break;
      }
      const iovec piece{out_.data(), out_.size()};
      const ssize_t sent = bytes_->write(&piece, 1);
      if (sent < 0) {
        error_number = errno;
        break;
      }
      sent_ += static_cast<std::uint64_t>(sent);
      out_.begin += static_cast<std::size_t>(sent);
      if (out_.size() > 0) break;
      done += std::exchange(pending_, 0);
    }
    reported_ += done;
    if (done > 0) return static_cast<ssize_t>(done);
    errno = error_number;
    return -1;
  }

  bool delivery(Delivery* delivery) const override { return bytes_->delivery(delivery); }
  bool peer_liveness(PeerLiveness* liveness) const override { return bytes_->peer_liveness(liveness); }
  void probe_when_idle() override { bytes_->probe_when_idle(); }
  std::size_t undelivered_bytes() const override { return bytes_->undelivered_bytes(); }
  std::uint64_t overhead_bytes() const override { return sent_ - reported_; }
  int fd() const override { return bytes_->fd(); }
  void shutdown() override { bytes_->shutdown(); }
  void reset() override { bytes_->reset(); }
  bool is_broken() const override { return bytes_->is_broken(); }

 private:
  void count_record(CipherState* key, std::uint64_t* records) const {
    if (++*records % records_per_key_ == 0) key->rekey();
  }

  bool seal_batch(Place* place) {
    const std::size_t payload = std::min(place->left(), kBatchBytes);
    // One record more, for a header.
    const std::size_t records = (payload + kMaxRecordBytes - 1) / kMaxRecordBytes + 1;
    out_.begin = out_.end = 0;
    out_.resize(payload + records * kRecordOverhead);
    while (pending_ < payload && out_.room() > kRecordOverhead) {
      std::size_t bytes = std::min({payload - pending_, kMaxRecordBytes, out_.room() - kRecordOverhead});
      if (place->contiguous() < bytes && place->next_contiguous() >= kOwnRecordBytes) bytes = place->contiguous();
      if (!seal_record(place, bytes)) return false;
      pending_ += bytes;
    }
    return true;
  }

  bool seal_record(Place* place, std::size_t bytes) {
    std::uint8_t* const record = out_.memory.get() + out_.end;
    std::uint8_t* const sealed = record + kRecordLengthBytes;
    std::uint8_t length[2];
    store_little_endian<std::uint16_t>(length, static_cast<std::uint16_t>(bytes));
    if (!keys_->out.seal(record, length, sizeof length)) return false;
    const std::uint8_t* payload = place->data();
    if (place->contiguous() >= bytes) {
      place->advance(bytes);
    } else {
      place->copy_to(sealed, bytes);
      payload = sealed;
    }
    if (!keys_->out.seal(sealed, payload, bytes)) return false;
    out_.end += bytes + kRecordOverhead;
    count_record(&keys_->out, &records_out_);
    return true;
  }

  // The bytes that it has put to their place; 0: none yet, or the payload waits in in_; -1 with errno.
  ssize_t open_record(Place* place) {
    if (is_bad_) return bad();
    if (length_ == 0) {
      if (in_.size() < kRecordLengthBytes) return 0;
      std::uint8_t length[2];
      if (!keys_->in.open(length, in_.data(), sizeof length)) return bad();
      length_ = load_little_endian<std::uint16_t>(length);
      if (length_ < 1 || length_ > kMaxRecordBytes) return bad();
      in_.begin += kRecordLengthBytes;
    }
    if (in_.size() < length_ + kTagBytes) return 0;
    const std::size_t bytes = length_;
    const bool fits = place->contiguous() >= bytes;
    if (!keys_->in.open(fits ? place->data() : in_.data(), in_.data(), bytes)) return bad();
    length_ = 0;
    count_record(&keys_->in, &records_in_);
    if (!fits) {
      opened_ = bytes;
      return 0;
    }
    place->advance(bytes);
    in_.begin += bytes + kTagBytes;
    return static_cast<ssize_t>(bytes);
  }

  ssize_t bad() {
    is_bad_ = true;
    errno = EBADMSG;
    return -1;
  }

  void take_opened(std::size_t bytes) {
    in_.begin += bytes;
    opened_ -= bytes;
    if (opened_ == 0) in_.begin += kTagBytes;
  }

  ssize_t receive(bool* is_drained) {
    const std::size_t needed = length_ > 0 ? length_ + kTagBytes : kRecordLengthBytes;
    std::size_t capacity = std::max(in_.capacity, kFirstReadBytes);
    if (was_full_ || needed > capacity) capacity = std::min(std::max(4 * capacity, needed), kMaxReadBytes);
    in_.resize(capacity);
    const std::size_t asked = in_.room();
    const iovec piece{in_.memory.get() + in_.end, asked};
    const ssize_t received = bytes_->read(&piece, 1);
    if (received == 0 && (in_.size() > 0 || length_ > 0)) {  // in the middle of a record
      errno = ECONNRESET;
      return -1;
    }
    if (received <= 0) return received;
    in_.end += static_cast<std::size_t>(received);
    was_full_ = static_cast<std::size_t>(received) == asked;
    *is_drained = !was_full_;
    return received;
  }

  const std::unique_ptr<ByteStream> bytes_;
  const Protected<ConnectionKeys> keys_;
  const std::uint64_t records_per_key_;

  Buffer out_;                  // sealed, and not written yet
  std::size_t pending_ = 0;     // bytes of the caller in out_
  std::uint64_t sent_ = 0;      // of records
  std::uint64_t reported_ = 0;  // of the caller
  std::uint64_t records_out_ = 0;

  Buffer in_;               // read, and not opened or not taken yet
  std::size_t length_ = 0;  // of the payload at its beginning; 0: a length is next
  std::size_t opened_ = 0;  // bytes at its beginning that are opened, before their tag
  bool was_full_ = false;   // the last read took all that there was room for
  bool is_bad_ = false;
  std::uint64_t records_in_ = 0;
};

}  // namespace

std::unique_ptr<ByteStream> make_sealed_byte_stream(std::unique_ptr<ByteStream> bytes, Protected<ConnectionKeys> keys,
                                                    std::uint64_t records_per_key) {
  return std::make_unique<SealedByteStream>(std::move(bytes), std::move(keys), records_per_key);
}

}  // namespace bagua_net
