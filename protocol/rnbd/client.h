// SPDX-License-Identifier: BSD-3-Clause
// The client end of RNBD: user messages as bytes, and what the answer to OPEN means for a block
// device (docs/protocol.md, "RNBD messages"). How messages travel and who waits for the answer is
// the caller's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "protocol/rnbd/block_device.h"
#include "protocol/wire/rnbd.h"

namespace rtrsnbd::rnbd {

// Flags of one operation.
struct IoFlags {
  bool fua = false;
  bool no_unmap = false;
};

// The 32 bytes of an IO message. offset and length in bytes, multiples of 512. A flush has neither.
wire::Io make_io(uint32_t device_id, wire::RnbdOp op, uint64_t offset, uint32_t length,
                 IoFlags flags);

// RTRS direction of an operation: FLUSH travels as a read without data, as kernel clients send it.
constexpr bool travels_as_read(wire::RnbdOp op) {
  return op == wire::RnbdOp::read || op == wire::RnbdOp::flush;
}

DeviceProperties properties_of(const wire::OpenResponse& response);

// Longest DISCARD or WRITE_ZEROES we send in one message: 32-bit lengths, whole blocks of any size.
inline constexpr uint64_t special_length_max = uint64_t{1} << 31;

}  // namespace rtrsnbd::rnbd
