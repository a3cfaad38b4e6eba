// SPDX-License-Identifier: BSD-3-Clause
// The client's path against a server that is scripted, message by message, over the in-memory
// fabric: what it sends, and that no answer of a broken or hostile server does more than end the
// path.
#include <doctest/doctest.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/scripted_server.h"

using namespace rtrsnbd;
using namespace std::chrono_literals;
using rtrs::ClientPath;
using test::MemoryFabricOptions;
using test::Request;

namespace {

struct World : test::ScriptedServer {
  using ScriptedServer::ScriptedServer;
  void connect() {
    make_path();
    steps();
    REQUIRE(peers.size() == 3);
    peers[0]->send(fabric::SendKind::send, 0, info_response());
    steps();
    REQUIRE(path->state() == ClientPath::State::connected);
  }
};

std::vector<std::byte> pattern(size_t length, uint8_t seed) {
  std::vector<std::byte> bytes(length);
  for (size_t i = 0; i < length; ++i) bytes[i] = static_cast<std::byte>((i * 7 + seed) & 0xff);
  return bytes;
}

}  // namespace

TEST_CASE("a path connects its connections in order, then exchanges INFO") {
  World world;
  world.connect();
  for (uint32_t cid = 0; cid < 3; ++cid) {
    const auto& request = world.peers[cid]->request;
    CHECK(request.cid == cid);
    CHECK(request.cid_num == 3);
    CHECK(request.reconnect_count == 1);
    CHECK(request.first_connection());
    CHECK(request.path_uuid == world.client_options.path_uuid);
    CHECK(request.session_uuid == world.client_options.session_uuid);
  }
  REQUIRE(world.peers[0]->completions.size() == 1);
  CHECK(world.peers[0]->completions[0].byte_count == 272);
  wire::InfoRequest info;
  const auto name = wire::parse_info_request({world.peers[0]->info.data(), 272}, info);
  REQUIRE(name);
  CHECK(*name == "host-1");
  CHECK(world.path->geometry().queue_depth == World::depth);
  CHECK_FALSE(world.path->geometry().new_rkey);
}

TEST_CASE("the first connection of a further path does not create a session") {
  World world;
  world.client_options.first_path = false;
  world.connect();
  CHECK_FALSE(world.peers[0]->request.first_connection());
  CHECK(world.peers[1]->request.first_connection());
}

TEST_CASE("a write carries data, user message and WRITE message in one piece") {
  World world;
  world.connect();
  const auto data = pattern(4096, 3);
  const auto user = pattern(32, 9);
  Request request;
  request.user = user;
  request.write_data = data.data();
  request.data_length = 4096;
  REQUIRE(world.path->submit(2, 1, request));
  world.path->endpoint(2).flush(fabric::Wait::no);
  world.steps(2);
  REQUIRE(world.peers[2]->completions.size() == 1);
  const auto immediate =
      wire::IoRequestImmediate::decode(world.peers[2]->completions[0].immediate, World::depth);
  CHECK(immediate.chunk_id == 1);
  CHECK(immediate.offset == 4096 + 32);
  const auto parsed = wire::parse_io_request(world.chunk(1), immediate.offset, World::io_size);
  REQUIRE(parsed);
  CHECK(parsed->type == wire::RtrsType::write);
  CHECK(parsed->data_length == 4096);
  CHECK(std::memcmp(world.chunk(1).data(), data.data(), 4096) == 0);
  CHECK(std::memcmp(world.chunk(1).data() + 4096, user.data(), 32) == 0);
  CHECK(request.done == 0);
  SUBCASE("answered well") {
    world.peers[2]->answer(1);
    world.steps(2);
    CHECK(request.done == 1);
    CHECK(request.error == 0);
  }
  SUBCASE("answered with an errno: not a trouble of the path") {
    world.peers[2]->answer(1, ENOSPC);
    world.steps(2);
    CHECK(request.done == 1);
    CHECK(request.error == ENOSPC);
  }
  CHECK(world.path->state() == ClientPath::State::connected);
}

