// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/rnbd/client.h"

#include <algorithm>
#include <cassert>

namespace rtrsnbd::rnbd {

wire::Io make_io(uint32_t device_id, wire::RnbdOp op, uint64_t offset, uint32_t length,
                 IoFlags flags) {
  assert(offset % wire::sector_size == 0 && length % wire::sector_size == 0);
  uint32_t rw = static_cast<uint32_t>(op);
  if (flags.fua) rw |= wire::rnbd_flag_fua;
  if (flags.no_unmap) rw |= wire::rnbd_flag_nounmap;
  if (op == wire::RnbdOp::read) rw |= wire::rnbd_flag_sync;
  // Kernel clients of every version set FUA on a flush; the newest PREFLUSH too.
  if (op == wire::RnbdOp::flush)
    rw |= wire::rnbd_flag_sync | wire::rnbd_flag_fua | wire::rnbd_flag_preflush;
  wire::Io io;
  io.device_id = device_id;
  io.sector = offset / wire::sector_size;
  io.rw = rw;
  io.length = length;
  return io;
}

DeviceProperties properties_of(const wire::OpenResponse& response) {
  DeviceProperties properties;
  properties.size_bytes = response.sector_count.get() * wire::sector_size;
  properties.logical_block_size = response.logical_block_size;
  // 65536 does not fit the field and arrives as 0.
  properties.physical_block_size =
      std::max<uint32_t>(response.physical_block_size, response.logical_block_size);
  properties.discard_bytes_max = uint64_t{response.max_discard_sectors} * wire::sector_size;
  properties.discard_granularity = response.discard_granularity;
  properties.discard_alignment = response.discard_alignment;
  properties.write_zeroes_bytes_max =
      uint64_t{response.max_write_zeroes_sectors} * wire::sector_size;
  properties.write_cache = (response.cache_policy & wire::cache_policy_writeback) != 0;
  properties.fua = (response.cache_policy & wire::cache_policy_fua) != 0;
  return properties;
}

}  // namespace rtrsnbd::rnbd
