// SPDX-License-Identifier: BSD-3-Clause
// Connection requests and INFO exchange: what is let in, and with which errno the rest is not.
#include <doctest/doctest.h>

#include <cerrno>
#include <string>
#include <vector>

#include "tests/support/hex.h"
#include "tests/support/raw_client.h"

using namespace rtrsnbd;
using namespace std::chrono_literals;
using test::RawClient;
using test::RawClientOptions;
using test::ServerWorld;

namespace {

// The errno of the refusal; 0 if it was accepted; -1 if the connection just ended.
int outcome(RawClient& client, uint16_t cid) {
  client.settle();
  const auto& connection = *client.connections[cid];
  if (connection.rejected) return *connection.rejected;
  return connection.open() ? 0 : -1;
}

template <typename Change>
int outcome_of_first(Change change) {
  ServerWorld world;
  RawClient client(world);
  auto request = client.connect_request(0);
  change(request);
  client.open_with(0, request);
  return outcome(client, 0);
}

bool mentions(const std::vector<std::string>& lines, std::string_view text) {
  return std::any_of(lines.begin(), lines.end(), [text](const std::string& line) {
    return line.find(text) != std::string::npos;
  });
}

RawClientOptions second_path(const RawClientOptions& first) {
  RawClientOptions options = first;
  options.path += 100;
  options.host = "10.0.1.2";
  options.first = false;
  return options;
}

}  // namespace

TEST_CASE("a good client connects, and is told the geometry on each connection") {
  for (const bool new_rkey : {false, true}) {
    auto limits = ServerWorld::small_limits();
    limits.always_invalidate = new_rkey;
    ServerWorld world(limits);
    RawClient client(world);
    REQUIRE(client.connect());
    for (const auto& connection : client.connections) {
      CHECK(connection->response->queue_depth == 8);
      CHECK(connection->response->max_io_size == 16384);
      CHECK(connection->response->max_hdr_size == 4096);
      CHECK(connection->response->flags == (new_rkey ? 2 : 0));
      CHECK(connection->response->error == 0);
    }
    // One key for all chunks, or one for each.
    CHECK(wire::load<wire::InfoResponseHeader>(client.info.data()).descriptor_count ==
          (new_rkey ? 8 : 1));
    CHECK(world.fabric.region_count() == (new_rkey ? 8 : 1));
    REQUIRE(world.identities.size() == 1);
    CHECK(world.identities[0].name == "client");
    CHECK(world.identities[0].uuid == test::make_uuid(0x101));
    CHECK(world.identities[0].max_io_size == 16384);
    CHECK(world.warnings.empty());
    REQUIRE(world.server->sessions().size() == 1);
    CHECK(world.server->sessions()[0].connections == 3);
  }
}

TEST_CASE(
    "receives stand ready before the client can use them: 512 on connection 0, queue depth on the "
    "others") {
  ServerWorld world;
  RawClient client(world);
  client.open(0);
  client.settle();
  CHECK(client.connections[0]->endpoint->peer()->receives() == 1);  // for INFO_REQ
  client.open(1);
  client.open(2);
  client.settle();
  CHECK(client.connections[1]->endpoint->peer()->receives() == 0);
  client.send_info("client");
  client.settle();
  REQUIRE(client.take_info());
  CHECK(client.connections[0]->endpoint->peer()->receives() == 512);
  CHECK(client.connections[1]->endpoint->peer()->receives() == 8);
  CHECK(client.connections[2]->endpoint->peer()->receives() == 8);
}

TEST_CASE("connection-request-malformed") {
  ServerWorld world;
  for (const size_t length : std::initializer_list<size_t>{0, 1, 55}) {
    RawClient client(world);
    client.open_bytes(0, std::vector<std::byte>(length));
    CHECK(outcome(client, 0) == ECONNRESET);
  }
  {
    RawClient client(world);
    client.open_bytes(0, std::vector<std::byte>(56));
    CHECK(outcome(client, 0) == ECONNRESET);
  }
  {
    // Longer than it must be, as CMs pad it.
    RawClient client(world);
    const auto request = client.connect_request(0);
    std::vector<std::byte> bytes(196);
    wire::store(bytes.data(), request);
    client.open_bytes(0, bytes);
    CHECK(outcome(client, 0) == 0);
  }
  CHECK(outcome_of_first([](auto& r) { r.magic = uint16_t{0x1BBC}; }) == ECONNRESET);
  CHECK(outcome_of_first([](auto& r) { r.version = uint16_t{0x0300}; }) == ECONNRESET);
  CHECK(outcome_of_first([](auto& r) { r.version = uint16_t{0x02ab}; }) == 0);
}

