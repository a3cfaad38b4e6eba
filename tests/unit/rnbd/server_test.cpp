// SPDX-License-Identifier: BSD-3-Clause
// What the RNBD server makes of user messages, good and bad.
#include "protocol/rnbd/server.h"

#include <doctest/doctest.h>

#include <cerrno>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/hex.h"
#include "tests/support/memory_volumes.h"

using namespace rtrsnbd;
using rnbd::DeviceProperties;
using test::hex;
using test::MemoryVolume;
using wire::AccessMode;
using wire::RnbdOp;

namespace {

struct FakeRequest final : rtrs::ServerRequest {
  std::vector<std::byte> data_bytes;
  std::vector<std::byte> user_bytes;
  bool read = false, descriptor = false;
  std::optional<int> answer;
  std::vector<FakeRequest*>* order = nullptr;

  std::span<std::byte> data() override { return data_bytes; }
  [[nodiscard]] std::span<const std::byte> user() const override { return user_bytes; }
  [[nodiscard]] bool is_read() const override { return read; }
  [[nodiscard]] bool has_descriptor() const override { return descriptor; }
  [[nodiscard]] int registered_index() const override { return 3; }
  void respond(int error) override {
    CHECK(!answer.has_value());
    answer = error;
    if (order) order->push_back(this);
  }
};

enum class Kind { write, read, read_without_descriptor };

struct World {
  World() {
    volumes.try_emplace("disk");
    volumes.try_emplace("big", size_t{8} << 20, 4096);
    session = make("client");
  }
  ~World() {
    if (session) session->on_session_down();
    session.reset();
    for (const auto& [name, volume] : volumes) {
      CHECK(volume.opens == volume.closes);
      CHECK(volume.access.readers() == 0);
      CHECK(volume.access.writers() == 0);
    }
  }
  std::unique_ptr<rtrs::UpperSession> make(const std::string& name) {
    rtrs::SessionIdentity identity;
    identity.name = name;
    identity.max_io_size = 131072;
    return rnbd::make_server_session(
        identity, std::make_unique<test::MemoryVolumes>(volumes),
        [this](LogLevel, std::string_view line) { log.emplace_back(line); });
  }

  FakeRequest& submit(std::span<const std::byte> user, Kind kind, size_t data_length,
                      std::byte fill = std::byte{0xdd}) {
    auto& request = requests.emplace_back();
    request.user_bytes.assign(user.begin(), user.end());
    request.data_bytes.assign(data_length, fill);
    request.read = kind != Kind::write;
    request.descriptor = kind == Kind::read;
    request.order = &order;
    session->on_request(request);
    return request;
  }

  FakeRequest& open_request(std::string_view name, AccessMode mode = AccessMode::read_write) {
    wire::Open open;
    REQUIRE(wire::make_open(name, mode, open));
    return submit(wire::bytes_of(open), Kind::read, sizeof(wire::OpenResponse));
  }
  uint32_t open(std::string_view name, AccessMode mode = AccessMode::read_write) {
    auto& request = open_request(name, mode);
    REQUIRE(request.answer == 0);
    return wire::load<wire::OpenResponse>(request.data_bytes.data()).device_id;
  }
  FakeRequest& close(uint32_t id) {
    wire::Close close;
    close.device_id = id;
    return submit(wire::bytes_of(close), Kind::write, 0);
  }
  FakeRequest& io(uint32_t id, uint32_t rw, uint64_t sector, uint32_t length, Kind kind,
                  size_t data_length) {
    wire::Io io;
    io.device_id = id;
    io.rw = rw;
    io.sector = sector;
    io.length = length;
    return submit(wire::bytes_of(io), kind, data_length);
  }
  FakeRequest& read(uint32_t id, uint64_t sector, uint32_t length) {
    return io(id, 0x100, sector, length, Kind::read, length);
  }
  FakeRequest& write(uint32_t id, uint64_t sector, uint32_t length, uint32_t flags = 0) {
    return io(id, 1 | flags, sector, length, Kind::write, length);
  }
  FakeRequest& flush(uint32_t id) {
    return io(id, 0x302, UINT64_MAX, 0, Kind::read_without_descriptor, 0);
  }
  FakeRequest& special(RnbdOp op, uint32_t id, uint64_t sector, uint32_t length,
                       uint32_t flags = 0) {
    return io(id, static_cast<uint32_t>(op) | flags, sector, length, Kind::write, 0);
  }

