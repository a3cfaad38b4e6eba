// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/wire/rtrs.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <string>
#include <vector>

#include "tests/support/hex.h"

using namespace rtrsnbd::wire;
using rtrsnbd::test::hex;
using rtrsnbd::test::to_hex;

namespace {

constexpr uint32_t chunk_size = 131072;

Uuid counting_uuid(uint8_t first) {
  Uuid uuid;
  for (auto& byte : uuid) byte = static_cast<std::byte>(first++);
  return uuid;
}

ConnectRequest good_request() {
  ConnectRequest request;
  request.cid = uint16_t{0};
  request.cid_num = uint16_t{5};
  request.reconnect_count = uint16_t{1};
  request.path_uuid = counting_uuid(0x10);
  request.session_uuid = counting_uuid(0xa0);
  request.flags = 1;
  return request;
}

ConnectResponse response_of(uint16_t depth, uint32_t io, uint32_t header) {
  ConnectResponse response;
  response.queue_depth = depth;
  response.max_io_size = io;
  response.max_hdr_size = header;
  return response;
}

std::vector<std::byte> info_response(const std::vector<Descriptor>& descriptors) {
  InfoResponseHeader header;
  header.descriptor_count = static_cast<uint16_t>(descriptors.size());
  std::vector<std::byte> bytes(sizeof header + descriptors.size() * sizeof(Descriptor));
  store(bytes.data(), header);
  for (size_t i = 0; i < descriptors.size(); ++i)
    store(bytes.data() + sizeof header + i * sizeof(Descriptor), descriptors[i]);
  return bytes;
}

Descriptor descriptor(uint64_t address, uint32_t key, uint32_t length) {
  Descriptor d;
  d.address = address;
  d.key = key;
  d.length = length;
  return d;
}

}  // namespace

// --- Connection request and response

TEST_CASE("a connection request has the bytes a kernel client sends") {
  CHECK(to_hex(bytes_of(good_request())) ==
        to_hex(hex("00 00 bd 1b 00 02 00 00 05 00 01 00 10 11 12 13"
                   "14 15 16 17 18 19 1a 1b 1c 1d 1e 1f a0 a1 a2 a3"
                   "a4 a5 a6 a7 a8 a9 aa ab ac ad ae af 01 00 00 00"
                   "00 00 00 00 00 00 00 00")));
  auto last = good_request();
  last.cid = uint16_t{4};
  last.reconnect_count = uint16_t{3};
  last.flags = 0;
  CHECK(to_hex(bytes_of(last)) == to_hex(hex("00 00 bd 1b 00 02 04 00 05 00 03 00 10 11 12 13"
                                             "14 15 16 17 18 19 1a 1b 1c 1d 1e 1f a0 a1 a2 a3"
                                             "a4 a5 a6 a7 a8 a9 aa ab ac ad ae af 00 00 00 00"
                                             "00 00 00 00 00 00 00 00")));
}

TEST_CASE(
    "a connection request is parsed, also when padded with zeroes or when its reserved bytes are "
    "not zero") {
  const auto bytes =
      hex("07 08 bd 1b 00 02 04 00 05 00 03 00", 32);  // CMA bytes are not ours to check
  auto padded = bytes;
  padded.resize(196);
  padded[44] = std::byte{0xff};
  padded[50] = std::byte{0xff};
  const auto request = parse_connect_request(padded);
  REQUIRE(request.has_value());
  CHECK(request->cid == 4);
  CHECK(request->cid_num == 5);
  CHECK(request->reconnect_count == 3);
  CHECK(request->first_connection());
}

TEST_CASE("a truncated connection request is refused at every length") {
  const auto good = good_request();
  const auto bytes = bytes_of(good);
  for (size_t length = 0; length < bytes.size(); ++length) {
    const auto parsed = parse_connect_request(bytes.first(length));
    REQUIRE(!parsed);
    CHECK(parsed.error() == ECONNRESET);
  }
  CHECK(parse_connect_request(bytes).has_value());
}

