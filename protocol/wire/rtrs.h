// SPDX-License-Identifier: BSD-3-Clause
// Layouts of the RTRS messages and of the immediate value (docs/protocol.md, "RTRS messages").
// Everything is little endian but the immediate, which fabric/ carries as a number in host order.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <tl/expected.hpp>

#include "protocol/wire/endian.h"

namespace rtrsnbd::wire {

inline constexpr uint16_t rtrs_magic = 0x1BBD;
inline constexpr uint16_t rtrs_version =
    0x0200;  // major in the high byte; the minor is not looked at
inline constexpr uint32_t connections_per_path_max = 4096;
inline constexpr uint32_t paths_per_session_max = 128;
inline constexpr uint32_t queue_depth_max = 65535;
inline constexpr uint32_t service_queue_depth = 512;  // receives the server posts on connection 0
inline constexpr uint32_t header_size_min_for_kernel = 2088;  // smaller breaks large kernel reads
inline constexpr uint16_t default_port = 1234;

using Uuid = std::array<std::byte, 16>;

enum class RtrsType : uint16_t {
  info_request = 0,
  info_response = 1,
  write = 2,
  read = 3,
  rkey_response = 4
};

// Immediate types, the top 4 bits.
enum class ImmediateType : uint32_t {
  io_request = 0,
  io_response = 1,
  io_response_invalidated = 2,
  heartbeat = 8,
  heartbeat_ack = 9,
};

inline constexpr uint16_t read_flag_need_invalidation = 0x1;
inline constexpr uint32_t connect_flag_new_rkey = 0x2;

struct ConnectRequest {  // private data of the connection request
  uint8_t cma_version = 0;
  uint8_t ip_version = 0;
  Le16 magic = rtrs_magic;
  Le16 version = rtrs_version;
  Le16 cid;
  Le16 cid_num;
  Le16 reconnect_count;
  Uuid path_uuid{};     // "sess_uuid" in the kernel
  Uuid session_uuid{};  // "paths_uuid" in the kernel
  uint8_t flags = 0;    // bit 0: first_conn
  std::array<uint8_t, 11> reserved{};

  [[nodiscard]] bool first_connection() const { return (flags & 1) != 0; }
};
static_assert(sizeof(ConnectRequest) == 56 && alignof(ConnectRequest) == 1);

struct ConnectResponse {  // private data of an accept or reject
  Le16 magic = rtrs_magic;
  Le16 version = rtrs_version;
  Le16 error;  // negative errno as 16-bit two's complement; 0 in an accept
  Le16 queue_depth;
  Le32 max_io_size;   // bytes
  Le32 max_hdr_size;  // bytes
  Le32 flags;
  std::array<uint8_t, 36> reserved{};

  // The errno as a positive number.
  [[nodiscard]] int error_number() const { return -static_cast<int16_t>(error.get()); }
};
static_assert(sizeof(ConnectResponse) == 56 && alignof(ConnectResponse) == 1);

struct InfoRequest {
  Le16 type = static_cast<uint16_t>(RtrsType::info_request);
  std::array<char, 255> session_name{};
  std::array<uint8_t, 15> reserved{};
};
static_assert(sizeof(InfoRequest) == 272);

struct Descriptor {  // in INFO_RSP and READ
  Le64 address;
  Le32 key;
  Le32 length;  // bytes
};
static_assert(sizeof(Descriptor) == 16);

struct InfoResponseHeader {  // followed by descriptor_count Descriptors
  Le16 type = static_cast<uint16_t>(RtrsType::info_response);
  Le16 descriptor_count;
  Le32 reserved;
};
static_assert(sizeof(InfoResponseHeader) == 8);

struct WriteMessage {
  Le16 type = static_cast<uint16_t>(RtrsType::write);
  Le16 user_length;
};
static_assert(sizeof(WriteMessage) == 4);

struct ReadMessage {  // followed by one Descriptor if descriptor_count is 1
  Le16 type = static_cast<uint16_t>(RtrsType::read);
  Le16 user_length;
  Le16 flags;
  Le16 descriptor_count;
};
static_assert(sizeof(ReadMessage) == 8);

struct RkeyResponse {
  Le16 type = static_cast<uint16_t>(RtrsType::rkey_response);
  Le16 buffer_id;
  Le32 rkey;
};
static_assert(sizeof(RkeyResponse) == 8);

// Number of bits needed to count to n-1: 0 for n <= 1.
constexpr uint32_t bits_for(uint32_t n) {
  return n <= 1 ? 0 : static_cast<uint32_t>(std::bit_width(n - 1));
}

constexpr uint32_t immediate(ImmediateType type, uint32_t payload) {
  return (static_cast<uint32_t>(type) << 28) | (payload & 0x0fffffffU);
}
constexpr uint32_t immediate_type(uint32_t imm) {
  return imm >> 28;
}
constexpr uint32_t immediate_payload(uint32_t imm) {
  return imm & 0x0fffffffU;
}

inline constexpr uint32_t heartbeat_immediate = immediate(ImmediateType::heartbeat, 0);
inline constexpr uint32_t heartbeat_ack_immediate = immediate(ImmediateType::heartbeat_ack, 0);

// Does every (chunk id, offset) pair of this geometry fit in the 28 payload bits?
constexpr bool geometry_fits(uint32_t queue_depth, uint64_t chunk_size) {
  return chunk_size <= (1U << 28) &&
         bits_for(queue_depth) + bits_for(static_cast<uint32_t>(chunk_size)) <= 28;
}

struct IoRequestImmediate {
  uint32_t chunk_id;
  uint32_t offset;  // of the RTRS message, from the start of the chunk