  test::MemoryVolumes::Map volumes;
  std::vector<std::string> log;
  std::deque<FakeRequest> requests;
  std::vector<FakeRequest*> order;
  std::unique_ptr<rtrs::UpperSession> session;
};

}  // namespace

// --- SESS_INFO

TEST_CASE(
    "SESS_INFO answers the lower version, as often as it is asked, and nothing but zeroes "
    "besides") {
  World world;
  for (const uint8_t version : {uint8_t{2}, uint8_t{0}, uint8_t{1}, uint8_t{255}, uint8_t{2}}) {
    wire::SessionInfo info;
    info.version = version;
    auto& request = world.submit(wire::bytes_of(info), Kind::read, 36);
    CHECK(request.answer == 0);
    auto expected = hex("01 00 00 00 02", 31);
    expected[4] = static_cast<std::byte>(std::min<uint8_t>(version, 2));
    CHECK(test::to_hex(request.data_bytes) == test::to_hex(expected));
  }
}

TEST_CASE("SESS_INFO with more room than it needs leaves nothing of the chunk in it") {
  World world;
  auto& request = world.submit(wire::bytes_of(wire::SessionInfo{}), Kind::read, 4096);
  CHECK(request.answer == 0);
  CHECK(std::all_of(request.data_bytes.begin() + 36, request.data_bytes.end(),
                    [](std::byte b) { return b == std::byte{0}; }));
}

TEST_CASE("SESS_INFO and OPEN as a write, without descriptor or without room are refused") {
  World world;
  wire::Open open;
  REQUIRE(wire::make_open("disk", AccessMode::read_write, open));
  const wire::SessionInfo info;
  for (const auto& message : {wire::bytes_of(info), wire::bytes_of(open)}) {
    CHECK(world.submit(message, Kind::write, 56).answer == EINVAL);
    CHECK(world.submit(message, Kind::write, 0).answer == EINVAL);
    CHECK(world.submit(message, Kind::read_without_descriptor, 56).answer == EINVAL);
    CHECK(world.submit(message, Kind::read, 0).answer == EINVAL);
    CHECK(world.submit(message, Kind::read, 35).answer == EINVAL);
  }
  CHECK(world.submit(wire::bytes_of(open), Kind::read, 55).answer == EINVAL);
  CHECK(world.submit(wire::bytes_of(info), Kind::read, 36).answer == 0);
  CHECK(world.volumes.at("disk").opens == 0);
}

TEST_CASE("message-types-unknown, short or meant for clients") {
  World world;
  for (const char* text : {"", "04", "04 00", "04 00 00", "01 00 00 00", "03 00 00 00",
                           "06 00 00 00", "ff ff 00 00"}) {
    CAPTURE(text);
    auto bytes = hex(text);
    CHECK(world.submit(bytes, Kind::read, 4096).answer == EINVAL);
    if (bytes.size() >= 4) bytes.resize(264);
    CHECK(world.submit(bytes, Kind::write, 4096).answer == EINVAL);
  }
}

// --- OPEN

TEST_CASE("OPEN describes the device, ids count from 0") {
  World world;
  auto& disk = world.open_request("disk");
  REQUIRE(disk.answer == 0);
  const auto response = wire::load<wire::OpenResponse>(disk.data_bytes.data());
  CHECK(response.type == 3);
  CHECK(response.device_id == 0);
  CHECK(response.sector_count == 2048);
  CHECK(response.max_hw_sectors == 256);
  CHECK(response.max_write_zeroes_sectors == 2048);
  CHECK(response.max_discard_sectors == 2048);
  CHECK(response.discard_granularity == 512);
  CHECK(response.logical_block_size == 512);
  CHECK(response.physical_block_size == 512);
  CHECK(response.secure_discard == 0);
  CHECK(response.cache_policy == 3);
  CHECK(response.obsolete_rotational == 0);

  auto& big = world.open_request("big");
  const auto second = wire::load<wire::OpenResponse>(big.data_bytes.data());
  CHECK(second.device_id == 1);
  CHECK(second.sector_count == 16384);  // in 512-byte units on a 4K device, too
  CHECK(second.logical_block_size == 4096);
}