TEST_CASE("bad magic, major version and connection numbers are refused, an odd minor is not") {
  const auto outcome = [](auto change) {
    auto request = good_request();
    change(request);
    const auto parsed = parse_connect_request(bytes_of(request));
    return parsed ? 0 : parsed.error();
  };
  CHECK(outcome([](auto& r) { r.magic = uint16_t{0xBD1B}; }) == ECONNRESET);
  CHECK(outcome([](auto& r) { r.magic = uint16_t{0}; }) == ECONNRESET);
  CHECK(outcome([](auto& r) { r.version = uint16_t{0x0100}; }) == ECONNRESET);
  CHECK(outcome([](auto& r) { r.version = uint16_t{0x0300}; }) == ECONNRESET);
  CHECK(outcome([](auto& r) { r.version = uint16_t{0x02ff}; }) == 0);
  CHECK(outcome([](auto& r) { r.cid_num = uint16_t{0}; }) == ECONNRESET);
  CHECK(outcome([](auto& r) { r.cid_num = uint16_t{1}; }) == 0);
  CHECK(outcome([](auto& r) { r.cid_num = uint16_t{4096}; }) == 0);
  CHECK(outcome([](auto& r) { r.cid_num = uint16_t{4097}; }) == ECONNRESET);
  CHECK(outcome([](auto& r) { r.cid_num = uint16_t{65535}; }) == ECONNRESET);
  CHECK(outcome([](auto& r) { r.cid = uint16_t{4}; }) == 0);
  CHECK(outcome([](auto& r) { r.cid = uint16_t{5}; }) == ECONNRESET);
  CHECK(outcome([](auto& r) { r.cid = uint16_t{65535}; }) == ECONNRESET);
}

TEST_CASE("a connection response has the bytes a kernel server sends") {
  auto accept = response_of(512, 126976, 4096);
  accept.flags = connect_flag_new_rkey;
  CHECK(to_hex(bytes_of(accept)) ==
        to_hex(hex("bd 1b 00 02 00 00 00 02 00 f0 01 00 00 10 00 00 02 00 00 00", 36)));
  CHECK(geometry_acceptable(accept));

  const std::pair<int, const char*> rejects[] = {
      {ECONNRESET, "98 ff"}, {ENXIO, "fa ff"}, {EEXIST, "ef ff"}, {ENOMEM, "f4 ff"}};
  for (const auto& [error, bytes] : rejects) {
    ConnectResponse reject;
    reject.error = static_cast<uint16_t>(-error);
    CHECK(to_hex(bytes_of(reject)) == to_hex(hex("bd 1b 00 02 " + std::string(bytes), 50)));
    const auto parsed = parse_connect_response(bytes_of(reject));
    REQUIRE(parsed.has_value());
    CHECK(parsed->error_number() == error);
  }
}

TEST_CASE("a connection response that is short or foreign is refused") {
  const auto good = response_of(512, 126976, 4096);
  const auto bytes = bytes_of(good);
  for (size_t length = 0; length < bytes.size(); ++length) {
    const auto parsed = parse_connect_response(bytes.first(length));
    REQUIRE(!parsed);
    CHECK(parsed.error() == ECONNRESET);
  }
  auto foreign = good;
  foreign.magic = uint16_t{1};
  CHECK(!parse_connect_response(bytes_of(foreign)));
  foreign = good;
  foreign.version = uint16_t{0x0300};
  CHECK(!parse_connect_response(bytes_of(foreign)));
}

TEST_CASE("a client refuses geometries that would make it compute nonsense") {
  CHECK(geometry_acceptable(response_of(128, 131072, 4096)));
  CHECK(geometry_acceptable(response_of(1, 4096, 4096)));
  CHECK(!geometry_acceptable(response_of(0, 131072, 4096)));
  CHECK(!geometry_acceptable(response_of(128, 0, 4096)));
  CHECK(!geometry_acceptable(response_of(128, 131072, 0)));
  CHECK(!geometry_acceptable(response_of(128, 131072, 64)));        // no room for an OPEN
  CHECK(!geometry_acceptable(response_of(128, 0xffffffff, 2)));     // wraps to 1
  CHECK(!geometry_acceptable(response_of(128, 0xfffff000, 4096)));  // wraps to 0
  CHECK(!geometry_acceptable(response_of(2, 0x80000000, 0x80000000)));
  CHECK(geometry_acceptable(response_of(512, 524288 - 4096, 4096)));
  CHECK(!geometry_acceptable(response_of(512, 524288, 4096)));  // 29 bits
  CHECK(!geometry_acceptable(response_of(65535, 4096, 4096)));
  CHECK(geometry_acceptable(response_of(65535, 2048, 2048)));
}

// --- Immediates

TEST_CASE("bits are counted as the kernel counts them") {
  CHECK(bits_for(0) == 0);
  CHECK(bits_for(1) == 0);
  CHECK(bits_for(2) == 1);
  CHECK(bits_for(500) == 9);
  CHECK(bits_for(512) == 9);
  CHECK(bits_for(513) == 10);
}

