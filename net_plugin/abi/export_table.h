// How a table of ours becomes a symbol of the library. exports.map names them all.
#pragma once

// The table is data that NCCL finds by its C name and uses in place: constant, and there as long as the library is.
// What follows the symbol is its value, with the names of bagua_net::abi and bagua_net::nccl.
#define BAGUA_NET_EXPORT_TABLE(Table, symbol, ...)                        \
  namespace bagua_net::abi {                                              \
  using namespace nccl;                                                   \
  extern "C" {                                                            \
  extern __attribute__((visibility("default"))) const nccl::Table symbol; \
  const nccl::Table symbol = __VA_ARGS__;                                 \
  }                                                                       \
  }                                                                       \
  static_assert(sizeof(bagua_net::abi::symbol) == sizeof(bagua_net::nccl::Table))
