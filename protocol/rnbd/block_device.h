// SPDX-License-Identifier: BSD-3-Clause
// What RNBD needs of the thing that stores blocks, and of the list of volumes. The daemon
// implements both; tests use one in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <tl/expected.hpp>

#include "protocol/wire/rnbd.h"

namespace rtrsnbd::rnbd {

struct DeviceProperties {
  uint64_t size_bytes = 0;              // a multiple of logical_block_size
  uint32_t logical_block_size = 512;    // bytes, power of two
  uint32_t physical_block_size = 512;   // bytes
  uint64_t discard_bytes_max = 0;       // 0: cannot discard
  uint32_t discard_granularity = 0;     // bytes
  uint32_t discard_alignment = 0;       // bytes
  uint64_t write_zeroes_bytes_max = 0;  // 0: cannot
  bool write_cache = true;              // completed writes are durable only after a flush
  bool fua = true;
  bool read_only = false;
};

// One operation on a device. Owned by the caller, which keeps it and the memory until complete().
class BlockRequest {
 public:
  virtual ~BlockRequest() = default;
  wire::RnbdOp op = wire::RnbdOp::read;
  bool fua = false;           // durable before complete()
  bool preflush = false;      // flush the device's cache first
  bool no_unmap = false;      // write_zeroes: keep the blocks allocated
  uint64_t offset = 0;        // bytes; range checked and aligned to the logical block by the caller
  uint64_t length = 0;        // bytes
  std::byte* data = nullptr;  // read, write
  int registered_index = -1;  // of the memory around data, or -1
  // Exactly once, on the thread that called submit, possibly from inside submit. 0 or a positive
  // errno.
  virtual void complete(int error) = 0;
};

// A volume opened by one session. Closing (destroying) it gives back the access count; the caller
// makes sure that no request is in flight.
class OpenDevice {
 public:
  virtual ~OpenDevice() = default;
  [[nodiscard]] virtual const DeviceProperties& properties() const = 0;
  virtual void submit(BlockRequest& request) = 0;
};

struct OpenError {
  int error = 0;       // positive errno, goes to the client
  std::string reason;  // for the log
};

class Volumes {
 public:
  virtual ~Volumes() = default;
  // Called on the session's thread. Checks the access list, the mode and the counting rules.
  virtual tl::expected<std::unique_ptr<OpenDevice>, OpenError> open(std::string_view name,
                                                                    wire::AccessMode mode) = 0;
};

}  // namespace rtrsnbd::rnbd
