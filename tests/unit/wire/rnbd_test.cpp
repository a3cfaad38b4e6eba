// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/wire/rnbd.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

#include "protocol/wire/rtrs.h"
#include "tests/support/hex.h"

using namespace rtrsnbd::wire;
using rtrsnbd::test::hex;
using rtrsnbd::test::to_hex;

namespace {

template <typename... Parts>
std::vector<std::byte> concatenated(const Parts&... parts) {
  std::vector<std::byte> all;
  const auto add = [&all](std::span<const std::byte> bytes) {
    all.insert(all.end(), bytes.begin(), bytes.end());
  };
  (add(bytes_of(parts)), ...);
  return all;
}

ReadMessage read_with_descriptor(uint16_t user_length) {
  ReadMessage message;
  message.user_length = user_length;
  message.flags = read_flag_need_invalidation;
  message.descriptor_count = uint16_t{1};
  return message;
}

WriteMessage write_with(uint16_t user_length) {
  WriteMessage message;
  message.user_length = user_length;
  return message;
}

Descriptor descriptor(uint64_t address, uint32_t key, uint32_t length) {
  Descriptor d;
  d.address = address;
  d.key = key;
  d.length = length;
  return d;
}

Io io_message(uint64_t sector, uint32_t rw, uint32_t length) {
  Io io;
  io.sector = sector;
  io.rw = rw;
  io.length = length;
  return io;
}

OpenResponse good_open_response() {
  OpenResponse response;
  response.sector_count = uint64_t{2097152};
  response.max_hw_sectors = 2560U;
  response.max_discard_sectors = 4194303U;
  response.discard_granularity = 4096U;
  response.physical_block_size = uint16_t{4096};
  response.logical_block_size = uint16_t{512};
  response.max_segments = uint16_t{128};
  response.cache_policy = cache_policy_fua | cache_policy_writeback;
  return response;
}

}  // namespace

// --- What lies in the chunk, user message and RTRS message together, as a kernel client writes it

TEST_CASE("SESS_INFO in its chunk") {
  CHECK(to_hex(concatenated(SessionInfo{}, read_with_descriptor(36),
                            descriptor(0xffff888101234000, 0x12345, 36))) ==
        to_hex(hex("00 00 00 00 02 00 00 00 00 00 00 00 00 00 00 00"
                   "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"
                   "00 00 00 00 03 00 24 00 01 00 01 00 00 40 23 01"
                   "81 88 ff ff 45 23 01 00 24 00 00 00")));
}

TEST_CASE("OPEN in its chunk") {
  Open open;
  REQUIRE(make_open("sdb", AccessMode::read_write, open));
  const auto bytes =
      concatenated(open, read_with_descriptor(264), descriptor(0xffff888105678000, 0x12346, 56));
  CHECK(bytes.size() == 288);
  CHECK(to_hex(std::span(bytes).first(264)) == to_hex(hex("02 00 00 00 01 00 73 64 62", 255)));
  CHECK(to_hex(std::span(bytes).subspan(0x108)) ==
        to_hex(hex("03 00 08 01 01 00 01 00 00 80 67 05 81 88 ff ff 46 23 01 00 38 00 00 00")));
}

TEST_CASE("CLOSE in its chunk") {
  CHECK(to_hex(concatenated(Close{}, write_with(8))) ==
        to_hex(hex("05 00 00 00 00 00 00 00 02 00 08 00")));
}

TEST_CASE("IO WRITE in its chunk") {
  CHECK(to_hex(concatenated(io_message(2048, rnbd_flag_sync | 1, 4096), write_with(32))) ==
        to_hex(hex("04 00 00 00 00 00 00 00 00 08 00 00 00 00 00 00"
                   "01 01 00 00 00 10 00 00 00 00 00 00 00 00 00 00"
                   "02 00 20 00")));
}

TEST_CASE("IO READ in its chunk") {
  CHECK(to_hex(concatenated(io_message(2048, rnbd_flag_sync | 0, 4096), read_with_descriptor(32),
                            descriptor(0xffff88810abcd000, 0x20711, 4096))) ==
        to_hex(hex("04 00 00 00 00 00 00 00 00 08 00 00 00 00 00 00"
                   "00 01 00 00 00 10 00 00 00 00 00 00 00 00 00 00"
                   "03 00 20 00 01 00 01 00 00 d0 bc 0a 81 88 ff ff"
                   "11 07 02 00 00 10 00 00")));
}