TEST_CASE("a device without a write cache promises neither flush nor FUA; one without FUA no FUA") {
  World world;
  world.volumes.at("disk").properties.write_cache = false;
  auto& request = world.open_request("disk");
  CHECK(wire::load<wire::OpenResponse>(request.data_bytes.data()).cache_policy == 0);
  world.volumes.at("big").properties.fua = false;
  auto& other = world.open_request("big");
  CHECK(wire::load<wire::OpenResponse>(other.data_bytes.data()).cache_policy ==
        wire::cache_policy_writeback);
}

TEST_CASE("sizes that do not fit their field are saturated, not cut") {
  World world;
  auto& properties = world.volumes.at("disk").properties;
  properties.discard_bytes_max = uint64_t{1} << 50;
  properties.write_zeroes_bytes_max = (uint64_t{1} << 32) * 512;
  properties.physical_block_size = 65536;
  auto& request = world.open_request("disk");
  const auto response = wire::load<wire::OpenResponse>(request.data_bytes.data());
  CHECK(response.max_discard_sectors == 0xffffffff);
  CHECK(response.max_write_zeroes_sectors == 0xffffffff);
  CHECK(response.physical_block_size == 32768);
  properties.discard_bytes_max = properties.write_zeroes_bytes_max = 0;
  auto& again = world.open_request("disk");
  CHECK(wire::load<wire::OpenResponse>(again.data_bytes.data()).max_discard_sectors == 0);
}

TEST_CASE("OPEN of the same name again gives the same device, whatever the mode says") {
  World world;
  const uint32_t id = world.open("disk", AccessMode::read_only);
  CHECK(world.open("disk", AccessMode::read_write) == id);
  wire::Open open;
  REQUIRE(wire::make_open("disk", AccessMode::read_write, open));
  open.access_mode = 77;
  auto& request = world.submit(wire::bytes_of(open), Kind::read, 56);
  CHECK(request.answer == 0);
  CHECK(world.volumes.at("disk").opens == 1);
  CHECK(world.write(id, 0, 512).answer == EPERM);  // it is still the one opened read-only
  world.close(id);
  CHECK(world.volumes.at("disk").closes == 1);
}

TEST_CASE("OPEN with an unknown mode, a bad or an unknown name is refused") {
  World world;
  wire::Open open;
  REQUIRE(wire::make_open("disk", AccessMode::read_write, open));
  for (const uint8_t mode : {uint8_t{3}, uint8_t{255}}) {
    open.access_mode = mode;
    CHECK(world.submit(wire::bytes_of(open), Kind::read, 56).answer == EINVAL);
  }
  for (const char* name :
       {"nothing", "..", "../disk", "/disk", "//disk", "disk/", "DISK", "\x1b[2J"})
    CHECK(world.open_request(name).answer == ENOENT);
  CHECK(world.open_request(std::string(254, 'd')).answer == ENOENT);
  open = {};
  CHECK(world.submit(wire::bytes_of(open), Kind::read, 56).answer == EINVAL);  // empty
  open.access_mode = 1;
  open.device_name.fill('d');
  CHECK(world.submit(wire::bytes_of(open), Kind::read, 56).answer == EINVAL);  // no terminator
  for (const auto& line : world.log)
    CHECK(std::all_of(line.begin(), line.end(), [](char c) { return c >= 0x20 && c < 0x7f; }));
}

TEST_CASE("a failed OPEN transfers nothing and takes no id") {
  World world;
  auto& failed = world.open_request("nothing");
  CHECK(failed.answer == ENOENT);
  CHECK(world.open("disk") == 0);
}

