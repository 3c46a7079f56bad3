// How a table of ours becomes a symbol of the library. exports.map names them all.
#pragma once

// The table is data that NCCL finds by its C name and uses in place: constant, and there as long as the library is.
#define BAGUA_NET_EXPORT_TABLE(Table, symbol, make_table)                            \
  extern "C" {                                                                       \
  extern __attribute__((visibility("default"))) const bagua_net::nccl::Table symbol; \
  const bagua_net::nccl::Table symbol = bagua_net::abi::make_table();                \
  }                                                                                  \
  static_assert(sizeof(symbol) == sizeof(bagua_net::nccl::Table))
