// SPDX-License-Identifier: BSD-3-Clause
// Layouts of the RNBD messages (docs/protocol.md, "RNBD messages"). Little endian. Reserved bytes
// are written as zero and never looked at: kernel clients send garbage in them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <tl/expected.hpp>

#include "protocol/wire/endian.h"

namespace rtrsnbd::wire {

inline constexpr uint8_t rnbd_version = 2;
inline constexpr uint32_t sector_size = 512;  // unit of sector fields, whatever the logical block
inline constexpr size_t device_name_max = 254;

enum class RnbdType : uint16_t {
  session_info = 0,
  session_info_response = 1,
  open = 2,
  open_response = 3,
  io = 4,
  close = 5,
};

enum class AccessMode : uint8_t { read_only = 0, read_write = 1, migration = 2 };

enum class RnbdOp : uint8_t {
  read = 0,
  write = 1,
  flush = 2,
  discard = 3,
  secure_erase = 4,
  write_zeroes = 5
};

inline constexpr uint32_t rnbd_op_mask = 0xff;
inline constexpr uint32_t rnbd_flag_sync = 0x100;
inline constexpr uint32_t rnbd_flag_fua = 0x200;
inline constexpr uint32_t rnbd_flag_preflush = 0x400;
inline constexpr uint32_t rnbd_flag_nounmap = 0x800;

inline constexpr uint8_t cache_policy_fua = 0x1;
inline constexpr uint8_t cache_policy_writeback = 0x2;

struct SessionInfo {  // request and response differ in type only
  Le16 type = static_cast<uint16_t>(RnbdType::session_info);
  Le16 padding;
  uint8_t version = rnbd_version;
  std::array<uint8_t, 31> reserved{};
};
static_assert(sizeof(SessionInfo) == 36);

struct Open {
  Le16 type = static_cast<uint16_t>(RnbdType::open);
  Le16 padding;
  uint8_t access_mode = 0;
  uint8_t reserved = 0;
  std::array<char, 255> device_name{};
  std::array<uint8_t, 3> reserved2{};
};
static_assert(sizeof(Open) == 264);

struct OpenResponse {
  Le16 type = static_cast<uint16_t>(RnbdType::open_response);
  Le16 padding;
  Le32 device_id;
  Le64 sector_count;              // 512-byte sectors
  Le32 max_hw_sectors;            // 512-byte sectors
  Le32 max_write_zeroes_sectors;  // 512-byte sectors; 0: none
  Le32 max_discard_sectors;       // 512-byte sectors; 0: none
  Le32 discard_granularity;       // bytes
  Le32 discard_alignment;         // bytes
  Le16 physical_block_size;       // bytes
  Le16 logical_block_size;        // bytes
  Le16 max_segments;
  Le16 secure_discard;
  uint8_t obsolete_rotational = 0;
  uint8_t cache_policy = 0;
  std::array<uint8_t, 10> reserved{};
};
static_assert(sizeof(OpenResponse) == 56);

struct Close {
  Le16 type = static_cast<uint16_t>(RnbdType::close);
  Le16 padding;
  Le32 device_id;
};
static_assert(sizeof(Close) == 8);

struct Io {
  Le16 type = static_cast<uint16_t>(RnbdType::io);
  Le16 padding;
  Le32 device_id;
  Le64 sector;
  Le32 rw;      // op in bits 7..0, flags above
  Le32 length;  // "bi_size": bytes affected on the device
  Le16 priority;
  std::array<uint8_t, 6> tail{};
};
static_assert(sizeof(Io) == 32);
inline constexpr size_t io_length_min = 24;  // peers without the priority field

// The type of a user message, or an errno (EINVAL when shorter than a header).
tl::expected<RnbdType, int> parse_rnbd_type(std::span<const std::byte> user);
tl::expected<SessionInfo, int> parse_session_info(std::span<const std::byte> user);
// The name is checked to be terminated, not empty, printable or not is up to the caller; it points
// into copy.
tl::expected<std::string_view, int> parse_open(std::span<const std::byte> user, Open& copy);
tl::expected<Close, int> parse_close(std::span<const std::byte> user);
tl::expected<Io, int> parse_io(std::span<const std::byte> user);
// Client side: exactly what a client needs to believe a server: block size a power of two from 512
// to 32768, sector count that fits in 63-bit bytes.
tl::expected<OpenResponse, int> parse_open_response(std::span<const std::byte> bytes);
tl::expected<SessionInfo, int> parse_session_info_response(std::span<const std::byte> bytes);
bool make_open(std::string_view device_name, AccessMode mode, Open& open);

}  // namespace rtrsnbd::wire
