// SPDX-License-Identifier: BSD-3-Clause
// CRC32C (Castagnoli) as iSCSI and MPA use it: reflected, all ones in, inverted out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace rtrsnbd::wire {

// A checksum in the making: bytes may be fed in pieces of any size.
class Crc32c {
 public:
  void update(const std::byte* bytes, size_t length);
  void update(std::span<const std::byte> bytes) { update(bytes.data(), bytes.size()); }
  [[nodiscard]] uint32_t value() const { return ~register_; }

 private:
  uint32_t register_ = 0xffffffff;
};

inline uint32_t crc32c(std::span<const std::byte> bytes) {
  Crc32c crc;
  crc.update(bytes);
  return crc.value();
}

}  // namespace rtrsnbd::wire
