// RingTransport: what a rank of the ring needs of a transport, in the words of NCCL's net table. Per channel there is
// one connection to the next rank (sends) and one from the previous rank (receives). All calls come from one thread,
// none of them blocks, and each may throw a Failure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace bagua_net::bench {

class RingTransport {
 public:
  using Handle = std::vector<std::uint8_t>;  // how the previous rank finds a listening channel

  virtual ~RingTransport() = default;

  // What results are labelled with: "BaguaNet", its table, if it has one, and its devices.
  virtual std::string net_name() const = 0;
  virtual std::optional<std::string> table_name() const { return {}; }
  virtual std::vector<std::string> device_names() const = 0;

  // One handle per channel.
  virtual std::vector<Handle> listen() = 0;
  // Called until they return true. The handle's buffer stays the same from call to call and may be written to.
  virtual bool connect(int channel, Handle* next_rank) = 0;
  virtual bool accept(int channel) = 0;
  // The only memory that this channel's messages will use.
  virtual void register_buffer(int /*channel*/, void* /*data*/, std::size_t /*bytes*/) {}

  // The request; nullptr: no room now, call again.
  virtual void* isend(int channel, const void* data, std::size_t bytes) = 0;
  virtual void* irecv(int channel, void* data, std::size_t bytes) = 0;
  // The size of the message once it is done; then the request is dead.
  virtual std::optional<std::size_t> test(void* request) = 0;

  // In NCCL's order: deregister, free the memory, close. Neither waits for the peer, and a second call does nothing.
  virtual void deregister_buffers() {}
  virtual void close() = 0;
};

// On an address of this host, which stands for NCCL's own transport; see bare_transport.cc.
std::unique_ptr<RingTransport> make_bare_transport(const std::string& address, int channels);
// Over a plugin's newest table. All channels use `device`, or channel c uses device c modulo their number if it is -1.
std::unique_ptr<RingTransport> make_plugin_transport(const std::string& library, int device, int channels);

}  // namespace bagua_net::bench
