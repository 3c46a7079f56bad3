// CongestionControl: what BAGUA_NET_CONGESTION_CONTROL can name. kAuto is decided by where the peer is (tcp_socket.cc).
#pragma once

namespace bagua_net {

enum class CongestionControl { kAuto, kSystem, kCubic, kReno, kBbr };

}  // namespace bagua_net