TEST_CASE("request immediates have the kernel's values") {
  struct {
    uint32_t depth, chunk, offset, value;
  } const vectors[] = {
      {128, 127, 131071, 0x0fe1ffff}, {500, 499, 4128, 0x0f981020}, {1024, 1023, 72, 0x0ffc0048},
      {1, 0, 100, 0x00000064},        {512, 0, 72, 0x00000048},     {512, 1, 320, 0x00080140},
      {512, 2, 8, 0x00100008},        {512, 5, 4128, 0x00281020},   {512, 511, 32, 0x0ff80020},
      {512, 3, 32, 0x00180020},
  };
  for (const auto& v : vectors) {
    CHECK(IoRequestImmediate{v.chunk, v.offset}.encode(v.depth) == v.value);
    const auto decoded = IoRequestImmediate::decode(v.value, v.depth);
    CHECK(decoded.chunk_id == v.chunk);
    CHECK(decoded.offset == v.offset);
  }
  CHECK(to_hex(bytes_of(Be32(0x00281020))) == "00 28 10 20");
}

TEST_CASE("response immediates have the kernel's values") {
  struct {
    uint32_t id;
    int error;
    bool invalidated;
    uint32_t value;
  } const vectors[] = {
      {5, 0, false, 0x10000005},        {5, 0, true, 0x20000005},
      {511, EIO, false, 0x102801ff},    {1, EPERM, true, 0x20080001},
      {2, EINVAL, false, 0x10b00002},   {3, EOPNOTSUPP, false, 0x12f80003},
      {7, ENOTCONN, false, 0x13580007},
  };
  for (const auto& v : vectors) {
    CHECK(IoResponseImmediate{v.id, static_cast<uint32_t>(v.error), v.invalidated}.encode() ==
          v.value);
    const auto decoded = IoResponseImmediate::decode(v.value);
    CHECK(decoded.message_id == v.id);
    CHECK(decoded.error == static_cast<uint32_t>(v.error));
    CHECK(decoded.invalidated == v.invalidated);
  }
  CHECK(IoResponseImmediate{0, 524, false}.encode() == 0x10600000);  // does not fit: reads as 12
  CHECK(heartbeat_immediate == 0x80000000);
  CHECK(heartbeat_ack_immediate == 0x90000000);
}

TEST_CASE("every pair of chunk and offset of a geometry that fits survives the immediate") {
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    const uint32_t depth = 1 + static_cast<uint32_t>(random() % queue_depth_max);
    const uint32_t size = 1 + static_cast<uint32_t>(random() % (1U << (28 - bits_for(depth))));
    REQUIRE(geometry_fits(depth, size));
    const uint32_t chunk = static_cast<uint32_t>(random() % depth);
    const uint32_t offset = static_cast<uint32_t>(random() % size);
    const uint32_t imm = IoRequestImmediate{chunk, offset}.encode(depth);
    REQUIRE(immediate_type(imm) == 0);
    const auto decoded = IoRequestImmediate::decode(imm, depth);
    REQUIRE(decoded.chunk_id == chunk);
    REQUIRE(decoded.offset == offset);
  }
}

// --- INFO

TEST_CASE("an info request has the bytes a kernel client sends") {
  InfoRequest request;
  REQUIRE(make_info_request("clt1-srv1", request));
  CHECK(to_hex(bytes_of(request)) == to_hex(hex("00 00 63 6c 74 31 2d 73 72 76 31", 261)));
  InfoRequest copy;
  CHECK(parse_info_request(bytes_of(request), copy).value() == "clt1-srv1");
}

TEST_CASE("session names that are empty, too long or could climb are refused by both ends") {
  InfoRequest request, copy;
  CHECK(make_info_request(std::string(254, 'n'), request));
  CHECK(parse_info_request(bytes_of(request), copy).value() == std::string(254, 'n'));
  CHECK(!make_info_request("", request));
  CHECK(!make_info_request(std::string(255, 'n'), request));
  CHECK(!make_info_request("a/b", request));
  CHECK(!make_info_request("a.b", request));
  CHECK(!make_info_request(std::string_view("a\0b", 3), request));

  const auto outcome = [&copy](std::string_view name) {
    InfoRequest bad;
    std::copy(name.begin(), name.end(), bad.session_name.begin());
    return parse_info_request(bytes_of(bad), copy).has_value();
  };
  CHECK(!outcome(""));
  CHECK(!outcome(std::string(255, 'n')));  // no terminator
  CHECK(!outcome("a/b"));
  CHECK(!outcome(".."));
  CHECK(outcome("%s%n"));
  CHECK(outcome("\x01\x1b[2J\xff"));  // odd, but harmless when printed with care
}