TEST_CASE("two sessions cannot both write a volume, unless it migrates") {
  World world;
  auto other = world.make("other");
  world.open("disk");
  std::swap(other, world.session);
  CHECK(world.open_request("disk").answer == EPERM);
  CHECK(world.open_request("disk", AccessMode::read_only).answer == 0);
  world.close(0);
  CHECK(world.open_request("disk", AccessMode::migration).answer == 0);
  std::swap(other, world.session);
  other->on_session_down();
}

TEST_CASE("opens-by-the-thousand end at the limit, and leave room after a close") {
  World world;
  for (int i = 0; i < 300; ++i) world.volumes.try_emplace("v" + std::to_string(i), 4096);
  for (uint32_t i = 0; i < rnbd::devices_per_session_max; ++i)
    REQUIRE(world.open("v" + std::to_string(i)) == i);
  CHECK(world.open_request("v299").answer == EMFILE);
  CHECK(world.log.back().find("256 devices are open; the limit is 256") != std::string::npos);
  CHECK(world.open("v7") == 7);  // what is open stays reachable
  CHECK(world.close(100).answer == 0);
  CHECK(world.open("v299") == 100);  // the lowest free id
  for (int i = 0; i < 5000; ++i) CHECK(world.open_request("v298").answer == EMFILE);
  CHECK(world.log.size() < 2000);
}

// --- CLOSE

TEST_CASE("CLOSE of an unknown id, and a second CLOSE, succeed") {
  World world;
  CHECK(world.close(0).answer == 0);
  CHECK(world.close(0xffffffff).answer == 0);
  const uint32_t id = world.open("disk");
  CHECK(world.close(id).answer == 0);
  CHECK(world.close(id).answer == 0);
  CHECK(world.volumes.at("disk").closes == 1);
}

TEST_CASE("CLOSE as a read is refused and closes nothing") {
  World world;
  const uint32_t id = world.open("disk");
  wire::Close close;
  close.device_id = id;
  CHECK(world.submit(wire::bytes_of(close), Kind::read, 64).answer == EINVAL);
  CHECK(world.submit(wire::bytes_of(close), Kind::read_without_descriptor, 0).answer == EINVAL);
  CHECK(world.read(id, 0, 512).answer == 0);
}

TEST_CASE("CLOSE waits for the operations in flight, and is answered after them") {
  World world;
  const uint32_t id = world.open("disk");
  auto& volume = world.volumes.at("disk");
  volume.hold = true;
  auto& first = world.write(id, 0, 512);
  auto& second = world.flush(id);
  auto& close = world.close(id);
  auto& again = world.close(id);
  CHECK(!close.answer.has_value());
  CHECK(world.read(id, 0, 512).answer == ENOTCONN);  // no more from here on
  CHECK(volume.closes == 0);
  world.order.clear();
  volume.release();
  CHECK(first.answer == 0);
  CHECK(second.answer == 0);
  CHECK(close.answer == 0);
  CHECK(again.answer == 0);
  REQUIRE(world.order.size() == 4);
  CHECK(world.order[2] == &close);
  CHECK(volume.closes == 1);
}

TEST_CASE("a name can be opened again while its old device is still closing, if the mode allows") {
  World world;
  const uint32_t id = world.open("disk", AccessMode::read_only);
  auto& volume = world.volumes.at("disk");
  volume.hold = true;
  world.read(id, 0, 512);
  world.close(id);
  const uint32_t next = world.open("disk", AccessMode::read_only);
  CHECK(next != id);  // the old id is still in use
  volume.release();
}

// --- IO

