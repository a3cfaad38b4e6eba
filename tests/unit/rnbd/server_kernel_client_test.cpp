// SPDX-License-Identifier: BSD-3-Clause
// A whole conversation in the bytes a kernel client sends: connect, SESS_INFO, OPEN, IO of every
// kind, CLOSE. Only what names the client's own memory is filled in.
#include <doctest/doctest.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "protocol/rnbd/server.h"
#include "tests/support/hex.h"
#include "tests/support/memory_volumes.h"
#include "tests/support/raw_client.h"

using namespace rtrsnbd;
using test::hex;
using test::RawClient;
using test::ServerWorld;

namespace {

rtrs::ServerLimits kernel_limits(bool new_rkey) {
  rtrs::ServerLimits limits;
  limits.queue_depth = 512;
  limits.max_io_size = 126976;
  limits.max_header_size = 4096;
  limits.always_invalidate = new_rkey;
  return limits;
}

struct Conversation {
  explicit Conversation(bool new_rkey)
      : world(kernel_limits(new_rkey)), client(world, {.connections = 5}) {
    volumes.try_emplace("sdb", size_t{16} << 20);
    world.make_upper = [this](const rtrs::SessionIdentity& identity) {
      return rnbd::make_server_session(identity, std::make_unique<test::MemoryVolumes>(volumes),
                                       [](LogLevel, std::string_view) {});
    };
    REQUIRE(client.connect());
  }

  // Writes text into the chunk at start; for a read, the descriptor at its end is made to name room
  // for length bytes here.
  test::Answer send(uint16_t cid, uint32_t id, uint32_t immediate, uint32_t start,
                    std::vector<std::byte> bytes, uint32_t length = 0) {
    if (length != 0) {
      room.assign(length, std::byte{0xee});
      region =
          client.domain->register_region(room.data(), room.size(), fabric::Access::remote_write);
      wire::Descriptor descriptor;
      descriptor.address = region->remote_address();
      descriptor.key = region->rkey();
      descriptor.length = length;
      wire::store(bytes.data() + bytes.size() - sizeof descriptor, descriptor);
    }
    client.write_chunk(cid, id, start, bytes, immediate);
    client.settle();
    REQUIRE(client.answers.size() == 1);
    const auto answer = client.answers.front();
    client.answers.clear();
    CHECK(answer.id == id);
    CHECK(answer.cid == cid);
    CHECK(answer.invalidated == (length != 0));
    return answer;
  }

  test::MemoryVolumes::Map volumes;  // outlives the server
  ServerWorld world;
  RawClient client;
  std::vector<std::byte> room;
  std::unique_ptr<fabric::Region> region;
};

}  // namespace