TEST_CASE("connection-numbers-absurd") {
  CHECK(outcome_of_first([](auto& r) { r.cid_num = uint16_t{0}; }) == ECONNRESET);
  CHECK(outcome_of_first([](auto& r) { r.cid_num = uint16_t{1}; }) == 0);
  CHECK(outcome_of_first([](auto& r) { r.cid_num = uint16_t{128}; }) == 0);
  CHECK(outcome_of_first([](auto& r) { r.cid_num = uint16_t{129}; }) == EMFILE);  // our limit
  CHECK(outcome_of_first([](auto& r) { r.cid_num = uint16_t{4097}; }) == ECONNRESET);
  CHECK(outcome_of_first([](auto& r) { r.cid_num = uint16_t{65535}; }) == ECONNRESET);
  CHECK(outcome_of_first([](auto& r) { r.cid = uint16_t{3}; }) == ECONNRESET);
  CHECK(outcome_of_first([](auto& r) { r.cid = uint16_t{2}; }) == 0);  // any order
}

TEST_CASE("the limit on connections is named with its value") {
  auto limits = ServerWorld::small_limits();
  limits.connections_per_path_max = 2;
  ServerWorld world(limits);
  RawClient client(world);
  client.open(0);
  CHECK(outcome(client, 0) == EMFILE);
  REQUIRE(world.warnings.size() == 1);
  CHECK(mentions(world.warnings, "3 connections; the limit is 2"));
}

TEST_CASE("connections of one path that contradict each other are refused, the path lives on") {
  ServerWorld world;
  RawClient client(world);
  client.open(0);
  REQUIRE(outcome(client, 0) == 0);

  RawClient other(world);  // the same uuids
  auto request = other.connect_request(1);
  request.cid_num = uint16_t{4};
  other.open_with(1, request);
  CHECK(outcome(other, 1) == ECONNRESET);
  other.open(0);  // this cid exists
  CHECK(outcome(other, 0) == ECONNRESET);
  other.options.host = "10.0.9.9";
  other.open(1);  // from somewhere else
  CHECK(outcome(other, 1) == ECONNRESET);

  client.open(1);
  client.open(2);
  client.settle();
  client.send_info("client");
  client.settle();
  CHECK(client.take_info());
}

TEST_CASE("connections may arrive in any order") {
  ServerWorld world;
  RawClient client(world);
  for (const uint16_t cid : {uint16_t{2}, uint16_t{0}, uint16_t{1}}) {
    client.open(cid);
    REQUIRE(outcome(client, cid) == 0);
  }
  client.send_info("client");
  client.settle();
  CHECK(client.take_info());
}

TEST_CASE("path-uuid-used-again-while-connected-or-closing") {
  ServerWorld world;
  RawClient client(world);
  REQUIRE(client.connect());
  RawClient again(world);
  again.open(0);
  CHECK(outcome(again, 0) == ECONNRESET);
  CHECK(client.alive());

  // While it closes, too; and once it is closed the client may come back.
  world.upper.answer_at_once = false;
  client.write(1, 0, test::hex("00"));
  client.settle();
  for (auto& connection : client.connections) connection->endpoint->drop();
  client.settle();
  RawClient soon(world);
  soon.open(0);
  CHECK(outcome(soon, 0) == ECONNRESET);  // its request is still being executed
  world.upper.answer_all();
  RawClient later(world);
  CHECK(later.connect());
}

TEST_CASE("the same path uuid in another session is another path") {
  ServerWorld world;
  RawClient one(world), two(world, {.name = "other", .session = 2});
  CHECK(one.connect());
  CHECK(two.connect());
  CHECK(world.server->sessions().size() == 2);
}