TEST_CASE("what is written is read back") {
  World world;
  const uint32_t id = world.open("disk");
  CHECK(world.write(id, 8, 4096).answer == 0);
  auto& request = world.read(id, 7, 1024);
  CHECK(request.answer == 0);
  CHECK(request.data_bytes[511] == std::byte{0});
  CHECK(request.data_bytes[512] == std::byte{0xdd});
  CHECK(world.special(RnbdOp::write_zeroes, id, 8, 512).answer == 0);
  CHECK(world.read(id, 8, 512).data_bytes[0] == std::byte{0});
  CHECK(world.special(RnbdOp::discard, id, 0, 1 << 20).answer == 0);  // far longer than a chunk
  CHECK(world.read(id, 9, 512).data_bytes[0] == std::byte{0});
}

TEST_CASE("FLUSH is accepted in both forms, with all ones for the sector and every flag") {
  World world;
  const uint32_t id = world.open("disk");
  CHECK(world.io(id, 0x302, UINT64_MAX, 0, Kind::read_without_descriptor, 0).answer == 0);
  CHECK(world.io(id, 0x702, UINT64_MAX, 0, Kind::read_without_descriptor, 0).answer == 0);
  CHECK(world.io(id, 2, 0, 0, Kind::write, 0).answer == 0);
  CHECK(world.volumes.at("disk").flushes == 3);
  CHECK(world.io(id, 2, 0, 512, Kind::write, 512).answer == EINVAL);
  CHECK(world.io(id, 2, 0, 512, Kind::write, 0).answer == EINVAL);
  CHECK(world.io(id, 2, 0, 0, Kind::read, 512).answer == EINVAL);
  CHECK(world.volumes.at("disk").flushes == 3);
}

TEST_CASE("FUA, PREFLUSH and NOUNMAP reach the device where they mean something") {
  World world;
  const uint32_t id = world.open("disk");
  auto& volume = world.volumes.at("disk");
  world.write(id, 0, 512, 0x100);
  CHECK(volume.fuas == 0);
  world.write(id, 0, 512, 0x300);
  CHECK(volume.fuas == 1);
  CHECK(volume.preflushes == 0);
  world.write(id, 0, 512, 0x700);
  CHECK(volume.preflushes == 1);
  world.special(RnbdOp::write_zeroes, id, 0, 512, 0xa00);
  CHECK(volume.fuas == 3);
  CHECK(volume.no_unmaps == 1);
  world.write(id, 0, 512, 0x800);
  world.special(RnbdOp::discard, id, 0, 512, 0x800);
  CHECK(volume.no_unmaps == 1);  // means nothing there
  world.io(id, 0xf00, 0, 512, Kind::read, 512);
  CHECK(volume.fuas == 3);
  CHECK(world.write(id, 0, 512, 0xfffff000).answer == 0);  // unknown flags are ignored
}

TEST_CASE("an IO without the priority field, and one with garbage in it, are the same") {
  World world;
  const uint32_t id = world.open("disk");
  wire::Io io;
  io.device_id = id;
  io.rw = 0U;
  io.length = 512U;
  io.priority = uint16_t{0xffff};
  io.tail.fill(0xa5);
  io.padding = uint16_t{0xa5a5};
  for (const size_t length : std::initializer_list<size_t>{32, 31, 28, 24})
    CHECK(world.submit(wire::bytes_of(io).first(length), Kind::read, 512).answer == 0);
  CHECK(world.submit(wire::bytes_of(io).first(23), Kind::read, 512).answer == EINVAL);
}

TEST_CASE("device-ids that are not open") {
  World world;
  auto other = world.make("other");
  std::swap(other, world.session);
  world.open("disk");
  world.open("big");
  std::swap(other, world.session);  // back: nothing is open here
  for (const uint32_t id : {0U, 1U, 2U, 0xffffffffU}) {
    CHECK(world.read(id, 0, 512).answer == ENOTCONN);
    CHECK(world.write(id, 0, 512).answer == ENOTCONN);
    CHECK(world.flush(id).answer == ENOTCONN);
  }
  const uint32_t id = world.open("disk", AccessMode::read_only);
  world.close(id);
  CHECK(world.read(id, 0, 512).answer == ENOTCONN);
  other->on_session_down();
}

