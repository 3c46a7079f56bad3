// What all versions of NCCL's network plugin interface share: result codes, log levels, constants, the logger. Our own
// definitions, so that no NCCL header is needed to build. Field and slot names are NCCL's, types are ours.
// Linux, LP64 only: NCCL exists nowhere else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace bagua_net::nccl {

enum class Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,
};

// Without level 6 (ATTN, "noteworthy, and no error") of NCCL 2.31: earlier ones would drop it as finer than kTrace, and
// nothing tells a network plugin which it is called by. What is worth attention goes out as kWarn.
enum class LogLevel : int { kNone = 0, kVersion = 1, kWarn = 2, kInfo = 3, kAbort = 4, kTrace = 5 };

// Which of NCCL_DEBUG_SUBSYS lets a message through; several may be given.
constexpr unsigned long kLogInit = 0x1;
constexpr unsigned long kLogNet = 0x10;

using Logger = void(LogLevel level, unsigned long flags, const char* file, int line, const char* format, ...);

// v10+: reports events of ours to a profiler; `type` is START 0, STOP 1, UPDATE 2 or UPDATE_AND_STOP 3.
using ProfilerCallback = Result(void** eventHandle, int type, void* parentHandle, std::int64_t pluginId, void* extData);

constexpr std::size_t kNetHandleMaxBytes = 128;  // NCCL_NET_HANDLE_MAXSIZE, 2.12 and later
constexpr int kNetMaxRequests = 32;              // NCCL_NET_MAX_REQUESTS, 2.19 and later; 8 before
constexpr int kUndefined = -1;                   // traffic class, rail, plane, attributes

// A bit mask in the properties, one bit at a time in regMr.
constexpr int kPointerHost = 1;
constexpr int kPointerCuda = 2;
constexpr int kPointerDmaBuf = 4;

enum class NetDeviceType : int { kHost = 0, kUnpack = 1 };
constexpr int kNetDeviceInvalidVersion = 0;  // "no device version"

static_assert(sizeof(void*) == 8 && sizeof(int) == 4 && sizeof(long) == 8, "NCCL's ABI is described for LP64 only");
static_assert(sizeof(Result) == sizeof(int) && sizeof(LogLevel) == sizeof(int), "C enums are ints");

// These are all the slots of a table, in its order. Slots are pointers, so that this gives the offset of each.
template <typename Table, typename... Slots>
constexpr bool are_slots_of(const Slots&... slots) {
  const void* const addresses[] = {static_cast<const void*>(&slots)...};
  for (std::size_t i = 1; i < sizeof...(Slots); ++i) {
    if (addresses[i] <= addresses[i - 1]) return false;
  }
  return ((sizeof(Slots) == sizeof(void*)) && ...) && sizeof(Table) == sizeof...(Slots) * sizeof(void*);
}

}  // namespace bagua_net::nccl

// Checks the slots of a table, by their names: NCCL reads the tables by position. Clang before 20 has no order of
// pointers to void in constants (CWG 2749); GCC and the clang-tidy of `make lint` check the tables.
#if defined(__clang_major__) && __clang_major__ < 20
#define BAGUA_NET_ASSERT_SLOTS(Table, ...) static_assert(sizeof(Table) > 0)
#else
#define BAGUA_NET_ASSERT_SLOTS(Table, ...)                                                           \
  struct SlotsOf##Table : Table {                                                                    \
    constexpr bool are_right() const { return ::bagua_net::nccl::are_slots_of<Table>(__VA_ARGS__); } \
  };                                                                                                 \
  static_assert(SlotsOf##Table{}.are_right(), #Table " has the slots " #__VA_ARGS__)
#endif

// Checks where the fields of a struct are: BAGUA_NET_ASSERT_OFFSETS(Type, (field, bytes), ...). A macro is not expanded
// in itself, but when what it left is looked at again: as often as there are fields.
#define BAGUA_NET_EXPAND_3(...) __VA_ARGS__
#define BAGUA_NET_EXPAND_9(...) BAGUA_NET_EXPAND_3(BAGUA_NET_EXPAND_3(BAGUA_NET_EXPAND_3(__VA_ARGS__)))
#define BAGUA_NET_EXPAND_27(...) BAGUA_NET_EXPAND_9(BAGUA_NET_EXPAND_9(BAGUA_NET_EXPAND_9(__VA_ARGS__)))
#define BAGUA_NET_EXPAND(...) BAGUA_NET_EXPAND_27(BAGUA_NET_EXPAND_27(BAGUA_NET_EXPAND_27(__VA_ARGS__)))
#define BAGUA_NET_NOTHING()
#define BAGUA_NET_FIELD(field, bytes) field
#define BAGUA_NET_BYTES(field, bytes) bytes
#define BAGUA_NET_NEXT_OFFSET() BAGUA_NET_OFFSET
#define BAGUA_NET_OFFSET(Type, first, ...)                                                     \
  static_assert(offsetof(Type, BAGUA_NET_FIELD first) == BAGUA_NET_BYTES first, #Type #first); \
  __VA_OPT__(BAGUA_NET_NEXT_OFFSET BAGUA_NET_NOTHING()()(Type, __VA_ARGS__))
#define BAGUA_NET_ASSERT_OFFSETS(Type, ...)             \
  BAGUA_NET_EXPAND(BAGUA_NET_OFFSET(Type, __VA_ARGS__)) \
  static_assert(std::is_standard_layout_v<Type>, "otherwise offsetof means nothing")
