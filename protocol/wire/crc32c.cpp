// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/wire/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>

namespace rtrsnbd::wire {

void Crc32c::update(const std::byte* bytes, size_t length) {
  // The library takes an int for the length, and a pointer to bytes it does not change.
  constexpr size_t call_max = size_t{1} << 30;
  auto* from = const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(bytes));
  while (length > 0) {
    const size_t step = std::min(length, call_max);
    register_ = crc32_iscsi(from, static_cast<int>(step), register_);
    from += step;
    length -= step;
  }
}

}  // namespace rtrsnbd::wire