TEST_CASE("ranges and lengths of every operation") {
  World world;
  const uint32_t disk = world.open("disk");  // 2048 sectors of 512
  const uint32_t big = world.open("big");    // 16384 sectors, blocks of 4096
  struct {
    uint32_t id;
    uint64_t sector;
    uint32_t length;
    int answer;
  } const cases[] = {
      {disk, 0, 512, 0},
      {disk, 2047, 512, 0},
      {disk, 0, 131072, 0},
      {disk, 2048, 512, EINVAL},
      {disk, 2047, 1024, EINVAL},
      {disk, UINT64_MAX, 512, EINVAL},
      {disk, UINT64_MAX / 512, 512, EINVAL},
      {disk, UINT64_MAX / 512 + 1, 512, EINVAL},  // times 512 wraps to 0
      {disk, uint64_t{1} << 55, 512, EINVAL},     // wraps to 0, too
      {disk, (uint64_t{1} << 55) + 1, 512, EINVAL},
      {disk, 0, 0, EINVAL},
      {disk, 0, 1, EINVAL},
      {disk, 0, 511, EINVAL},
      {disk, 0, 513, EINVAL},
      {big, 0, 4096, 0},
      {big, 8, 4096, 0},
      {big, 16376, 4096, 0},
      {big, 1, 4096, EINVAL},
      {big, 0, 512, EINVAL},
      {big, 4, 4096, EINVAL},
      {big, 0, 4096 + 512, EINVAL},
      {big, 16384, 4096, EINVAL},
  };
  for (const auto& c : cases) {
    CAPTURE(c.id);
    CAPTURE(c.sector);
    CAPTURE(c.length);
    CHECK(world.read(c.id, c.sector, c.length).answer == c.answer);
    CHECK(world.write(c.id, c.sector, c.length).answer == c.answer);
    CHECK(world.special(RnbdOp::discard, c.id, c.sector, c.length).answer == c.answer);
    CHECK(world.special(RnbdOp::write_zeroes, c.id, c.sector, c.length).answer == c.answer);
  }
  CHECK(world.special(RnbdOp::discard, disk, 0, 0xffffffff).answer == EINVAL);
  CHECK(world.special(RnbdOp::discard, disk, 0, 0xfffffe00).answer == EINVAL);
}

TEST_CASE("a DISCARD or WRITE_ZEROES beyond the advertised maximum is refused") {
  World world;
  auto& properties = world.volumes.at("disk").properties;
  properties.discard_bytes_max = 8192;
  properties.write_zeroes_bytes_max = 4096;
  const uint32_t id = world.open("disk");
  CHECK(world.special(RnbdOp::discard, id, 0, 8192).answer == 0);
  CHECK(world.special(RnbdOp::discard, id, 0, 8704).answer == EINVAL);
  CHECK(world.special(RnbdOp::write_zeroes, id, 0, 4096).answer == 0);
  CHECK(world.special(RnbdOp::write_zeroes, id, 0, 4608).answer == EINVAL);
  properties.discard_bytes_max = properties.write_zeroes_bytes_max = 0;
  CHECK(world.special(RnbdOp::discard, id, 0, 512).answer == EOPNOTSUPP);
  CHECK(world.special(RnbdOp::write_zeroes, id, 0, 512).answer == EOPNOTSUPP);
}

TEST_CASE("the length in the message and the data that came must agree") {
  World world;
  const uint32_t id = world.open("disk");
  CHECK(world.io(id, 1, 0, 1024, Kind::write, 512).answer == EINVAL);
  CHECK(world.io(id, 1, 0, 512, Kind::write, 1024).answer == EINVAL);
  CHECK(world.io(id, 1, 0, 512, Kind::write, 0).answer == EINVAL);
  CHECK(world.io(id, 0, 0, 1024, Kind::read, 512).answer == EINVAL);
  CHECK(world.io(id, 0, 0, 512, Kind::read, 1024).answer == EINVAL);
  CHECK(world.io(id, 3, 0, 512, Kind::write, 512).answer == EINVAL);
  CHECK(world.io(id, 5, 0, 512, Kind::write, 512).answer == EINVAL);
  CHECK(world.volumes.at("disk").operations == 0);
}