TEST_CASE("an info request of another size or type is refused") {
  InfoRequest request, copy;
  REQUIRE(make_info_request("name", request));
  std::vector<std::byte> bytes(274);
  store(bytes.data(), request);
  for (size_t length = 0; length <= bytes.size(); ++length)
    CHECK(parse_info_request(std::span(bytes).first(length), copy).has_value() == (length == 272));
  for (const uint16_t type : std::initializer_list<uint16_t>{1, 2, 3, 4, 0xffff}) {
    request.type = type;
    CHECK(!parse_info_request(bytes_of(request), copy));
  }
}

TEST_CASE("an info response with one descriptor lays out all chunks") {
  const auto bytes = hex("01 00 01 00 00 00 00 00 00 00 00 40 2a 7f 00 00 2b 1a 00 00 00 00 00 04");
  CHECK(to_hex(bytes) == to_hex(info_response({descriptor(0x7f2a40000000, 0x1a2b, 64 << 20)})));
  std::vector<ChunkWindow> chunks(512);
  REQUIRE(parse_info_response(bytes, chunk_size, chunks) == 0);
  for (size_t i = 0; i < chunks.size(); ++i) {
    CHECK(chunks[i].address == 0x7f2a40000000 + i * chunk_size);
    CHECK(chunks[i].rkey == 0x1a2b);
  }
}

TEST_CASE("an info response with a descriptor per chunk gives each chunk its key") {
  const auto bytes =
      hex("01 00 02 00 00 00 00 00 00 00 10 00 00 00 00 00"
          "01 11 00 00 00 00 02 00 00 00 12 00 00 00 00 00"
          "02 12 00 00 00 00 02 00");
  std::vector<ChunkWindow> chunks(2);
  REQUIRE(parse_info_response(bytes, chunk_size, chunks) == 0);
  CHECK(chunks[0].address == 0x100000);
  CHECK(chunks[0].rkey == 0x1101);
  CHECK(chunks[1].address == 0x120000);
  CHECK(chunks[1].rkey == 0x1202);
}

TEST_CASE("info responses that do not describe exactly the chunks are refused") {
  const auto outcome = [](const std::vector<Descriptor>& descriptors, size_t depth) {
    std::vector<ChunkWindow> chunks(depth);
    return parse_info_response(info_response(descriptors), chunk_size, chunks) == 0;
  };
  CHECK(outcome({descriptor(0, 1, chunk_size), descriptor(0, 2, chunk_size)}, 2));
  CHECK(outcome({descriptor(0, 1, 3 * chunk_size), descriptor(0, 2, chunk_size)}, 4));
  CHECK(!outcome({}, 2));
  CHECK(!outcome({descriptor(0, 1, chunk_size)}, 2));      // too little
  CHECK(!outcome({descriptor(0, 1, 3 * chunk_size)}, 2));  // too much
  CHECK(!outcome({descriptor(0, 1, 2 * chunk_size), descriptor(0, 2, chunk_size)}, 2));  // too much
  CHECK(!outcome({descriptor(0, 1, 0), descriptor(0, 2, 2 * chunk_size)}, 2));           // empty
  CHECK(!outcome({descriptor(0, 1, 2 * chunk_size - 1)}, 2));  // not a multiple
  CHECK(
      !outcome({descriptor(0, 1, chunk_size), descriptor(0, 2, chunk_size)}, 3));  // not a divisor
  CHECK(!outcome({descriptor(0, 1, chunk_size), descriptor(0, 2, chunk_size)},
                 1));                                                            // more than chunks
  CHECK(!outcome({descriptor(UINT64_MAX - chunk_size, 1, 2 * chunk_size)}, 2));  // wraps
  CHECK(outcome({descriptor(0, 1, 2048U * chunk_size)}, 2048));
  CHECK(!outcome({descriptor(0, 1, 4096U * chunk_size)}, 4096));  // 29 bits
}

