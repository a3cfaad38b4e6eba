// SPDX-License-Identifier: BSD-3-Clause
// The server, RTRS and RNBD, against clients that do what the input says, beside one that is good.
// Whatever happens: the good one's data stay right, the bad ones get nothing a server may not send,
// and in the end everything is given back.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "protocol/rnbd/server.h"
#include "tests/fuzz/input.h"
#include "tests/support/memory_volumes.h"
#include "tests/support/raw_client.h"

using namespace rtrsnbd;
using test::expect;
using test::FuzzInput;
using test::RawClient;
using test::RawClientOptions;
using test::ServerWorld;

namespace {

constexpr int operations_max = 300;

struct World {
  explicit World(uint8_t mode) : world(limits(mode), options(mode)) {
    volumes.try_emplace("a", size_t{16384});
    volumes.try_emplace("b", size_t{65536}, 4096U);
    volumes.try_emplace("good", size_t{16384});
    world.make_upper = [this](const rtrs::SessionIdentity& identity) {
      return rnbd::make_server_session(identity, std::make_unique<test::MemoryVolumes>(volumes),
                                       [](LogLevel, std::string_view) {});
    };
    good = std::make_unique<RawClient>(
        world,
        RawClientOptions{
            .name = "good", .session = 99, .path = 99, .connections = 2, .host = "10.0.0.9"});
    expect(good->connect());
    wire::Open open;
    expect(wire::make_open("good", wire::AccessMode::read_write, open));
    good->read(0, 0, wire::bytes_of(open), sizeof(wire::OpenResponse));
    check_answer();
    for (size_t i = 0; i < bad.size(); ++i) renew(i);
  }

  static rtrs::ServerLimits limits(uint8_t mode) {
    rtrs::ServerLimits limits;
    limits.queue_depth = (mode & 8) != 0 ? 3 : 4;
    limits.max_io_size = 4096;
    limits.always_invalidate = (mode & 1) != 0;
    limits.sessions_max = 4;
    limits.half_open_paths_max = 3;
    return limits;
  }
  static test::MemoryFabricOptions options(uint8_t mode) {
    test::MemoryFabricOptions options;
    options.any_local = (mode & 2) == 0;
    if ((mode & 4) != 0) options.messages_in_flight_max = 3;
    if ((mode & 16) != 0) options.no_receive = test::MemoryFabricOptions::NoReceive::waits;
    return options;
  }

  void renew(size_t i) {
    // Two of one session, on different addresses, and one of another.
    static constexpr const char* hosts[] = {"10.0.1.1", "10.0.1.2", "10.0.1.1"};
    RawClientOptions options;
    options.session = i == 2 ? 2 : 1;
    options.name = i == 2 ? "two" : "one";
    options.path = i + 1;
    options.connections = 2;
    options.host = hosts[i];
    bad[i] = std::make_unique<RawClient>(world, options);
  }

  void check_answer() {
    good->settle();
    expect(good->answers.size() == 1 && good->answers.front().error == 0);
    good->answers.clear();
  }
  void check_good() {
    wire::Io io;
    ++round;
    const std::vector<std::byte> data(512, static_cast<std::byte>(round));
    io.sector = round % 32;
    io.length = 512U;
    io.rw = 1U;
    good->write(1, round % 3, wire::bytes_of(io), data);
    check_answer();
    io.rw = 0U;
    good->read(1, 1, wire::bytes_of(io), 512);
    check_answer();
    expect(good->read_memory[1] == data);
  }

  void operation(FuzzInput& input);