TEST_CASE("a read is placed where the descriptor says, and only until it is answered") {
  MemoryFabricOptions options;
  SUBCASE("into the caller's buffer") {}
  SUBCASE("by way of registered memory where buffers cannot be registered per IO") {
    options.rebind = false;
    options.any_local = false;
  }
  World world(options);
  world.connect();
  const auto user = pattern(32, 1);
  std::vector<std::byte> target(4096);
  Request request;
  request.is_read = true;
  request.user = user;
  request.read_data = target.data();
  request.data_length = 4096;
  REQUIRE(world.path->submit(1, 3, request));
  world.path->endpoint(1).flush(fabric::Wait::no);
  world.steps(2);
  const auto descriptor = world.descriptor_at(3, 4096 + 32);
  CHECK(descriptor.length == 4096);
  const auto data = pattern(4096, 77);
  world.peers[1]->send(fabric::SendKind::write, 0, data, descriptor.address, descriptor.key);
  world.peers[1]->answer(3);
  world.steps(2);
  CHECK(request.done == 1);
  CHECK(request.error == 0);
  CHECK(target == data);
  if (options.rebind) {
    // The key died with the answer.
    const auto late = pattern(4096, 78);
    world.peers[1]->send(fabric::SendKind::write, 0, late, descriptor.address, descriptor.key);
    world.steps(2);
    CHECK(target == data);
    CHECK(world.path->state() == ClientPath::State::failed);
  }
}

TEST_CASE("a read without data asks with no descriptor") {
  World world;
  world.connect();
  const auto user = pattern(32, 1);
  Request request;
  request.is_read = true;
  request.user = user;
  REQUIRE(world.path->submit(1, 0, request));
  world.path->endpoint(1).flush(fabric::Wait::no);
  world.steps(2);
  const auto parsed = wire::parse_io_request(world.chunk(0), 32, World::io_size);
  REQUIRE(parsed);
  CHECK(parsed->type == wire::RtrsType::read);
  CHECK_FALSE(parsed->has_descriptor);
  world.peers[1]->answer(0);
  world.steps(2);
  CHECK(request.done == 1);
}

TEST_CASE("with new keys per IO the next request uses the key of the last answer") {
  World world;
  world.response.flags = wire::connect_flag_new_rkey;
  world.connect();
  CHECK(world.path->geometry().new_rkey);
  const auto user = pattern(32, 1);
  for (int round = 0; round < 40; ++round) {  // more than the receives posted: each is reposted
    Request request;
    request.user = user;
    REQUIRE(world.path->submit(1, 2, request));
    world.path->endpoint(1).flush(fabric::Wait::no);
    world.steps(2);
    CHECK(world.peers[1]->completions.size() == static_cast<size_t>(round) + 1);
    const uint32_t renewed = world.region->renew();  // the old key is dead
    world.peers[1]->answer_with_key(2, renewed);
    world.steps(2);
    REQUIRE(request.done == 1);
    CHECK(request.error == 0);
  }
  CHECK(world.path->state() == ClientPath::State::connected);
}

TEST_CASE("a rejected connection says why") {
  World world;
  std::string expected;
  wire::ConnectResponse rejection;
  std::vector<std::byte> bytes;
  SUBCASE("ENXIO") {
    rejection.error = static_cast<uint16_t>(-ENXIO);
    expected = "ENXIO";
  }
  SUBCASE("ENOMEM") {
    rejection.error = static_cast<uint16_t>(-ENOMEM);
    expected = "limit";
  }
  SUBCASE("errno unknown to us") {
    rejection.error = static_cast<uint16_t>(-999);
    expected = "999";
  }
  SUBCASE("errno 0") {
    expected = "without a reason";
  }
  const auto span = wire::bytes_of(rejection);
  bytes.assign(span.begin(), span.end());
  SUBCASE("nothing") {
    bytes.clear();
    expected = "without a reason";
  }
  SUBCASE("one byte") {
    bytes.resize(1);
    expected = "without a reason";
  }
  world.reject_with = bytes;
  world.make_path();
  world.steps();
  CHECK(world.path->state() == ClientPath::State::failed);
  CHECK(world.path->closed());
  CHECK_MESSAGE(world.path->failure().find(expected) != std::string::npos, world.path->failure());
}

