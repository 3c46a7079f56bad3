// Protected<T>: a key in pages of its own. They are in no core dump, not swapped out where the process may lock memory,
// zero in forked children, and wiped before they are given back. Owned by whoever has the pointer.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

namespace bagua_net {

// Zeros that the compiler does not leave out.
void wipe(void* memory, std::size_t bytes);

// Throws std::bad_alloc.
void* allocate_protected(std::size_t bytes);
void free_protected(void* memory, std::size_t bytes);

template <typename T>
struct FreeProtected {
  void operator()(T* key) const {
    key->~T();
    free_protected(const_cast<std::remove_const_t<T>*>(key), sizeof(T));
  }
};
template <typename T>
using Protected = std::unique_ptr<T, FreeProtected<T>>;

template <typename T, typename... Arguments>
Protected<T> make_protected(Arguments&&... arguments) {
  static_assert(std::is_nothrow_constructible_v<T, Arguments...>);
  return Protected<T>(new (allocate_protected(sizeof(T))) T(std::forward<Arguments>(arguments)...));
}

// A key that is needed for a moment, on the stack.
template <typename T>
struct Wiped {
  static_assert(std::is_trivially_copyable_v<T>);
  T key{};
  Wiped() = default;
  Wiped(const Wiped&) = delete;
  Wiped& operator=(const Wiped&) = delete;
  Wiped(Wiped&&) = delete;
  Wiped& operator=(Wiped&&) = delete;
  ~Wiped() { wipe(&key, sizeof key); }
};

}  // namespace bagua_net