  test::MemoryVolumes::Map volumes;  // outlives the server
  ServerWorld world;
  std::unique_ptr<RawClient> good;
  std::array<std::unique_ptr<RawClient>, 3> bad;
  uint32_t round = 0;
};

void World::operation(FuzzInput& input) {
  const uint8_t code = input.byte();
  const size_t which = code / 32 % bad.size();
  RawClient& client = *bad[which];
  const auto cid = static_cast<uint16_t>((code & 1) % client.connections.size());
  const uint32_t id = input.byte() % world.limits.queue_depth;
  const bool there = client.connections[cid] != nullptr;
  if (client.chunks.empty()) client.chunks.resize(world.limits.queue_depth);

  switch (code % 32 / 2) {
    case 0: {
      auto request = client.connect_request(cid);
      switch (input.byte() % 8) {
        case 0:
          request.cid = input.half();
          break;
        case 1:
          request.cid_num = input.half();
          break;
        case 2:
          request.session_uuid = test::make_uuid(input.byte());
          break;
        case 3:
          request.path_uuid = test::make_uuid(input.byte());
          break;
        case 4:
          request.flags = input.byte();
          break;
        case 5:
          request.version = input.half();
          break;
        default:
          break;
      }
      if (!there) client.open_with(cid, request);
      break;
    }
    case 1:
      if (!there) client.open_bytes(cid, input.bytes(input.byte()));
      break;
    case 2:
      if (there) client.send_info(input.byte() % 4 == 0 ? "other" : client.options.name, cid);
      break;
    case 3:
      if (there) client.send_info_bytes(input.bytes(input.byte()), cid);
      break;
    case 4:  // all at once, as it should be
      for (uint16_t i = 0; i < 2; ++i)
        if (!client.connections[i]) {
          client.open(i);
          client.settle();
        }
      client.send_info(client.options.name);
      client.settle();
      client.take_info();
      break;
    case 5:
      if (there) {
        const uint32_t start = input.half() % world.limits.chunk_size();
        const uint32_t header = input.half();
        client.post(cid, id, start, header, input.bytes(input.byte()));
      }
      break;
    case 6:
    case 7:
      if (there && client.informed) {
        wire::Io io;
        io.device_id = input.byte() % 4U;
        io.rw = input.half();
        io.sector = input.byte() == 255 ? UINT64_MAX - input.byte() : input.byte();
        const uint32_t length = input.byte() * 64U % (world.limits.max_io_size + 1);
        io.length = input.byte() % 8 == 0 ? input.word() : length;
        if (code % 32 / 2 == 6)
          client.write(cid, id, wire::bytes_of(io),
                       std::vector<std::byte>((io.rw & 0xff) == 1 ? length : 0));
        else
          client.read(cid, id, wire::bytes_of(io), (io.rw & 0xff) == 2 ? 0 : length,
                      input.byte() % 2 == 0);
      }
      break;
    case 8:
      if (there && client.informed) {
        wire::Open open;
        static constexpr const char* names[] = {"a", "b", "good", "c"};
        (void)wire::make_open(names[input.byte() % 4],
                              static_cast<wire::AccessMode>(input.byte() % 4), open);
        client.read(cid, id, wire::bytes_of(open), 56U + input.byte() % 2 * 100U);
      }
      break;
    case 9:
      if (there && client.informed) {
        wire::Close close;
        close.device_id = input.byte() % 4U;
        client.write(cid, id, wire::bytes_of(close));
      }
      break;
    case 10:
      if (there)
        client.immediate(cid, input.byte() % 2 == 0 ? input.word() : input.word() & 0xf00fffffU);
      break;
    case 11:
      if (there) {
        static constexpr fabric::SendKind kinds[] = {fabric::SendKind::send,
                                                     fabric::SendKind::send_immediate,
                                                     fabric::SendKind::send_invalidate};
        const auto kind = kinds[input.byte() % 3];
        client.send(cid, kind,
                    input.bytes(kind == fabric::SendKind::send_invalidate ? 0 : input.byte() % 16),
                    input.byte() % 2 == 0 ? client.chunks[id].rkey : input.word());
      }
      break;
    case 12:
      if (there) switch (input.byte() % 5) {
          case 0:
            client.connections[cid]->endpoint->drop();
            break;
          case 1:
            client.connections[cid]->endpoint->abort();
            break;
          case 2:
            client.connections[cid]->endpoint->disconnect(world.now);
            break;
          case 3:
            client.connections[cid]->endpoint->hold(input.byte() % 2 == 0);
            break;
          case 4:
            client.connections[cid]->endpoint->go_silent();
            break;
        }
      break;
    case 13: {
      auto& volume = volumes.at(input.byte() % 2 == 0 ? "a" : "b");
      volume.hold = input.byte() % 2 == 0;
      volume.error = input.byte() % 4 == 0 ? EIO : 0;
      volume.release();
      break;
    }
    case 14:
      world.now += std::chrono::milliseconds(input.byte() * 40);
      world.tick();
      if (input.byte() % 4 == 0) renew(which);
      break;
    case 15:
      world.turn();
      client.progress();
      break;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  World world(input.byte());
  for (int i = 0; i < operations_max && !input.empty(); ++i) {
    world.operation(input);
    world.good->settle();  // keeps answering heartbeats
    if (i % 16 == 0) world.check_good();
  }
  world.check_good();

  world.bad = {};
  for (auto& [name, volume] : world.volumes) {
    volume.hold = false;
    volume.release();
  }
  const auto wait = [&world](int seconds) {
    for (int i = 0; i < seconds; ++i) {
      world.world.now += std::chrono::seconds(1);
      world.world.tick();
      world.good->settle();
    }
  };
  wait(40);  // for those that fell silent
  expect(world.world.server->sessions().size() == 1);
  expect(world.world.allocated == world.world.limits.session_bytes());
  world.check_good();
  world.world.server->shut_down(world.world.now);
  wait(1);
  expect(world.world.server->idle());
  expect(world.world.allocated == 0);
  for (const auto& [name, volume] : world.volumes) {
    expect(volume.opens == volume.closes);
    expect(volume.access.readers() == 0 && volume.access.writers() == 0);
  }
  return 0;
}
