// RingTransport: what a rank of the ring needs of a transport, in the words of NCCL's net table. Per channel there is
// one connection to the next rank (sends) and one from the previous rank (receives). All calls come from one thread,
// none of them blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace bagua_net::bench {

class RingTransport {
 public:
  using Handle = std::vector<std::uint8_t>;  // how the previous rank finds a listening channel

  virtual ~RingTransport() = default;

  // What results are labelled with: "BaguaNet", and its devices.
  virtual std::string net_name() const = 0;
  virtual std::string table_name() const = 0;  // "" if there is no NCCL table
  virtual std::vector<std::string> device_names() const = 0;

  // One handle per channel.
  virtual Status listen(std::vector<Handle>* handles) = 0;
  // Called until *connected. The handle buffer stays the same from call to call and may be written to.
  virtual Status connect(int channel, Handle* next_rank, bool* connected) = 0;
  virtual Status accept(int channel, bool* accepted) = 0;
  // The only memory that this channel's messages will use.
  virtual Status register_buffer(int channel, void* data, std::size_t bytes) = 0;

  // *request == nullptr: no room now, call again.
  virtual Status isend(int channel, const void* data, std::size_t bytes, void** request) = 0;
  virtual Status irecv(int channel, void* data, std::size_t bytes, void** request) = 0;
  // *bytes: size of the message, written when *done is; then the request is dead.
  virtual Status test(void* request, bool* done, std::size_t* bytes) = 0;

  // In NCCL's order: deregister, free the memory, close. Neither waits for the peer.
  virtual Status deregister_buffers() = 0;
  virtual Status close() = 0;
};

}  // namespace bagua_net::bench