TEST_CASE("an accept with an impossible geometry ends the path before anything is allocated") {
  World world;
  SUBCASE("depth 0") {
    world.response.queue_depth = 0;
  }
  SUBCASE("size 0") {
    world.response.max_io_size = 0;
  }
  SUBCASE("no room for headers") {
    world.response.max_hdr_size = 0;
  }
  SUBCASE("little room for headers") {
    world.response.max_hdr_size = 100;
  }
  SUBCASE("sum overflows") {
    world.response.max_io_size = 0xffffffff;
    world.response.max_hdr_size = 0xffffffff;
  }
  SUBCASE("too large for the immediate") {
    world.response.queue_depth = 65535;
    world.response.max_io_size = 1 << 20;
  }
  SUBCASE("errno in an accept") {
    world.response.error = static_cast<uint16_t>(-EIO);
  }
  SUBCASE("wrong magic") {
    world.response.magic = 0x1234;
  }
  SUBCASE("wrong major version") {
    world.response.version = 0x0300;
  }
  world.make_path();
  world.steps();
  CHECK(world.path->state() == ClientPath::State::failed);
  CHECK(world.path->closed());
}

TEST_CASE("a malformed INFO response ends the path") {
  World world;
  world.make_path();
  world.steps();
  auto bytes = world.info_response();
  SUBCASE("truncated header") {
    bytes.resize(4);
  }
  SUBCASE("truncated descriptors") {
    bytes.resize(bytes.size() - 1);
  }
  SUBCASE("empty") {
    bytes.clear();
  }
  SUBCASE("wrong type") {
    bytes[0] = std::byte{2};
  }
  SUBCASE("no descriptors") {
    bytes[2] = std::byte{0};
  }
  SUBCASE("a length that is no multiple of the chunk") {
    bytes[8 + 12] = std::byte{1};
  }
  SUBCASE("more than the receive holds") {
    bytes.resize(400);
  }
  world.peers[0]->send(fabric::SendKind::send, 0, bytes);
  world.steps();
  CHECK(world.path->state() == ClientPath::State::failed);
  CHECK(world.path->closed());
}

TEST_CASE("anything before the INFO response ends the path") {
  World world;
  world.make_path();
  world.steps();
  SUBCASE("heartbeat") {
    world.peers[0]->send(fabric::SendKind::write_immediate, wire::heartbeat_immediate);
  }
  SUBCASE("answer on an IO connection") {
    world.peers[1]->answer(0);
  }
  SUBCASE("disconnect") {
    world.peers[1]->endpoint->disconnect(world.now);
  }
  world.steps();
  CHECK(world.path->state() == ClientPath::State::failed);
  CHECK(world.path->closed());
}