  static constexpr IoRequestImmediate decode(uint32_t imm, uint32_t queue_depth) {
    const uint32_t memory_bits = 28 - bits_for(queue_depth);
    const uint32_t payload = immediate_payload(imm);
    return {payload >> memory_bits, payload & ((1U << memory_bits) - 1)};
  }
  [[nodiscard]] constexpr uint32_t encode(uint32_t queue_depth) const {
    return immediate(ImmediateType::io_request,
                     (chunk_id << (28 - bits_for(queue_depth))) + offset);
  }
};

inline constexpr uint32_t errno_on_wire_max = 511;

struct IoResponseImmediate {
  uint32_t message_id;
  uint32_t error;  // positive errno, at most errno_on_wire_max; 0 is success
  bool invalidated;

  static constexpr IoResponseImmediate decode(uint32_t imm) {
    return {imm & 0x7ffffU, (imm >> 19) & 0x1ffU,
            immediate_type(imm) == static_cast<uint32_t>(ImmediateType::io_response_invalidated)};
  }
  [[nodiscard]] constexpr uint32_t encode() const {
    return immediate(
        invalidated ? ImmediateType::io_response_invalidated : ImmediateType::io_response,
        ((error & 0x1ffU) << 19) | (message_id & 0x7ffffU));
  }
};

// --- Parsers. Each takes the bytes that arrived, copied out of peer-writable memory by the caller
// or copied here at once, and returns the message or the errno (positive) that describes the
// refusal.

// Checks of the server, specification 2.6: length, magic, major version, cid_num, cid.
tl::expected<ConnectRequest, int> parse_connect_request(std::span<const std::byte> bytes);

// Checks of the client, 2.6: length, magic, major version. An errno other than 0 is not an error of
// the parser: look at error_number().
tl::expected<ConnectResponse, int> parse_connect_response(std::span<const std::byte> bytes);

// What a client demands of the geometry in the first accept before it allocates anything: depth 1
// to 65535, sizes that neither overflow nor exceed the immediate's bits, room for a header.
bool geometry_acceptable(const ConnectResponse& response);

// The session name of an INFO_REQ: terminated, 1..254 bytes, no '/' and no '.'. Exactly 272 bytes.
tl::expected<std::string_view, int> parse_info_request(std::span<const std::byte> bytes,
                                                       InfoRequest& copy);

// Fills request.session_name; false if the name is not allowed.
bool make_info_request(std::string_view session_name, InfoRequest& request);
bool session_name_allowed(std::string_view name);

struct ChunkWindow {  // where a peer may write one chunk
  uint64_t address;
  uint32_t rkey;
};

// Lays out the chunks of an INFO_RSP, specification 4.2, every rule of it. chunks.size() is the
// queue depth. Returns 0 or an errno.
int parse_info_response(std::span<const std::byte> bytes, uint32_t chunk_size,
                        std::span<ChunkWindow> chunks);

tl::expected<RkeyResponse, int> parse_rkey_response(std::span<const std::byte> bytes);

// One IO request as it lies in a chunk. The header is copied out of the chunk exactly once.
struct IoRequest {
  RtrsType type = RtrsType::write;  // write or read
  uint32_t data_length = 0;         // bytes in front of the user message
  uint16_t user_length = 0;
  bool need_invalidation = false;
  bool has_descriptor = false;
  Descriptor descriptor{};
};
// offset is the one from the immediate. Checks: message within the chunk, known type,
// user_length <= offset, descriptor count 0 or 1, descriptor.length == data_length, data_length <=
// max_io_size. The kind of refusal matters: `protocol` costs the path, specification 8.3.
enum class IoRequestError { protocol };
tl::expected<IoRequest, IoRequestError> parse_io_request(std::span<const std::byte> chunk,
                                                         uint32_t offset, uint32_t max_io_size);

}  // namespace rtrsnbd::wire