TEST_CASE("session-unknown-without-first-conn") {
  ServerWorld world;
  RawClientOptions options;
  options.first = false;
  RawClient client(world, options);
  client.open(0);
  CHECK(outcome(client, 0) == ENXIO);
  CHECK(world.allocated == 0);
}

TEST_CASE("a second path joins its session, with the same chunks and keys of its own") {
  ServerWorld world;
  RawClient one(world);
  REQUIRE(one.connect());
  RawClient two(world, second_path(one.options));
  REQUIRE(two.connect());
  CHECK(one.chunks[0].rkey != two.chunks[0].rkey);
  CHECK(world.allocated == world.limits.session_bytes());
  CHECK(world.identities.size() == 1);
  CHECK(world.server->sessions()[0].paths == 2);
}

TEST_CASE("a second path between the same addresses is refused with EEXIST") {
  ServerWorld world;
  RawClient one(world);
  REQUIRE(one.connect());
  auto options = second_path(one.options);
  options.host = one.options.host;
  RawClient two(world, options);
  two.open(0);
  CHECK(outcome(two, 0) == EEXIST);
  // Another session may use them.
  RawClient other(world, {.name = "other", .session = 2});
  CHECK(other.connect());
}

TEST_CASE("a path that comes with another session name is closed") {
  ServerWorld world;
  RawClient one(world);
  REQUIRE(one.connect());
  auto options = second_path(one.options);
  options.name = "other";
  RawClient two(world, options);
  CHECK(!two.connect());
  CHECK(two.dead());
  CHECK(one.alive());
}

TEST_CASE("paths-beyond-the-limit") {
  auto limits = ServerWorld::small_limits();
  limits.paths_per_session_max = 3;
  ServerWorld world(limits);
  std::vector<std::unique_ptr<RawClient>> clients;
  std::vector<std::string> hosts;
  for (int i = 0; i < 4; ++i) hosts.push_back("10.0.2." + std::to_string(i + 1));
  for (uint64_t i = 0; i < 4; ++i) {
    RawClientOptions options;
    options.path = i + 1;
    options.host = hosts[i].c_str();
    options.first = i == 0;
    auto& client = *clients.emplace_back(std::make_unique<RawClient>(world, options));
    if (i < 3) {
      CHECK(client.connect());
    } else {
      client.open(0);
      CHECK(outcome(client, 0) == ECONNRESET);
    }
  }
}

TEST_CASE("sessions-beyond-the-limit: refused with EUSERS, the line names limit and value") {
  auto limits = ServerWorld::small_limits();
  limits.sessions_max = 2;
  ServerWorld world(limits);
  RawClient one(world), two(world, {.name = "two", .session = 2}),
      three(world, {.name = "three", .session = 3});
  CHECK(one.connect());
  CHECK(two.connect());
  three.open(0);
  CHECK(outcome(three, 0) == EUSERS);
  CHECK(mentions(world.warnings, "2 sessions exist; the limit is 2"));
  CHECK(world.allocated == 2 * limits.session_bytes());

  for (auto& connection : one.connections) connection->endpoint->disconnect(world.now);
  one.settle();
  RawClient four(world, {.name = "four", .session = 4});
  CHECK(four.connect());
}

TEST_CASE("memory-beyond-the-limit: refused with ENOMEM, and nothing is left behind") {
  ServerWorld world;
  world.memory_max = world.limits.session_bytes();
  RawClient one(world), two(world, {.name = "two", .session = 2});
  CHECK(one.connect());
  two.open(0);
  CHECK(outcome(two, 0) == ENOMEM);
  CHECK(mentions(world.warnings, "of " + std::to_string(world.memory_max) + " bytes"));
  CHECK(world.directory.session_count() == 1);

  world.memory_max = SIZE_MAX;
  world.allocation_throws = true;
  RawClient three(world, {.name = "three", .session = 3});
  three.open(0);
  CHECK(outcome(three, 0) == ENOMEM);
  world.allocation_throws = false;
  RawClient again(world, {.name = "three", .session = 3});
  CHECK(again.connect());
}

