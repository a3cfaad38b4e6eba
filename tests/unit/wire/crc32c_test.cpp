// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/wire/crc32c.h"

#include <doctest/doctest.h>

#include <random>
#include <string_view>
#include <vector>

namespace rtrsnbd::wire {

namespace {

// Bit by bit, from the polynomial alone.
uint32_t slow_crc32c(std::span<const std::byte> bytes) {
  uint32_t crc = 0xffffffff;
  for (const std::byte byte : bytes) {
    crc ^= std::to_integer<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? crc >> 1 ^ 0x82f63b78 : crc >> 1;
  }
  return ~crc;
}

}  // namespace

TEST_CASE("CRC32C of the published test inputs") {
  const std::string_view digits = "123456789";
  CHECK(crc32c(std::as_bytes(std::span(digits))) == 0xe3069283);
  CHECK(crc32c(std::vector<std::byte>(32, std::byte{0})) == 0x8a9136aa);
  CHECK(crc32c(std::vector<std::byte>(32, std::byte{0xff})) == 0x62a8ab43);
  CHECK(crc32c({}) == 0);
}

TEST_CASE("CRC32C is the same in one piece, in many, and by the definition") {
  std::mt19937 random(1);
  for (size_t length : {1u, 2u, 7u, 8u, 15u, 16u, 63u, 255u, 1024u, 3071u, 3072u, 9999u}) {
    std::vector<std::byte> bytes(length + 3);
    for (auto& byte : bytes) byte = static_cast<std::byte>(random());
    for (size_t start = 0; start < 3; ++start) {
      const auto part = std::span(bytes).subspan(start, length);
      const uint32_t expected = slow_crc32c(part);
      CHECK(crc32c(part) == expected);
      Crc32c pieces;
      for (size_t done = 0; done < length;) {
        const size_t step = std::min<size_t>(length - done, random() % 200);
        pieces.update(part.subspan(done, step));
        done += step;
      }
      CHECK(pieces.value() == expected);
    }
  }
}

}  // namespace rtrsnbd::wire