TEST_CASE("the direction of a request must fit its operation") {
  World world;
  const uint32_t id = world.open("disk");
  CHECK(world.io(id, 0, 0, 512, Kind::write, 512).answer == EINVAL);
  CHECK(world.io(id, 0, 0, 512, Kind::read_without_descriptor, 512).answer == EINVAL);
  CHECK(world.io(id, 1, 0, 512, Kind::read, 512).answer == EINVAL);
  CHECK(world.io(id, 1, 0, 512, Kind::read_without_descriptor, 512).answer == EINVAL);
  CHECK(world.io(id, 3, 0, 512, Kind::read_without_descriptor, 0).answer == EINVAL);
  CHECK(world.io(id, 5, 0, 512, Kind::read_without_descriptor, 0).answer == EINVAL);
  CHECK(world.volumes.at("disk").operations == 0);
}

TEST_CASE("operations that do not exist, and secure erase, are not supported") {
  World world;
  const uint32_t id = world.open("disk");
  CHECK(world.special(RnbdOp::secure_erase, id, 0, 512).answer == EOPNOTSUPP);
  for (uint32_t code = 6; code < 256; ++code) {
    CHECK(world.io(id, code, 0, 512, Kind::write, 512).answer == EOPNOTSUPP);
    CHECK(world.io(id, code, 0, 512, Kind::read, 512).answer == EOPNOTSUPP);
  }
  CHECK(world.volumes.at("disk").operations == 0);
}

TEST_CASE("a read-only device is not written, however it became read-only") {
  for (const bool by_volume : {false, true}) {
    World world;
    world.volumes.at("disk").properties.read_only = by_volume;
    const uint32_t id =
        world.open("disk", by_volume ? AccessMode::read_write : AccessMode::read_only);
    CHECK(world.write(id, 0, 512).answer == EPERM);
    CHECK(world.special(RnbdOp::discard, id, 0, 512).answer == EPERM);
    CHECK(world.special(RnbdOp::write_zeroes, id, 0, 512).answer == EPERM);
    CHECK(world.read(id, 0, 512).answer == 0);
    CHECK(world.flush(id).answer == 0);
    CHECK(world.volumes.at("disk").operations == 2);
  }
}

TEST_CASE("a volume may turn read-only while it is open") {
  World world;
  const uint32_t id = world.open("disk");
  CHECK(world.write(id, 0, 512).answer == 0);
  world.volumes.at("disk").properties.read_only = true;
  CHECK(world.write(id, 0, 512).answer == EPERM);
}

TEST_CASE("errors of the device reach the client as they are") {
  World world;
  const uint32_t id = world.open("disk");
  for (const int error : {EIO, ENOSPC, ENOMEM, EINVAL, EREMOTEIO, EBADE}) {
    world.volumes.at("disk").error = error;
    CHECK(world.read(id, 0, 512).answer == error);
    CHECK(world.write(id, 0, 512).answer == error);
    CHECK(world.flush(id).answer == error);
    CHECK(world.special(RnbdOp::discard, id, 0, 512).answer == error);
  }
}