TEST_CASE(
    "half-open-paths-flood: strangers hold a bounded number, time frees them, good clients stay") {
  auto limits = ServerWorld::small_limits();
  limits.half_open_paths_max = 5;
  ServerWorld world(limits);
  RawClient good(world);
  REQUIRE(good.connect());

  std::vector<std::unique_ptr<RawClient>> flood;
  int accepted = 0;
  for (uint64_t i = 0; i < 100; ++i) {
    auto& client = *flood.emplace_back(std::make_unique<RawClient>(
        world, RawClientOptions{.session = 1000 + i, .path = 1000 + i}));
    client.open(static_cast<uint16_t>(i % 3));
    const int result = outcome(client, static_cast<uint16_t>(i % 3));
    CHECK(result == (i < 5 ? 0 : EAGAIN));
    accepted += result == 0 ? 1 : 0;
  }
  CHECK(accepted == 5);
  CHECK(mentions(world.warnings, "5 paths are half open; the limit is 5"));
  CHECK(world.warnings.size() <= 8);  // not a line for each
  CHECK(world.allocated == 6 * limits.session_bytes());

  good.advance(29s);
  CHECK(world.allocated == 6 * limits.session_bytes());
  good.advance(1s);
  world.tick();  // what was closed in one tick is freed in the next
  CHECK(world.allocated == limits.session_bytes());
  CHECK(world.directory.session_count() == 1);
  CHECK(mentions(world.warnings, "no INFO_REQ within 30 s (1 of 3 connections arrived)"));
  CHECK(mentions(world.log, "more connection requests were refused"));
  for (auto& client : flood) client->settle();
  CHECK(flood[0]->dead());
  CHECK(good.alive());
  RawClient next(world, {.name = "next", .session = 2});
  CHECK(next.connect());
}

TEST_CASE("half-open-paths-flood of one host does not shut out another, nor for long its own") {
  auto limits = ServerWorld::small_limits();
  limits.half_open_paths_max = 5;
  ServerWorld world(limits);
  std::vector<std::unique_ptr<RawClient>> flood;
  const auto stranger = [&world, &flood](uint64_t i) {
    auto& client = *flood.emplace_back(std::make_unique<RawClient>(
        world, RawClientOptions{.session = 1000 + i, .path = 1000 + i}));
    client.open(0);
    return outcome(client, 0);
  };
  for (uint64_t i = 0; i < 20; ++i) CHECK(stranger(i) == (i < 5 ? 0 : EAGAIN));

  // From elsewhere: at once, at the cost of the flood's oldest.
  RawClient other(world, {.name = "other", .session = 2, .path = 2, .host = "10.0.7.7"});
  CHECK(other.connect());
  flood[0]->settle();
  CHECK(flood[0]->dead());
  CHECK(mentions(world.warnings, "others wait for the place"));
  CHECK(stranger(100) == 0);
  CHECK(stranger(101) == EAGAIN);

  // From the same host: when the flood's have had time.
  RawClient early(world, {.name = "early", .session = 3, .path = 3});
  early.open(0);
  CHECK(outcome(early, 0) == EAGAIN);
  other.advance(5s);
  RawClient late(world, {.name = "late", .session = 4, .path = 4});
  CHECK(late.connect());
  for (auto& client : flood) client->settle();
  other.advance(31s);
  world.tick();
  CHECK(world.server->sessions().size() == 2);
  CHECK(world.allocated == 2 * limits.session_bytes());
}

TEST_CASE(
    "a half-open path is closed exactly when its time is over, counted from its first request") {
  ServerWorld world;
  RawClient client(world);
  client.open(0);
  REQUIRE(outcome(client, 0) == 0);
  client.advance(20s);
  client.open(1);
  client.open(2);
  client.settle();
  CHECK(client.connections[2]->open());
  client.advance(9999ms);
  CHECK(!client.dead());
  client.advance(1ms);
  client.settle();
  CHECK(client.dead());
  world.tick();
  CHECK(world.allocated == 0);
}

