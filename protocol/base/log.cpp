// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/base/log.h"

namespace rtrsnbd {

std::string printable(std::string_view bytes, size_t max_bytes) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const char character : bytes) {
    if (text.size() >= max_bytes) return text + "...";
    const auto byte = static_cast<unsigned char>(character);
    if (character == '\\') {
      text += "\\\\";
    } else if (byte >= 0x20 && byte < 0x7f) {
      text += character;
    } else {
      text += "\\x";
      text += digits[byte >> 4];
      text += digits[byte & 15];
    }
  }
  return text;
}

}  // namespace rtrsnbd
