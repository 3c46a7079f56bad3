// PluginTransport: a RingTransport over the network table of a dlopened plugin, used exactly as NCCL's proxy uses it:
// one connection per comm, memory registered per comm, receives of one buffer, a NULL comm or request tried again.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/plugin_library.h"
#include "bench/ring_transport.h"

namespace bagua_net::bench {

struct PluginOptions {
  std::string library_path;
  int table_version = 0;     // 0: the newest
  int device = 0;            // of channel 0
  bool all_devices = false;  // channel c uses device + c, modulo their number; otherwise all use `device`
};

class PluginTransport final : public RingTransport {
 public:
  static Status create(const PluginOptions& options, int channels, std::unique_ptr<PluginTransport>* transport);
  // Closes what is open, without reporting errors.
  ~PluginTransport() override;

  std::string net_name() const override { return library_->table().name(); }
  std::string table_name() const override { return "v" + std::to_string(library_->table().version()); }
  std::vector<std::string> device_names() const override { return device_names_; }

  Status listen(std::vector<Handle>* handles) override;
  Status connect(int channel, Handle* next_rank, bool* connected) override;
  Status accept(int channel, bool* accepted) override;
  Status register_buffer(int channel, void* data, std::size_t bytes) override;

  Status isend(int channel, const void* data, std::size_t bytes, void** request) override;
  Status irecv(int channel, void* data, std::size_t bytes, void** request) override;
  Status test(void* request, bool* done, std::size_t* bytes) override;

  Status deregister_buffers() override;
  Status close() override;

 private:
  struct Channel {
    int device = 0;
    void* listen_comm = nullptr;
    void* send_comm = nullptr;
    void* receive_comm = nullptr;
    void* send_registration = nullptr;
    void* receive_registration = nullptr;
    bool is_send_registered = false;  // a plugin may use NULL as a registration
    bool is_receive_registered = false;
  };

  explicit PluginTransport(std::unique_ptr<PluginLibrary> library) : library_(std::move(library)) {}
  Status start(const PluginOptions& options, int channels);
  Channel& channel_at(int channel) { return channels_[static_cast<std::size_t>(channel)]; }

  std::unique_ptr<PluginLibrary> library_;
  bool is_initialised_ = false;
  std::vector<std::string> device_names_;
  std::vector<Channel> channels_;
};

}  // namespace bagua_net::bench