TEST_CASE("an info response that is truncated, too long or of another type is refused") {
  const auto good = info_response({descriptor(0, 1, chunk_size), descriptor(0, 2, chunk_size)});
  std::vector<ChunkWindow> chunks(2);
  for (size_t length = 0; length < good.size(); ++length)
    CHECK(parse_info_response(std::span(good).first(length), chunk_size, chunks) != 0);
  CHECK(parse_info_response(good, chunk_size, chunks) == 0);
  auto longer = good;
  longer.resize(good.size() + 1);
  CHECK(parse_info_response(longer, chunk_size, chunks) != 0);
  auto other = good;
  other[0] = std::byte{4};
  CHECK(parse_info_response(other, chunk_size, chunks) != 0);
  CHECK(parse_info_response(good, 0, chunks) != 0);
}

TEST_CASE("an rkey response has the kernel's bytes, and is refused when short or of another type") {
  RkeyResponse response;
  response.buffer_id = uint16_t{5};
  response.rkey = 0x1a2cU;
  const auto bytes = bytes_of(response);
  CHECK(to_hex(bytes) == "04 00 05 00 2c 1a 00 00");
  CHECK(parse_rkey_response(bytes)->rkey == 0x1a2c);
  CHECK(parse_rkey_response(bytes)->buffer_id == 5);
  for (size_t length = 0; length < bytes.size(); ++length)
    CHECK(!parse_rkey_response(bytes.first(length)));
  response.type = uint16_t{3};
  CHECK(!parse_rkey_response(bytes_of(response)));
}

// --- Requests in a chunk

namespace {

constexpr uint32_t max_io_size = 16384;
constexpr uint32_t small_chunk = max_io_size + 4096;

// A chunk with message at offset.
struct Chunk {
  std::vector<std::byte> bytes = std::vector<std::byte>(small_chunk);

  void put(size_t offset, std::span<const std::byte> message) {
    std::copy_n(message.begin(), std::min(message.size(), bytes.size() - offset),
                bytes.begin() + static_cast<ptrdiff_t>(offset));
  }
  [[nodiscard]] auto parse(uint32_t offset) const {
    return parse_io_request(bytes, offset, max_io_size);
  }
};

std::vector<std::byte> write_message(uint16_t user_length) {
  WriteMessage message;
  message.user_length = user_length;
  const auto bytes = bytes_of(message);
  return {bytes.begin(), bytes.end()};
}

std::vector<std::byte> read_message(uint16_t user_length, uint16_t flags, uint16_t count,
                                    uint32_t length) {
  ReadMessage message;
  message.user_length = user_length;
  message.flags = flags;
  message.descriptor_count = count;
  std::vector<std::byte> bytes(sizeof message + sizeof(Descriptor));
  store(bytes.data(), message);
  store(bytes.data() + sizeof message, descriptor(0xffff888101234000, 0x12345, length));
  return bytes;
}

}  // namespace

TEST_CASE("a write as a kernel client lays it out") {
  Chunk chunk;
  chunk.put(4096 + 32, hex("02 00 20 00"));
  const auto request = chunk.parse(4096 + 32);
  REQUIRE(request.has_value());
  CHECK(request->type == RtrsType::write);
  CHECK(request->data_length == 4096);
  CHECK(request->user_length == 32);
  CHECK(!request->has_descriptor);
  CHECK(!request->need_invalidation);
}

TEST_CASE("a read as a kernel client lays it out") {
  Chunk chunk;
  chunk.put(4096 + 32,
            hex("03 00 20 00 01 00 01 00 00 d0 bc 0a 81 88 ff ff 11 07 02 00 00 10 00 00"));
  const auto request = chunk.parse(4096 + 32);
  REQUIRE(request.has_value());
  CHECK(request->type == RtrsType::read);
  CHECK(request->data_length == 4096);
  CHECK(request->user_length == 32);
  CHECK(request->has_descriptor);
  CHECK(request->need_invalidation);
  CHECK(request->descriptor.address == 0xffff88810abcd000);
  CHECK(request->descriptor.key == 0x20711);
  CHECK(request->descriptor.length == 4096);
}

TEST_CASE("a read without a descriptor needs no invalidation, whatever it says") {
  Chunk chunk;
  chunk.put(32, hex("03 00 20 00 00 00 00 00"));
  REQUIRE(chunk.parse(32).has_value());
  CHECK(!chunk.parse(32)->has_descriptor);
  chunk.put(32, hex("03 00 20 00 ff ff 00 00"));
  REQUIRE(chunk.parse(32).has_value());
  CHECK(!chunk.parse(32)->need_invalidation);
}