TEST_CASE("IO FLUSH in its chunk, as old and new clients send it") {
  ReadMessage bare;
  bare.user_length = uint16_t{32};
  const auto bytes =
      concatenated(io_message(UINT64_MAX, rnbd_flag_fua | rnbd_flag_sync | 2, 0), bare);
  CHECK(to_hex(bytes) == to_hex(hex("04 00 00 00 00 00 00 00 ff ff ff ff ff ff ff ff"
                                    "02 03 00 00 00 00 00 00 00 00 00 00 00 00 00 00"
                                    "03 00 20 00 00 00 00 00")));
  const auto newer = concatenated(
      io_message(UINT64_MAX, rnbd_flag_preflush | rnbd_flag_fua | rnbd_flag_sync | 2, 0), bare);
  CHECK(newer[0x11] == std::byte{7});
}

TEST_CASE("IO DISCARD in its chunk") {
  CHECK(to_hex(concatenated(io_message(4096, 3, 1 << 20), write_with(32))) ==
        to_hex(hex("04 00 00 00 00 00 00 00 00 10 00 00 00 00 00 00"
                   "03 00 00 00 00 00 10 00 00 00 00 00 00 00 00 00"
                   "02 00 20 00")));
}

// --- Responses

TEST_CASE("SESS_INFO_RSP has the kernel's bytes") {
  SessionInfo response;
  response.type = static_cast<uint16_t>(RnbdType::session_info_response);
  CHECK(to_hex(bytes_of(response)) == to_hex(hex("01 00 00 00 02", 31)));
  CHECK(parse_session_info_response(bytes_of(response))->version == 2);
  CHECK(!parse_session_info_response(bytes_of(SessionInfo{})));
  for (size_t length = 0; length < sizeof response; ++length)
    CHECK(!parse_session_info_response(bytes_of(response).first(length)));
}

TEST_CASE("OPEN_RSP has the kernel's bytes") {
  const auto response = good_open_response();
  CHECK(to_hex(bytes_of(response)) == to_hex(hex("03 00 00 00 00 00 00 00 00 00 20 00 00 00 00 00"
                                                 "00 0a 00 00 00 00 00 00 ff ff 3f 00 00 10 00 00"
                                                 "00 00 00 00 00 10 00 02 80 00 00 00 00 03 00 00"
                                                 "00 00 00 00 00 00 00 00")));
  const auto parsed = parse_open_response(bytes_of(response));
  REQUIRE(parsed.has_value());
  CHECK(parsed->sector_count == 2097152);
}

TEST_CASE("a client believes no OPEN_RSP that is short, of another type or with absurd sizes") {
  const auto good = good_open_response();
  for (size_t length = 0; length < sizeof good; ++length)
    CHECK(!parse_open_response(bytes_of(good).first(length)));
  const auto outcome = [&good](auto change) {
    auto response = good;
    change(response);
    return parse_open_response(bytes_of(response)).has_value();
  };
  CHECK(!outcome([](auto& r) { r.type = uint16_t{1}; }));
  for (const uint16_t size : std::initializer_list<uint16_t>{0, 1, 3, 256, 513, 1536, 65535}) {
    CAPTURE(size);
    CHECK(!outcome([size](auto& r) { r.logical_block_size = size; }));
  }
  for (const uint16_t size : std::initializer_list<uint16_t>{512, 4096, 32768}) {
    CAPTURE(size);
    CHECK(outcome([size](auto& r) { r.logical_block_size = size; }));
  }
  CHECK(outcome([](auto& r) { r.sector_count = uint64_t{0}; }));
  CHECK(outcome([](auto& r) { r.sector_count = (uint64_t{1} << 54) - 1; }));
  CHECK(!outcome([](auto& r) { r.sector_count = uint64_t{1} << 54; }));
  CHECK(!outcome([](auto& r) { r.sector_count = UINT64_MAX; }));
}

