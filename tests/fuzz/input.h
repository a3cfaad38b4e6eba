// SPDX-License-Identifier: BSD-3-Clause
// A fuzz input as a source of decisions: bytes, and zeros for ever once they are used up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace rtrsnbd::test {

class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  [[nodiscard]] bool empty() const { return size_ == 0; }
  uint8_t byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  uint16_t half() {
    const auto high = static_cast<uint16_t>(byte() << 8);
    return static_cast<uint16_t>(high | byte());
  }
  uint32_t word() {
    const auto high = static_cast<uint32_t>(half()) << 16;
    return high | half();
  }
  std::vector<std::byte> bytes(size_t length) {
    std::vector<std::byte> result(length);
    for (auto& b : result) b = static_cast<std::byte>(byte());
    return result;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

// Holds in release builds, too; the fuzzer takes an abort for a finding.
inline void expect(bool truth) {
  if (!truth) std::abort();
}

}  // namespace rtrsnbd::test