TEST_CASE("unknown flags of a read are ignored") {
  Chunk chunk;
  chunk.put(40, read_message(8, 0xfffe, 1, 32));
  REQUIRE(chunk.parse(40).has_value());
  CHECK(!chunk.parse(40)->need_invalidation);
  CHECK(chunk.parse(40)->has_descriptor);
}

TEST_CASE("a message that runs over the end of the chunk is refused, one that just fits is not") {
  // A user message as long as needed for data_length to stay legal.
  for (uint32_t before_end = 0; before_end <= 30; ++before_end) {
    const uint32_t offset = small_chunk - before_end;
    Chunk chunk;
    const auto user_length = static_cast<uint16_t>(offset - 512);
    chunk.put(offset, write_message(user_length));
    CHECK(chunk.parse(offset).has_value() == (before_end >= 4));
    chunk.put(offset, read_message(user_length, 0, 0, 0));
    CHECK(chunk.parse(offset).has_value() == (before_end >= 8));
    chunk.put(offset, read_message(user_length, 0, 1, 512));
    CHECK(chunk.parse(offset).has_value() == (before_end >= 24));
  }
  const Chunk empty;
  for (const uint32_t offset :
       {small_chunk - 1, small_chunk, small_chunk + 1, 0x0fffffffU, 0xffffffffU})
    CHECK(!empty.parse(offset).has_value());
}

TEST_CASE("a user message longer than what lies in front of the header is refused") {
  Chunk chunk;
  chunk.put(100, write_message(100));
  CHECK(chunk.parse(100)->data_length == 0);
  chunk.put(100, write_message(101));
  CHECK(!chunk.parse(100));
  chunk.put(100, write_message(65535));
  CHECK(!chunk.parse(100));
  chunk.put(100, read_message(101, 0, 1, 0xffffffff));
  CHECK(!chunk.parse(100));
  chunk.put(0, write_message(0));
  CHECK(chunk.parse(0)->data_length == 0);
  chunk.put(0, write_message(1));
  CHECK(!chunk.parse(0));
}

TEST_CASE("unknown message types are refused") {
  for (const char* type : {"00 00", "01 00", "04 00", "05 00", "ff ff", "02 01"}) {
    Chunk chunk;
    chunk.put(64, hex(std::string(type) + "20 00 00 00 00 00"));
    CHECK(!chunk.parse(64).has_value());
  }
}

TEST_CASE("a descriptor must ask for exactly the data in front of the user message") {
  const auto outcome = [](uint16_t count, uint32_t data_length, uint32_t length) {
    Chunk chunk;
    chunk.put(data_length + 32, read_message(32, 1, count, length));
    return chunk.parse(data_length + 32).has_value();
  };
  CHECK(outcome(1, 4096, 4096));
  CHECK(outcome(1, max_io_size, max_io_size));
  CHECK(!outcome(1, 4096, 4095));
  CHECK(!outcome(1, 4096, 4097));
  CHECK(!outcome(1, 4096, 0));
  CHECK(!outcome(1, 0, 0));
  CHECK(!outcome(1, 4096, 0xffffffff));
  CHECK(!outcome(1, max_io_size + 1, max_io_size + 1));
  CHECK(!outcome(2, 4096, 4096));
  CHECK(!outcome(65535, 4096, 4096));
}

TEST_CASE("data beyond the advertised maximum is refused although the chunk would hold it") {
  Chunk chunk;
  chunk.put(max_io_size + 8, write_message(8));
  CHECK(chunk.parse(max_io_size + 8).has_value());
  chunk.put(max_io_size + 9, write_message(8));
  CHECK(!chunk.parse(max_io_size + 9).has_value());
}

TEST_CASE("whatever lies in a chunk, an accepted request stays inside it") {
  std::mt19937_64 random(7);
  int accepted = 0;
  for (int round = 0; round < 50000; ++round) {
    Chunk chunk;
    const auto size = 1 + random() % 256;
    chunk.bytes.resize(size);
    for (auto& byte : chunk.bytes)
      byte = static_cast<std::byte>(random() % 5 == 0 ? random() : random() % 4);
    const auto offset = static_cast<uint32_t>(random() % (size + 8));
    const auto request = parse_io_request(chunk.bytes, offset, 128);
    if (!request) continue;
    ++accepted;
    REQUIRE(offset < size);
    REQUIRE(request->data_length + request->user_length == offset);
    REQUIRE(request->data_length <= 128);
    if (request->has_descriptor) REQUIRE(request->descriptor.length == request->data_length);
  }
  CHECK(accepted > 100);  // else the generator tests nothing
}