// --- Requests as the server parses them

TEST_CASE("the type of a message is found, unknown types and fragments are refused") {
  for (uint16_t type = 0; type <= 5; ++type) {
    CHECK(parse_rnbd_type(concatenated(Le16(type), Le16(0xbeef))) == static_cast<RnbdType>(type));
  }
  for (const uint16_t type : std::initializer_list<uint16_t>{6, 0x100, 0xffff})
    CHECK(parse_rnbd_type(concatenated(Le16(type), Le16(0))).error() == EINVAL);
  for (size_t length = 0; length < 4; ++length)
    CHECK(!parse_rnbd_type(std::vector<std::byte>(length)));
}

TEST_CASE("garbage in padding and reserved bytes is tolerated") {
  auto bytes = std::vector<std::byte>(264, std::byte{0xa5});
  store(bytes.data(), Le16(0));
  bytes[4] = std::byte{2};
  CHECK(parse_session_info(std::span(bytes).first(36))->version == 2);

  store(bytes.data(), Le16(2));
  std::copy_n(hex("73 64 62 00").begin(), 4, bytes.begin() + 6);
  Open open;
  CHECK(parse_open(bytes, open).value() == "sdb");

  store(bytes.data(), Le16(5));
  CHECK(parse_close(std::span(bytes).first(8)).has_value());
  store(bytes.data(), Le16(4));
  CHECK(parse_io(std::span(bytes).first(32)).has_value());
}

TEST_CASE("truncated messages are refused at every length, longer ones are not") {
  std::vector<std::byte> bytes(300);
  Open open;
  for (size_t length = 0; length < bytes.size(); ++length) {
    const std::span<const std::byte> part = std::span(bytes).first(length);
    store(bytes.data(), Le16(0));
    CHECK(parse_session_info(part).has_value() == (length >= 36));
    store(bytes.data(), Le16(2));
    bytes[6] = std::byte{'x'};
    CHECK(parse_open(part, open).has_value() == (length >= 264));
    store(bytes.data(), Le16(5));
    CHECK(parse_close(part).has_value() == (length >= 8));
    store(bytes.data(), Le16(4));
    CHECK(parse_io(part).has_value() == (length >= 24));
  }
}

TEST_CASE("parsers refuse the messages of the others") {
  std::vector<std::byte> bytes(264, std::byte{'x'});
  bytes[100] = std::byte{0};
  Open open;
  for (uint16_t type = 0; type < 8; ++type) {
    store(bytes.data(), Le16(type));
    CHECK(parse_session_info(bytes).has_value() == (type == 0));
    CHECK(parse_open(bytes, open).has_value() == (type == 2));
    CHECK(parse_io(bytes).has_value() == (type == 4));
    CHECK(parse_close(bytes).has_value() == (type == 5));
  }
}

TEST_CASE("the priority of an IO counts only in a full message") {
  auto io = io_message(1, 0, 512);
  io.priority = uint16_t{0x2004};
  for (const size_t length : std::initializer_list<size_t>{24, 26, 28, 31})
    CHECK(parse_io(bytes_of(io).first(length))->priority == 0);
  CHECK(parse_io(bytes_of(io))->priority == 0x2004);
  CHECK(parse_io(bytes_of(io).first(24))->length == 512);
}

TEST_CASE("a device name must be terminated and not empty") {
  Open open, copy;
  REQUIRE(make_open(std::string(254, 'd'), AccessMode::read_only, open));
  CHECK(parse_open(bytes_of(open), copy).value() == std::string(254, 'd'));
  open.device_name[254] = 'd';
  CHECK(!parse_open(bytes_of(open), copy));
  open.device_name[0] = '\0';
  CHECK(!parse_open(bytes_of(open), copy));
}

TEST_CASE("a device name that does not fit is not cut") {
  Open open;
  CHECK(!make_open("", AccessMode::read_only, open));
  CHECK(!make_open(std::string(255, 'd'), AccessMode::read_only, open));
  CHECK(!make_open(std::string_view("a\0b", 3), AccessMode::read_only, open));
  CHECK(make_open("a", AccessMode::migration, open));
  CHECK(open.access_mode == 2);
}