TEST_CASE(
    "a server that does not keep to the protocol costs itself the path, once, and nothing else") {
  World world;
  std::function<void()> misbehave;
  const auto user = pattern(32, 1);
  auto& peers = world.peers;
  bool new_rkey = false;
  SUBCASE("answers an id out of range") {
    misbehave = [&] { peers[1]->answer(World::depth); };
  }
  SUBCASE("answers the largest id") {
    misbehave = [&] { peers[1]->answer(0x7ffff); };
  }
  SUBCASE("answers what is not in flight") {
    misbehave = [&] { peers[1]->answer(3); };
  }
  SUBCASE("answers on another connection") {
    misbehave = [&] { peers[2]->answer(0); };
  }
  SUBCASE("claims an invalidation") {
    misbehave = [&] {
      peers[1]->send(fabric::SendKind::write_immediate,
                     wire::IoResponseImmediate{0, 0, true}.encode());
    };
  }
  SUBCASE("invalidates a foreign key") {
    misbehave = [&] { peers[1]->send(fabric::SendKind::send_invalidate, 0); };
  }
  SUBCASE("sends without an immediate") {
    misbehave = [&] { peers[1]->send(fabric::SendKind::send, 0); };
  }
  SUBCASE("sends a payload nobody has room for") {
    misbehave = [&] { peers[1]->send(fabric::SendKind::send, 0, user); };
  }
  SUBCASE("writes to a key that does not exist") {
    misbehave = [&] { peers[1]->send(fabric::SendKind::write, 0, user, 0, 0x12345600); };
  }
  SUBCASE("key response for another buffer") {
    new_rkey = true;
    misbehave = [&] {
      wire::RkeyResponse renewal;
      renewal.buffer_id = 1;
      peers[1]->send(fabric::SendKind::send_immediate,
                     wire::IoResponseImmediate{0, 0, false}.encode(), wire::bytes_of(renewal));
    };
  }
  SUBCASE("short key response") {
    new_rkey = true;
    misbehave = [&] {
      const wire::RkeyResponse renewal;
      peers[1]->send(fabric::SendKind::send_immediate,
                     wire::IoResponseImmediate{0, 0, false}.encode(),
                     wire::bytes_of(renewal).first(7));
    };
  }
  SUBCASE("no key response where one is due") {
    new_rkey = true;
    misbehave = [&] { peers[1]->answer(0); };
  }
  SUBCASE("key response of a wrong type") {
    new_rkey = true;
    misbehave = [&] {
      wire::RkeyResponse renewal;
      renewal.type = 3;
      peers[1]->send(fabric::SendKind::send_immediate,
                     wire::IoResponseImmediate{0, 0, false}.encode(), wire::bytes_of(renewal));
    };
  }
  SUBCASE("hangs up") {
    misbehave = [&] { peers[2]->endpoint->disconnect(world.now); };
  }
  SUBCASE("vanishes") {
    misbehave = [&] { peers[1]->endpoint->abort(); };
  }
  if (new_rkey) world.response.flags = wire::connect_flag_new_rkey;
  world.connect();
  Request request;
  request.user = user;
  REQUIRE(world.path->submit(1, 0, request));
  world.path->endpoint(1).flush(fabric::Wait::no);
  world.steps(2);
  misbehave();
  world.steps(3);
  CHECK(world.path->state() == ClientPath::State::failed);
  CHECK(world.path->closed());
  CHECK(request.done == 1);
  CHECK(request.error == rtrs::path_lost);
  CHECK_FALSE(world.path->failure().empty());
  Request late;
  late.user = user;
  CHECK_FALSE(world.path->submit(1, 1, late));
  CHECK(late.done == 0);
}

TEST_CASE("a second answer to the same request ends the path and does not complete it twice") {
  World world;
  world.connect();
  const auto user = pattern(32, 1);
  Request request;
  request.user = user;
  REQUIRE(world.path->submit(1, 0, request));
  world.path->endpoint(1).flush(fabric::Wait::no);
  world.peers[1]->answer(0);
  world.peers[1]->answer(0);
  world.steps(3);
  CHECK(request.done == 1);
  CHECK(request.error == 0);
  CHECK(world.path->state() == ClientPath::State::failed);
}

TEST_CASE("a request of a failed path is held until every receiver has left") {
  World world;
  world.connect();
  const auto user = pattern(32, 1);
  Request request;
  request.user = user;
  REQUIRE(world.path->submit(1, 0, request));
  world.path->fail("test");
  CHECK(request.done == 0);
  world.path->endpoint(1).progress(fabric::Wait::no, world.now);
  CHECK(world.path->connection_closed(1));
  world.path->endpoint(0).progress(fabric::Wait::no, world.now);
  CHECK(request.done == 0);
  CHECK_FALSE(world.path->closed());
  world.path->endpoint(2).progress(fabric::Wait::no, world.now);
  CHECK(request.done == 1);
  CHECK(request.error == rtrs::path_lost);
  CHECK(world.path->closed());
  CHECK(world.path->failure() == "test");
}