TEST_CASE("connection-lost-during-establishment, at every step") {
  for (uint16_t opened = 1; opened <= 3; ++opened) {
    for (uint16_t lost = 0; lost < opened; ++lost) {
      ServerWorld world;
      RawClient client(world);
      for (uint16_t cid = 0; cid < opened; ++cid) {
        client.open(cid);
        client.settle();
      }
      client.connections[lost]->endpoint->drop();
      client.settle();
      CHECK(client.dead());
      world.tick();
      CHECK(world.allocated == 0);
      CHECK(world.attached.empty());
      CHECK(world.directory.session_count() == 0);
      RawClient again(world);
      CHECK(again.connect());
    }
  }
}

TEST_CASE("connection-lost between INFO_REQ and INFO_RSP") {
  for (uint16_t lost = 0; lost < 3; ++lost) {
    ServerWorld world;
    RawClient client(world);
    for (uint16_t cid = 0; cid < 3; ++cid) client.open(cid);
    client.settle();
    client.send_info("client");
    client.connections[lost]->endpoint->drop();
    client.settle();
    world.tick();
    CHECK(client.dead());
    CHECK(world.allocated == 0);
    CHECK(world.server->sessions().empty());
  }
}

TEST_CASE("the peer that leaves while we accept") {
  ServerWorld world;
  RawClient client(world);
  client.open(0);
  client.connections[0]->endpoint->abort();
  client.settle();
  world.tick();
  CHECK(world.allocated == 0);
  CHECK(world.attached.empty());
}

TEST_CASE("info-request-before-all-connections") {
  ServerWorld world;
  RawClient client(world);
  client.open(0);
  client.open(1);
  client.settle();
  client.send_info("client");
  client.settle();
  CHECK(client.dead());
  CHECK(mentions(world.warnings, "INFO_REQ before all connections are there"));
}

TEST_CASE("info-request-malformed") {
  struct {
    const char* what;
    std::vector<std::byte> bytes;
  } const cases[] = {
      {"no bytes", {}},
      {"one byte", std::vector<std::byte>(1)},
      {"271 bytes", std::vector<std::byte>(271)},
      {"273 bytes", std::vector<std::byte>(273)},
      {"wrong type", test::hex("01 00 61", 269)},
      {"empty name", std::vector<std::byte>(272)},
      {"slash", test::hex("00 00 61 2f 62", 267)},
      {"dot", test::hex("00 00 2e", 269)},
      {"no terminator", std::vector<std::byte>(272, std::byte{'n'})},
  };
  for (const auto& c : cases) {
    CAPTURE(c.what);
    ServerWorld world;
    RawClient client(world);
    for (uint16_t cid = 0; cid < 3; ++cid) client.open(cid);
    client.settle();
    auto bytes = c.bytes;
    if (c.bytes.size() == 272 && c.bytes[0] == std::byte{'n'}) bytes[0] = bytes[1] = std::byte{0};
    client.send_info_bytes(bytes);
    client.settle();
    CHECK(client.dead());
    CHECK(world.identities.empty());
    world.tick();
    CHECK(world.allocated == 0);
  }
}

TEST_CASE("odd but legal session names are accepted, and logged as plain text") {
  for (const std::string& name :
       {std::string("%n%s"), std::string("\x1b[2J\n\xff"), std::string(254, 'x')}) {
    ServerWorld world;
    RawClientOptions options;
    options.name = name;
    RawClient client(world, options);
    CHECK(client.connect());
    CHECK(world.identities[0].name == name);
    for (const std::string& line : world.log)
      CHECK(std::all_of(line.begin(), line.end(), [](char c) { return c >= 0x20 && c < 0x7f; }));
  }
}

TEST_CASE("info-request on another connection or as an RDMA write is no INFO_REQ") {
  {
    ServerWorld world;
    RawClient client(world);
    for (uint16_t cid = 0; cid < 3; ++cid) client.open(cid);
    client.settle();
    client.send_info("client", 1);  // no receive there
    client.settle();
    CHECK(client.dead());
  }
  {
    ServerWorld world;
    RawClient client(world);
    for (uint16_t cid = 0; cid < 3; ++cid) client.open(cid);
    client.settle();
    client.immediate(0, wire::heartbeat_immediate);
    client.settle();
    CHECK(client.dead());
  }
}