TEST_CASE("what reaches the device is the request as it was") {
  struct Spy final : rnbd::OpenDevice {
    DeviceProperties device_properties;
    std::vector<rnbd::BlockRequest*> seen;
    [[nodiscard]] const DeviceProperties& properties() const override { return device_properties; }
    void submit(rnbd::BlockRequest& request) override { seen.push_back(&request); }
  };
  struct OneSpy final : rnbd::Volumes {
    Spy* spy = nullptr;
    tl::expected<std::unique_ptr<rnbd::OpenDevice>, rnbd::OpenError> open(std::string_view,
                                                                          AccessMode) override {
      auto device = std::make_unique<Spy>();
      device->device_properties.size_bytes = uint64_t{1} << 62;
      device->device_properties.write_zeroes_bytes_max = uint64_t{1} << 40;
      spy = device.get();
      return device;
    }
  };
  auto volumes = std::make_unique<OneSpy>();
  OneSpy& one = *volumes;
  World world;
  world.session =
      rnbd::make_server_session({}, std::move(volumes), [](LogLevel, std::string_view) {});
  const uint32_t id = world.open("x");
  auto& write = world.write(id, (uint64_t{1} << 53) - 1, 512, 0x600);
  auto& zero = world.special(RnbdOp::write_zeroes, id, 5, 0xfffffe00, 0x800);
  auto& flush = world.flush(id);
  REQUIRE(one.spy->seen.size() == 3);
  const auto& first = *one.spy->seen[0];
  CHECK(first.op == RnbdOp::write);
  CHECK(first.offset == ((uint64_t{1} << 53) - 1) * 512);
  CHECK(first.length == 512);
  CHECK(first.fua);
  CHECK(first.preflush);
  CHECK(!first.no_unmap);
  CHECK(first.data == write.data_bytes.data());
  CHECK(first.registered_index == 3);
  const auto& second = *one.spy->seen[1];
  CHECK(second.op == RnbdOp::write_zeroes);
  CHECK(second.offset == 2560);
  CHECK(second.length == 0xfffffe00);
  CHECK(second.no_unmap);
  CHECK(second.data == nullptr);
  CHECK(second.registered_index == -1);
  const auto& third = *one.spy->seen[2];
  CHECK(third.op == RnbdOp::flush);
  CHECK(third.offset == 0);
  CHECK(!third.fua);
  // In another order than they came; each answer goes to its own request.
  one.spy->seen[2]->complete(0);
  CHECK(flush.answer == 0);
  one.spy->seen[0]->complete(EIO);
  CHECK(write.answer == EIO);
  CHECK(!zero.answer.has_value());
  // An operation that is over is used again for the next one, with nothing left of the old.
  world.read(id, 1, 512);
  const auto& reused = *one.spy->seen[3];
  CHECK(&reused == &first);
  CHECK(!reused.fua);
  CHECK(!reused.preflush);
  one.spy->seen[3]->complete(0);
  one.spy->seen[1]->complete(0);
  CHECK(zero.answer == 0);
}

// --- The session ends

TEST_CASE("a session that goes down closes its devices, each after its operations") {
  World world;
  const uint32_t busy = world.open("disk");
  world.open("big");
  auto& volume = world.volumes.at("disk");
  volume.hold = true;
  auto& write = world.write(busy, 0, 512);
  auto& close = world.close(busy);
  world.session->on_session_down();
  CHECK(world.volumes.at("big").closes == 1);
  CHECK(volume.closes == 0);  // a second writer must not get in yet
  CHECK(volume.access.writers() == 1);
  volume.release();
  CHECK(write.answer == 0);
  CHECK(close.answer == 0);
  CHECK(volume.closes == 1);
  CHECK(volume.access.writers() == 0);
  world.session.reset();
}

TEST_CASE("when the last answer of a lost session is given, its devices are closed already") {
  World world;
  const uint32_t id = world.open("disk");
  auto& volume = world.volumes.at("disk");
  volume.hold = true;
  struct Watcher final : rtrs::ServerRequest {
    MemoryVolume* volume = nullptr;
    std::vector<std::byte> bytes = std::vector<std::byte>(512);
    wire::Io io;
    int writers_at_answer = -1;
    std::span<std::byte> data() override { return bytes; }
    [[nodiscard]] std::span<const std::byte> user() const override { return wire::bytes_of(io); }
    [[nodiscard]] bool is_read() const override { return false; }
    [[nodiscard]] bool has_descriptor() const override { return false; }
    [[nodiscard]] int registered_index() const override { return -1; }
    void respond(int) override { writers_at_answer = static_cast<int>(volume->access.writers()); }
  } watcher;
  watcher.volume = &volume;
  watcher.io.device_id = id;
  watcher.io.rw = 1U;
  watcher.io.length = 512U;
  world.session->on_request(watcher);
  world.session->on_session_down();
  volume.release();
  CHECK(watcher.writers_at_answer == 0);
}