TEST_CASE("a conversation with a kernel client, in both modes") {
  for (const bool new_rkey : {false, true}) {
    CAPTURE(new_rkey);
    Conversation talk(new_rkey);
    auto& volume = talk.volumes.at("sdb");

    // SESS_INFO on connection 0, chunk 0
    CHECK(talk.send(0, 0, 0x00000048, 36,
                    hex("00 00 00 00 02 00 00 00 00 00 00 00 00 00 00 00"
                        "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"
                        "00 00 00 00 03 00 24 00 01 00 01 00 00 40 23 01"
                        "81 88 ff ff 45 23 01 00 24 00 00 00"),
                    36)
              .error == 0);
    CHECK(test::to_hex(talk.room) == test::to_hex(hex("01 00 00 00 02", 31)));

    // OPEN "sdb", chunk 1
    auto open = hex("02 00 00 00 01 00 73 64 62", 255);
    const auto read_message =
        hex("03 00 08 01 01 00 01 00 00 80 67 05 81 88 ff ff 46 23 01 00 38 00 00 00");
    open.insert(open.end(), read_message.begin(), read_message.end());
    CHECK(talk.send(0, 1, 0x00080140, 56, open, 56).error == 0);
    const auto device = wire::parse_open_response(talk.room);
    REQUIRE(device.has_value());
    CHECK(device->device_id == 0);
    CHECK(device->sector_count == 32768);
    CHECK(device->max_hw_sectors == 248);

    // WRITE of 4096 bytes at sector 2048, chunk 5
    std::vector<std::byte> write(4096, std::byte{0x77});
    const auto headers =
        hex("04 00 00 00 00 00 00 00 00 08 00 00 00 00 00 00"
            "01 01 00 00 00 10 00 00 00 00 00 00 00 00 00 00"
            "02 00 20 00");
    write.insert(write.end(), headers.begin(), headers.end());
    CHECK(talk.send(1, 5, 0x00281020, 0, write).error == 0);
    CHECK(volume.bytes[2048 * 512] == std::byte{0x77});
    CHECK(volume.bytes[2048 * 512 + 4095] == std::byte{0x77});
    CHECK(volume.bytes[2048 * 512 + 4096] == std::byte{0});

    // READ of the same
    CHECK(talk.send(2, 5, 0x00281020, 4096,
                    hex("04 00 00 00 00 00 00 00 00 08 00 00 00 00 00 00"
                        "00 01 00 00 00 10 00 00 00 00 00 00 00 00 00 00"
                        "03 00 20 00 01 00 01 00 00 d0 bc 0a 81 88 ff ff"
                        "11 07 02 00 00 10 00 00"),
                    4096)
              .error == 0);
    CHECK(talk.room == std::vector<std::byte>(4096, std::byte{0x77}));

    // FLUSH, of an older and of a newer client, chunk 511
    for (const char* flags : {"02 03", "02 07"}) {
      CHECK(talk.send(3, 511, 0x0ff80020, 0,
                      hex("04 00 00 00 00 00 00 00 ff ff ff ff ff ff ff ff" + std::string(flags) +
                          "00 00 00 00 00 00 00 00 00 00 00 00 00 00"
                          "03 00 20 00 00 00 00 00"))
                .error == 0);
    }
    CHECK(volume.flushes == 2);

    // DISCARD of 1 MiB at sector 4096, chunk 3, far longer than a chunk
    volume.bytes[4096 * 512 + (1 << 20) - 1] = std::byte{1};
    CHECK(talk.send(4, 3, 0x00180020, 0,
                    hex("04 00 00 00 00 00 00 00 00 10 00 00 00 00 00 00"
                        "03 00 00 00 00 00 10 00 00 00 00 00 00 00 00 00"
                        "02 00 20 00"))
              .error == 0);
    CHECK(volume.bytes[4096 * 512 + (1 << 20) - 1] == std::byte{0});

    // CLOSE, chunk 2
    const auto close = hex("05 00 00 00 00 00 00 00 02 00 08 00");
    CHECK(talk.send(0, 2, 0x00100008, 0, close).error == 0);
    CHECK(volume.closes == 1);
    CHECK(talk.send(1, 5, 0x00281020, 0, write).error == ENOTCONN);
    CHECK(talk.client.alive());
    CHECK(talk.world.warnings.empty());
  }
}

TEST_CASE("garbage in every padding byte of a kernel client changes nothing") {
  Conversation talk(false);
  auto open = std::vector<std::byte>(264, std::byte{0xa5});
  std::memcpy(open.data(), hex("02 00").data(), 2);
  std::memcpy(open.data() + 4, hex("01").data(), 1);
  std::memcpy(open.data() + 6, hex("73 64 62 00").data(), 4);
  const auto read_message = hex("03 00 08 01 01 00 01 00", 16);
  open.insert(open.end(), read_message.begin(), read_message.end());
  CHECK(talk.send(0, 1, 0x00080140, 56, open, 56).error == 0);
  CHECK(talk.volumes.at("sdb").opens == 1);
  std::vector<std::byte> write(512, std::byte{1});
  const auto headers =
      hex("04 00 a5 a5 00 00 00 00 00 00 00 00 00 00 00 00"
          "01 01 00 00 00 02 00 00 04 20 a5 a5 a5 a5 a5 a5"
          "02 00 20 00");
  write.insert(write.end(), headers.begin(), headers.end());
  CHECK(talk.send(1, 5, wire::IoRequestImmediate{5, 544}.encode(512), 0, write).error == 0);
}
