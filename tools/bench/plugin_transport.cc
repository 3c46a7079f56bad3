#include "bench/plugin_transport.h"

namespace bagua_net::bench {

Status PluginTransport::create(const PluginOptions& options, int channels,
                               std::unique_ptr<PluginTransport>* transport) {
  BAGUA_NET_RETURN_IF_ERROR(configure_plugin_log());
  std::unique_ptr<PluginLibrary> library;
  BAGUA_NET_RETURN_IF_ERROR(PluginLibrary::open(options.library_path, options.table_version, &library));
  transport->reset(new PluginTransport(std::move(library)));
  return (*transport)->start(options, channels);
}

Status PluginTransport::start(const PluginOptions& options, int channels) {
  NetTable& table = library_->table();
  BAGUA_NET_RETURN_IF_ERROR(library_->check(table.init(), "init"));
  is_initialised_ = true;
  int count = 0;
  BAGUA_NET_RETURN_IF_ERROR(library_->check(table.devices(&count), "devices"));
  if (options.device >= count) {
    return Status::invalid_argument("--device is " + std::to_string(options.device) + ", but " + table.name() +
                                    " has " + std::to_string(count) + " devices, numbered from 0");
  }
  for (int device = 0; device < count; ++device) {
    device_names_.emplace_back();
    BAGUA_NET_RETURN_IF_ERROR(library_->check(table.device_name(device, &device_names_.back()), "getProperties"));
  }
  channels_.resize(static_cast<std::size_t>(channels));
  forget_plugin_warnings();
  for (int index = 0; index < channels; ++index) {
    channel_at(index).device = options.all_devices ? (options.device + index) % count : options.device;
  }
  return Status::ok();
}

PluginTransport::~PluginTransport() {
  // After an error the sums do not matter any more, but an orderly end still does: NCCL aborts in the same order.
  static_cast<void>(deregister_buffers());
  static_cast<void>(close());
}

Status PluginTransport::listen(std::vector<Handle>* handles) {
  for (Channel& channel : channels_) {
    Handle handle(nccl::kNetHandleMaxBytes);
    BAGUA_NET_RETURN_IF_ERROR(
        library_->check(library_->table().listen(channel.device, handle.data(), &channel.listen_comm), "listen"));
    if (channel.listen_comm == nullptr) return Status::internal_error("listen succeeded without a listen comm");
    handles->push_back(std::move(handle));
  }
  return Status::ok();
}

Status PluginTransport::connect(int index, Handle* next_rank, bool* connected) {
  Channel& channel = channel_at(index);
  if (next_rank->size() != nccl::kNetHandleMaxBytes) {
    return Status::invalid_argument(
        "the handle of channel " + std::to_string(index) + " has " + std::to_string(next_rank->size()) +
        " bytes instead of " + std::to_string(nccl::kNetHandleMaxBytes) + ": it is not one that a plugin rank printed");
  }
  BAGUA_NET_RETURN_IF_ERROR(
      library_->check(library_->table().connect(channel.device, next_rank->data(), &channel.send_comm), "connect"));
  *connected = channel.send_comm != nullptr;
  return Status::ok();
}

Status PluginTransport::accept(int index, bool* accepted) {
  Channel& channel = channel_at(index);
  BAGUA_NET_RETURN_IF_ERROR(
      library_->check(library_->table().accept(channel.listen_comm, &channel.receive_comm), "accept"));
  *accepted = channel.receive_comm != nullptr;
  if (!*accepted) return Status::ok();
  // One listen comm is one connection: NCCL closes it here.
  void* listen_comm = std::exchange(channel.listen_comm, nullptr);
  return library_->check(library_->table().close_listen(listen_comm), "closeListen");
}

Status PluginTransport::register_buffer(int index, void* data, std::size_t bytes) {
  Channel& channel = channel_at(index);
  NetTable& table = library_->table();
  BAGUA_NET_RETURN_IF_ERROR(library_->check(
      table.register_memory(channel.send_comm, data, bytes, &channel.send_registration), "regMr of a send comm"));
  channel.is_send_registered = true;
  BAGUA_NET_RETURN_IF_ERROR(
      library_->check(table.register_memory(channel.receive_comm, data, bytes, &channel.receive_registration),
                      "regMr of a receive comm"));
  channel.is_receive_registered = true;
  return Status::ok();
}

Status PluginTransport::isend(int index, const void* data, std::size_t bytes, void** request) {
  const Channel& channel = channel_at(index);
  return library_->check(
      library_->table().isend(channel.send_comm, const_cast<void*>(data), bytes, channel.send_registration, request),
      "isend");
}

Status PluginTransport::irecv(int index, void* data, std::size_t bytes, void** request) {
  const Channel& channel = channel_at(index);
  return library_->check(
      library_->table().irecv(channel.receive_comm, data, bytes, channel.receive_registration, request), "irecv");
}

Status PluginTransport::test(void* request, bool* done, std::size_t* bytes) {
  int is_done = 0;
  int size = 0;
  BAGUA_NET_RETURN_IF_ERROR(library_->check(library_->table().test(request, &is_done, &size), "test"));
  *done = is_done != 0;
  *bytes = static_cast<std::size_t>(size);
  return Status::ok();
}

Status PluginTransport::deregister_buffers() {
  NetTable& table = library_->table();
  for (Channel& channel : channels_) {
    if (std::exchange(channel.is_send_registered, false)) {
      BAGUA_NET_RETURN_IF_ERROR(
          library_->check(table.deregister_memory(channel.send_comm, channel.send_registration), "deregMr"));
    }
    if (std::exchange(channel.is_receive_registered, false)) {
      BAGUA_NET_RETURN_IF_ERROR(
          library_->check(table.deregister_memory(channel.receive_comm, channel.receive_registration), "deregMr"));
    }
  }
  return Status::ok();
}

Status PluginTransport::close() {
  NetTable& table = library_->table();
  for (Channel& channel : channels_) {
    if (void* comm = std::exchange(channel.send_comm, nullptr); comm != nullptr) {
      BAGUA_NET_RETURN_IF_ERROR(library_->check(table.close_send(comm), "closeSend"));
    }
    if (void* comm = std::exchange(channel.receive_comm, nullptr); comm != nullptr) {
      BAGUA_NET_RETURN_IF_ERROR(library_->check(table.close_receive(comm), "closeRecv"));
    }
    if (void* comm = std::exchange(channel.listen_comm, nullptr); comm != nullptr) {
      BAGUA_NET_RETURN_IF_ERROR(library_->check(table.close_listen(comm), "closeListen"));
    }
  }
  if (!std::exchange(is_initialised_, false)) return Status::ok();
  return library_->check(table.finalize(), "finalize");
}

}  // namespace bagua_net::bench