TEST_CASE(
    "a server that still places into an answered read loses the path, and the read waits for it") {
  World world;
  world.connect();
  const auto user = pattern(32, 1);
  std::vector<std::byte> target(512);
  Request request;
  request.is_read = true;
  request.user = user;
  request.read_data = target.data();
  request.data_length = 512;
  REQUIRE(world.path->submit(1, 0, request));
  world.path->endpoint(1).flush(fabric::Wait::no);
  world.steps(1);
  world.fabric.set_placement_in_progress(true);
  world.peers[1]->answer(0);
  world.path->endpoint(1).progress(fabric::Wait::no, world.now);
  CHECK(world.path->state() == ClientPath::State::failed);
  CHECK(request.done == 0);
  world.steps(3);
  CHECK(request.done == 1);
  CHECK(request.error == rtrs::path_lost);
}

TEST_CASE("a heartbeat is acknowledged on the service connection") {
  World world;
  world.connect();
  const auto before = world.peers[0]->completions.size();
  world.peers[0]->send(fabric::SendKind::write_immediate, wire::heartbeat_immediate);
  world.steps(2);
  REQUIRE(world.peers[0]->completions.size() == before + 1);
  CHECK(world.peers[0]->completions.back().immediate == wire::heartbeat_ack_immediate);
}

TEST_CASE("a silent server is dead six intervals after the beat it did not answer") {
  World world;
  world.connect();
  const auto connected = world.now;
  const auto beats = [&] {
    size_t count = 0;
    for (const auto& completion : world.peers[0]->completions) {
      if (completion.has_immediate && completion.immediate == wire::heartbeat_immediate) ++count;
    }
    return count;
  };
  for (world.now = connected; world.now < connected + 35s; world.now += 100ms) {
    world.path->tick(world.now);
    world.step();
    REQUIRE(world.path->state() == ClientPath::State::connected);
  }
  CHECK(beats() == 1);
  world.now = connected + 35s;
  world.path->tick(world.now);
  CHECK(world.path->state() == ClientPath::State::failed);
  CHECK(world.path->failure().find("heartbeat") != std::string::npos);
}

TEST_CASE("traffic keeps a path alive without heartbeats") {
  World world;
  world.connect();
  const auto user = pattern(32, 1);
  for (int second = 0; second < 120; ++second) {
    world.now += 1s;
    world.path->tick(world.now);
    Request request;
    request.user = user;
    REQUIRE(world.path->submit(2, 0, request));
    world.path->endpoint(2).flush(fabric::Wait::no);
    world.peers[2]->completions.clear();
    world.peers[2]->endpoint->post_empty_receives(1, 1);
    world.peers[2]->answer(0);
    world.steps(2);
    REQUIRE(request.done == 1);
  }
  CHECK(world.path->state() == ClientPath::State::connected);
}

TEST_CASE("connecting ends within its time when the server falls silent") {
  World world;
  world.client_options.connect_timeout = 10s;
  const auto begun = world.now;
  SUBCASE("before INFO") {
    world.make_path();
    world.steps();
  }
  SUBCASE("before the first accept") {
    world.make_path();
  }
  world.path->tick(begun + 9999ms);
  CHECK(world.path->state() == ClientPath::State::connecting);
  world.path->tick(begun + 10s);
  CHECK(world.path->state() == ClientPath::State::failed);
  CHECK(world.path->failure().find("connect timeout") != std::string::npos);
}

TEST_CASE("an orderly disconnect closes every connection without an error") {
  World world;
  world.connect();
  world.path->disconnect(world.now);
  for (int i = 0; i < 30 && !world.path->closed(); ++i) {
    world.now += 100ms;
    for (auto& peer : world.peers) peer->endpoint->tick(world.now);
    for (uint32_t cid = 0; cid < 3; ++cid) world.path->endpoint(cid).tick(world.now);
    world.steps(1);
  }
  CHECK(world.path->closed());
  CHECK(world.path->failure().empty());
  world.path.reset();
}
