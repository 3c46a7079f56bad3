// WireRelay: stands between a connector and a listener, as an attacker on the way does. It keeps what passes, and may
// change it or cut a connection.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "support/check.h"
#include "support/loopback.h"
#include "support/raw_handshake.h"

namespace bagua_net {

class WireRelay {
 public:
  using Bytes = std::vector<std::uint8_t>;
  struct Passing {
    std::size_t connection;  // in the order in which they came
    bool forth;              // from the connector to the listener
    std::size_t offset;      // of the first byte, in its direction
    Bytes* bytes;            // may be changed
  };
  enum class Fate {
    kPass,
    kCut,  // with a reset, and the bytes are gone
    kEnd,  // after these bytes
  };
  using Decide = std::function<Fate(const Passing&)>;

  // handle: of a listener; leads to the relay afterwards. decide: called by the relay's thread.
  explicit WireRelay(std::uint8_t* handle, Decide decide = {}) : decide_(std::move(decide)) {
    ConnectHandle decoded;
    CHECK_OK(decode_connect_handle(handle, &decoded));
    target_ = loopback().address;
    target_.set_port(decoded.port);
    address_ = loopback().address;
    CHECK_OK(tcp_listen(&address_, &listener_));
    decoded.port = address_.port();
    encode_connect_handle(decoded, handle);
    thread_ = std::thread([this] { run(); });
  }
  ~WireRelay() { stop(); }
  void stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
  }

  // By connection and direction (forth, back), as it was sent until now.
  std::vector<std::array<Bytes, 2>> seen() {
    const MutexLock lock(mutex_);
    return seen_;
  }
  std::size_t connections() const { return count_; }
  const SocketAddress& address() const { return address_; }

 private:
  struct Link {
    OwnedFd ends[2];  // the connector's, the listener's
    bool ended[2] = {false, false};
    std::size_t number = 0;
  };

  void run() {
    while (!stopping_) {
      std::vector<pollfd> states{{listener_.get(), POLLIN, 0}};
      for (const Link& link : links_) {
        for (int from = 0; from < 2; ++from) {
          states.push_back({link.ended[from] ? -1 : link.ends[from].get(), POLLIN, 0});
        }
      }
      if (::poll(states.data(), states.size(), 20) <= 0) continue;
      for (std::size_t i = links_.size(); i-- > 0;) {
        bool is_cut = false;
        for (int from = 0; from < 2 && !is_cut; ++from) {
          if (states[1 + 2 * i + static_cast<std::size_t>(from)].revents != 0) is_cut = !forward(links_[i], from);
        }
        if (is_cut || (links_[i].ended[0] && links_[i].ended[1])) {
          links_.erase(links_.begin() + static_cast<std::ptrdiff_t>(i));
        }
      }
      if (states[0].revents != 0) accept();
    }
    links_.clear();
  }

  void accept() {
    Link link;
    link.ends[0] = OwnedFd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    link.ends[1] = OwnedFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!link.ends[0].is_open() || ::connect(link.ends[1].get(), target_.data(), target_.length()) != 0) return;
    link.number = count_++;
    {
      const MutexLock lock(mutex_);
      seen_.emplace_back();
    }
    links_.push_back(std::move(link));
  }

  // False: the connection is over.
  bool forward(Link& link, int from) {
    Bytes bytes(65536);
    const ssize_t got = ::recv(link.ends[from].get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    OwnedFd& to = link.ends[1 - from];
    if (got == 0) {
      link.ended[from] = true;
      ::shutdown(to.get(), SHUT_WR);
      return true;
    }
    bytes.resize(static_cast<std::size_t>(got));
    const std::size_t offset = keep(link.number, from, bytes);
    const Fate fate = decide_ ? decide_({link.number, from == 0, offset, &bytes}) : Fate::kPass;
    if (fate == Fate::kCut) {
      const linger reset{1, 0};
      for (const OwnedFd& end : link.ends) ::setsockopt(end.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
      return false;
    }
    for (std::size_t sent = 0; sent < bytes.size();) {
      const ssize_t moved = ::send(to.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (moved < 0) return false;
      sent += static_cast<std::size_t>(moved);
    }
    if (fate == Fate::kEnd) {
      for (const OwnedFd& end : link.ends) ::shutdown(end.get(), SHUT_RDWR);
    }
    return fate == Fate::kPass;
  }

  // How many bytes came before.
  std::size_t keep(std::size_t connection, int from, const Bytes& bytes) {
    const MutexLock lock(mutex_);
    Bytes& before = seen_[connection][static_cast<std::size_t>(from)];
    before.insert(before.end(), bytes.begin(), bytes.end());
    return before.size() - bytes.size();
  }

  const Decide decide_;
  SocketAddress target_;
  SocketAddress address_;
  OwnedFd listener_;
  std::deque<Link> links_;
  Mutex mutex_;
  std::vector<std::array<Bytes, 2>> seen_ GUARDED_BY(mutex_);
  std::atomic<std::size_t> count_{0};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace bagua_net
