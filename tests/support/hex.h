// SPDX-License-Identifier: BSD-3-Clause
// Bytes written as hex in a test, so that a vector in the test looks like the one in a capture.
#pragma once

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace rtrsnbd::test {

// "00 1b ff", blanks and newlines ignored; zeroes more zero bytes follow.
inline std::vector<std::byte> hex(std::string_view text, size_t zeroes = 0) {
  const auto value = [](char c) -> unsigned {
    if (c >= '0' && c <= '9') return static_cast<unsigned>(c - '0');
    if (c >= 'a' && c <= 'f') return static_cast<unsigned>(c - 'a') + 10;
    throw std::invalid_argument("not a hex digit");
  };
  std::string digits;
  for (const char c : text)
    if (c != ' ' && c != '\n') digits += c;
  if (digits.size() % 2 != 0) throw std::invalid_argument("half a byte");
  std::vector<std::byte> bytes;
  for (size_t i = 0; i < digits.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(value(digits[i]) << 4 | value(digits[i + 1])));
  bytes.insert(bytes.end(), zeroes, std::byte{0});
  return bytes;
}

inline std::string to_hex(std::span<const std::byte> bytes) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    if (!text.empty()) text += ' ';
    text += digits[static_cast<unsigned>(byte) >> 4];
    text += digits[static_cast<unsigned>(byte) & 15];
  }
  return text;
}

}  // namespace rtrsnbd::test
