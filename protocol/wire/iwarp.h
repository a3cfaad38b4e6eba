// SPDX-License-Identifier: BSD-3-Clause
// Layouts of iWARP over TCP: MPA set-up frames (RFC 5044, 6581), FPDUs with DDP (RFC 5041) and
// RDMAP (RFC 5040) headers, Immediate Data (RFC 7306), Terminate. docs/software-rdma.md says how
// they are used. All fields are big endian but the CRC, which is stored least significant byte
// first.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "protocol/wire/endian.h"

namespace rtrsnbd::wire::iwarp {

// MPA connection set-up.

inline constexpr size_t mpa_key_size = 16;
inline constexpr std::string_view mpa_request_key = "MPA ID Req Frame";
inline constexpr std::string_view mpa_reply_key = "MPA ID Rep Frame";
static_assert(mpa_request_key.size() == mpa_key_size && mpa_reply_key.size() == mpa_key_size);

inline constexpr uint8_t mpa_flag_markers = 0x80;
inline constexpr uint8_t mpa_flag_crc = 0x40;
inline constexpr uint8_t mpa_flag_rejected = 0x20;
inline constexpr uint8_t mpa_flag_enhanced =
    0x10;  // RFC 6581: private data starts with MpaEnhanced

// RFC 5044 allows 512; Linux takes 256 and closes at more, so nobody can rely on more.
inline constexpr size_t mpa_private_data_max = 256;

struct MpaHeader {
  std::array<char, mpa_key_size> key{};
  uint8_t flags = 0;
  uint8_t revision = 0;
  Be16 private_data_length;  // with the enhanced flag it counts MpaEnhanced too
};
static_assert(sizeof(MpaHeader) == 20 && alignof(MpaHeader) == 1);

// RFC 6581. How many RDMA READs each end can take and wants, and which message may come first.
struct MpaEnhanced {
  Be16 inbound;   // A, B, IRD
  Be16 outbound;  // C, D, ORD
};
static_assert(sizeof(MpaEnhanced) == 4);
inline constexpr uint16_t mpa_peer_to_peer = 0x8000;  // A, of inbound
inline constexpr uint16_t mpa_rtr_write = 0x8000;     // C, of outbound
inline constexpr uint16_t mpa_read_depth_mask = 0x3fff;

inline constexpr size_t mpa_frame_max = sizeof(MpaHeader) + mpa_private_data_max;

// FPDU: length field, DDP/RDMAP header, payload, pad, CRC.

inline constexpr size_t fpdu_length_size = 2;
inline constexpr size_t fpdu_crc_size = 4;
inline constexpr size_t fpdu_trailer_max = 3 + fpdu_crc_size;
inline constexpr size_t ulpdu_max = 65535;

inline constexpr uint8_t ddp_tagged = 0x80;
inline constexpr uint8_t ddp_last = 0x40;
inline constexpr uint8_t ddp_version_mask = 0x03;
inline constexpr uint8_t ddp_version = 0x01;
inline constexpr uint8_t rdmap_version_mask = 0xc0;
inline constexpr uint8_t rdmap_version = 0x40;
inline constexpr uint8_t rdmap_opcode_mask = 0x0f;

enum class Opcode : uint8_t {
  write = 0x0,
  read_request = 0x1,
  read_response = 0x2,
  send = 0x3,
  send_invalidate = 0x4,
  send_solicited = 0x5,
  send_solicited_invalidate = 0x6,
  terminate = 0x7,
  immediate_data = 0x8,
  immediate_data_solicited = 0x9,
  atomic_request = 0xa,
  atomic_response = 0xb,
  send_immediate = 0xc,  // local extension: RFC 7306 has no Send that carries an immediate
};

inline constexpr uint32_t send_queue_number = 0;
inline constexpr uint32_t terminate_queue_number = 2;

struct TaggedHeader {
  Be16 length;  // of all that follows up to the pad
  uint8_t ddp_control = ddp_tagged | ddp_version;
  uint8_t rdmap_control = rdmap_version;
  Be32 stag;
  Be64 offset;
};
static_assert(sizeof(TaggedHeader) == 16 && alignof(TaggedHeader) == 1);

struct UntaggedHeader {
  Be16 length;
  uint8_t ddp_control = ddp_version;
  uint8_t rdmap_control = rdmap_version;
  Be32 upper_layer;  // STag to invalidate, or the immediate of send_immediate
  Be32 queue_number;
  Be32 message_number;
  Be32 message_offset;
};
static_assert(sizeof(UntaggedHeader) == 20 && alignof(UntaggedHeader) == 1);

inline constexpr size_t tagged_ulpdu_min = sizeof(TaggedHeader) - fpdu_length_size;      // 14
inline constexpr size_t untagged_ulpdu_min = sizeof(UntaggedHeader) - fpdu_length_size;  // 18

struct ImmediatePayload {  // of immediate_data
  Be32 immediate;
  Be32 reserved;
};
static_assert(sizeof(ImmediatePayload) == 8);

// Both header sizes are multiples of 4, so the pad depends on the payload alone.
constexpr size_t pad_size(size_t payload) {
  return (~payload + 1) & 3;
}
constexpr size_t fpdu_size(size_t ulpdu) {
  return ((fpdu_length_size + ulpdu + 3) & ~size_t{3}) + fpdu_crc_size;
}
static_assert(fpdu_size(tagged_ulpdu_min) == 20 && fpdu_size(untagged_ulpdu_min) == 24);
static_assert(pad_size(0) == 0 && pad_size(1) == 3 && pad_size(5) == 3 && pad_size(8) == 0);
inline constexpr size_t fpdu_max = fpdu_size(ulpdu_max);

inline void store_crc(std::byte* to, uint32_t value) {
  store(to, Le32(value));
}
inline uint32_t load_crc(const std::byte* from) {
  return load<Le32>(from);
}

// Terminate.

struct TerminateError {
  uint8_t layer_type = 0;  // layer in the high nibble, type of error in the low one
  uint8_t code = 0;
  bool operator==(const TerminateError&) const = default;
};

namespace error {
inline constexpr TerminateError local_catastrophic{0x00, 0x00};
inline constexpr TerminateError access_rights{0x01, 0x02};
inline constexpr TerminateError invalidate_not_permitted{0x01, 0x09};
inline constexpr TerminateError rdmap_version{0x02, 0x05};
inline constexpr TerminateError unexpected_opcode{0x02, 0x06};
inline constexpr TerminateError stream_catastrophic{0x02, 0x07};
inline constexpr TerminateError invalidate_unknown{0x02, 0x09};
inline constexpr TerminateError operation_unspecified{0x02, 0xff};
inline constexpr TerminateError invalid_stag{0x11, 0x00};
inline constexpr TerminateError out_of_bounds{0x11, 0x01};
inline constexpr TerminateError foreign_stag{0x11, 0x02};
inline constexpr TerminateError offset_wrap{0x11, 0x03};
inline constexpr TerminateError tagged_ddp_version{0x11, 0x04};
inline constexpr TerminateError invalid_queue{0x12, 0x01};
inline constexpr TerminateError no_receive{0x12, 0x02};
inline constexpr TerminateError message_number{0x12, 0x03};
inline constexpr TerminateError message_offset{0x12, 0x04};
inline constexpr TerminateError message_too_long{0x12, 0x05};
inline constexpr TerminateError untagged_ddp_version{0x12, 0x06};
inline constexpr TerminateError crc{0x20, 0x02};
inline constexpr TerminateError framing{0x20, 0x03};
}  // namespace error

inline constexpr uint8_t terminate_has_length = 0x80;
inline constexpr uint8_t terminate_has_ddp_header = 0x40;
inline constexpr uint8_t terminate_has_rdmap_header = 0x20;

struct TerminateControl {
  uint8_t layer_type = 0;
  uint8_t code = 0;
  uint8_t flags = 0;
  uint8_t reserved = 0;
};
static_assert(sizeof(TerminateControl) == 4 && alignof(TerminateControl) == 1);

inline constexpr size_t terminate_payload_max = sizeof(TerminateControl) + 2 + untagged_ulpdu_min;

// The payload of a Terminate into `to`, which has room for terminate_payload_max bytes; returns its
// length. `header` is the offending FPDU's header from its length field on (16 or 20 bytes), or
// empty.
size_t make_terminate_payload(std::byte* to, TerminateError error,
                              std::span<const std::byte> header);

// "DDP tagged buffer: invalid STag (11/00)".
std::string describe(TerminateError error);
// The same for a received Terminate's payload, which may be malformed. Linux's software iWARP
// mirrors the control bits on little-endian machines; when they look so, both readings are given.
std::string describe_terminate(std::span<const std::byte> payload);

std::string_view opcode_name(uint8_t opcode);

}  // namespace rtrsnbd::wire::iwarp