TEST_CASE("info-request-twice costs the path") {
  ServerWorld world;
  RawClient client(world);
  REQUIRE(client.connect());
  wire::InfoRequest request;
  REQUIRE(wire::make_info_request("client", request));
  client.send(0, fabric::SendKind::send, wire::bytes_of(request));
  client.settle();
  CHECK(client.dead());
}

TEST_CASE("a session name that another session uses is refused until that one is gone") {
  ServerWorld world;
  RawClient one(world), two(world, {.name = "client", .session = 2});
  REQUIRE(one.connect());
  one.write(1, 0, test::hex("00"));
  one.settle();
  CHECK(!two.connect());
  CHECK(two.dead());
  CHECK(mentions(world.warnings, "session name 'client' is in use by another session"));
  CHECK(one.alive());

  // Its connections are gone, but it still writes.
  for (auto& connection : one.connections) connection->endpoint->drop();
  one.settle();
  RawClient three(world, {.name = "client", .session = 3});
  CHECK(!three.connect());
  world.upper.answer_all();
  RawClient four(world, {.name = "client", .session = 4});
  CHECK(four.connect());
}

TEST_CASE("an upper layer that wants no session costs the path") {
  ServerWorld world;
  world.make_upper = [](const rtrs::SessionIdentity&) { return nullptr; };
  RawClient client(world);
  CHECK(!client.connect());
  CHECK(client.dead());
  world.tick();
  CHECK(world.allocated == 0);
}

TEST_CASE("a server that is told to stop refuses newcomers") {
  ServerWorld world;
  RawClient client(world);
  REQUIRE(client.connect());
  world.server->shut_down(world.now);
  RawClient late(world, {.name = "late", .session = 2});
  late.open(0);
  CHECK(outcome(late, 0) == ESHUTDOWN);
}

TEST_CASE("settings that cannot work are refused when the server is made") {
  const auto attempt = [](auto change) {
    auto limits = ServerWorld::small_limits();
    change(limits);
    ServerWorld world(ServerWorld::small_limits());
    world.limits = limits;
    world.make_server();
  };
  CHECK_THROWS_AS(attempt([](auto& l) { l.queue_depth = 0; }), std::invalid_argument);
  CHECK_THROWS_AS(attempt([](auto& l) { l.queue_depth = 65536; }), std::invalid_argument);
  CHECK_THROWS_AS(attempt([](auto& l) { l.max_io_size = 0; }), std::invalid_argument);
  CHECK_THROWS_AS(attempt([](auto& l) { l.max_header_size = 2087; }), std::invalid_argument);
  CHECK_THROWS_AS(attempt([](auto& l) { l.queue_depth = 512, l.max_io_size = 524288; }),
                  std::invalid_argument);
  CHECK_THROWS_AS(attempt([](auto& l) { l.max_io_size = 0xffffffff; }), std::invalid_argument);
  CHECK_NOTHROW(attempt([](auto&) {}));
}

TEST_CASE("a device that cannot renew keys is used in plain mode, and the operator hears of it") {
  auto limits = ServerWorld::small_limits();
  limits.always_invalidate = true;
  ServerWorld world(limits, {.fresh_rkey = false});
  RawClient client(world);
  REQUIRE(client.connect());
  CHECK(client.connections[0]->response->flags == 0);
  CHECK(std::any_of(world.log.begin(), world.log.end(), [](const std::string& line) {
    return line.find("cannot renew keys") != std::string::npos;
  }));
}

TEST_CASE("thousands of clients come and go and nothing is left") {
  ServerWorld world;
  for (uint64_t i = 0; i < 2000; ++i) {
    RawClient client(world, {.session = i, .path = i});
    REQUIRE(client.connect());
    if (i % 3 == 0) continue;  // just vanishes
    for (auto& connection : client.connections) connection->endpoint->disconnect(world.now);
    client.settle();
  }
  while (world.turn()) {
  }
  world.tick();
  CHECK(world.allocated == 0);
  CHECK(world.attached.empty());
  CHECK(world.fabric.region_count() == 0);
  CHECK(world.directory.session_count() == 0);
  CHECK(world.upper.downs == 2000);
  CHECK(world.upper.destroyed == 2000);
}
