// SPDX-License-Identifier: BSD-3-Clause
// Integers of a fixed byte order, stored as bytes: alignment 1, no padding, no casts. A wire
// structure made of these can be memcpy'd from any offset of a chunk and has the same layout on
// every machine.
#pragma once

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

namespace rtrsnbd::wire {

template <std::unsigned_integral T>
constexpr T byteswap(T value) {
  if constexpr (sizeof(T) == 1) return value;
  if constexpr (sizeof(T) == 2) return __builtin_bswap16(value);
  if constexpr (sizeof(T) == 4) return __builtin_bswap32(value);
  if constexpr (sizeof(T) == 8) return __builtin_bswap64(value);
}

template <std::unsigned_integral T, std::endian Order>
class Integer {
 public:
  constexpr Integer() = default;
  constexpr Integer(T value) { *this = value; }  // NOLINT(google-explicit-constructor): is a T
  constexpr Integer& operator=(T value) {
    bytes_ = std::bit_cast<std::array<std::byte, sizeof(T)>>(swapped(value));
    return *this;
  }
  constexpr operator T() const { return get(); }  // NOLINT(google-explicit-constructor): is a T
  [[nodiscard]] constexpr T get() const { return swapped(std::bit_cast<T>(bytes_)); }

 private:
  static constexpr T swapped(T value) {
    if constexpr (Order == std::endian::native) return value;
    return byteswap(value);
  }
  std::array<std::byte, sizeof(T)> bytes_{};
};

using Le16 = Integer<uint16_t, std::endian::little>;
using Le32 = Integer<uint32_t, std::endian::little>;
using Le64 = Integer<uint64_t, std::endian::little>;
using Be16 = Integer<uint16_t, std::endian::big>;
using Be32 = Integer<uint32_t, std::endian::big>;
using Be64 = Integer<uint64_t, std::endian::big>;

template <typename T>
concept WireStruct = std::is_trivially_copyable_v<T> && alignof(T) == 1;

// Copies a structure out of bytes. The caller has checked that sizeof(T) bytes are there.
template <WireStruct T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

template <WireStruct T>
void store(std::byte* to, const T& value) {
  std::memcpy(to, &value, sizeof(T));
}

template <WireStruct T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span<const T, 1>(&value, 1));
}

}  // namespace rtrsnbd::wire
