// SPDX-License-Identifier: BSD-3-Clause
// How paths and sessions end: silence, losses in every order, draining; and what must survive until
// when.
#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

#include "tests/support/hex.h"
#include "tests/support/raw_client.h"

using namespace rtrsnbd;
using namespace std::chrono_literals;
using test::hex;
using test::RawClient;
using test::RawClientOptions;
using test::ServerWorld;

namespace {

struct Session {
  explicit Session(const rtrs::ServerLimits& limits = ServerWorld::small_limits(),
                   RawClientOptions options = {})
      : world(limits), client(world, std::move(options)) {
    REQUIRE(client.connect());
  }
  void check_all_gone() {
    world.tick();
    CHECK(world.allocated == 0);
    CHECK(world.attached.empty());
    CHECK(world.fabric.region_count() <= client.read_regions.size());
    CHECK(world.directory.session_count() == 0);
    CHECK(world.server->sessions().empty());
    CHECK(world.server->idle());
    CHECK(world.upper.downs == 1);
    CHECK(world.upper.destroyed == 1);
  }
  ServerWorld world;
  RawClient client;
  const std::vector<std::byte> user = hex("01 02 03 04");
};

bool mentions(const std::vector<std::string>& lines, std::string_view text) {
  return std::any_of(lines.begin(), lines.end(), [text](const std::string& line) {
    return line.find(text) != std::string::npos;
  });
}

RawClientOptions silent() {
  RawClientOptions options;
  options.answer_heartbeats = false;
  return options;
}

}  // namespace

// --- Heartbeats

TEST_CASE("the server beats every interval on connection 0, first one interval after INFO") {
  Session session;
  session.client.advance(4500ms);
  CHECK(session.client.heartbeats == 0);
  session.client.advance(500ms);
  CHECK(session.client.heartbeats == 1);
  session.client.advance(60s);
  CHECK(session.client.heartbeats == 13);
  CHECK(session.client.alive());
}

TEST_CASE("a heartbeat is answered at once, on connection 0, whichever connection it came on") {
  Session session;
  for (const uint16_t cid : {uint16_t{0}, uint16_t{1}, uint16_t{2}}) {
    const int before = session.client.acks;
    session.client.immediate(cid, wire::heartbeat_immediate);
    session.client.settle();
    CHECK(session.client.acks == before + 1);
  }
}

TEST_CASE(
    "a client that answers no heartbeat is dead 35 s after its last sign of life, not earlier") {
  Session session(ServerWorld::small_limits(), silent());
  session.client.advance(34500ms);
  CHECK(session.client.heartbeats == 1);  // no second one while the first is unanswered
  CHECK(session.client.alive());
  session.client.advance(500ms);
  session.client.settle();
  CHECK(session.client.dead());
  CHECK(mentions(session.world.warnings, "peer does not answer heartbeats"));
  session.check_all_gone();
}

TEST_CASE("a process that vanished without a word is found out by heartbeat alone") {
  Session session;
  for (auto& connection : session.client.connections) connection->endpoint->go_silent();
  session.client.advance(34500ms);
  CHECK(session.world.server->sessions().size() == 1);
  session.client.advance(1s);
  session.check_all_gone();
}

TEST_CASE("with the fast setting it takes 3.5 s") {
  auto limits = ServerWorld::small_limits();
  limits.heartbeat = rtrs::fast_heartbeat;
  Session session(limits, silent());
  CHECK(session.world.server->tick_interval() == 50ms);
  session.client.advance(3450ms);
  CHECK(session.client.alive());
  session.client.advance(50ms);
  session.client.settle();
  CHECK(session.client.dead());
}

TEST_CASE(
    "any request on any connection is a sign of life, and so are beats and acks of the peer") {
  for (const int kind : {0, 1, 2, 3}) {
    CAPTURE(kind);
    Session session(ServerWorld::small_limits(), silent());
    session.world.upper.answer_at_once = true;
    for (int i = 0; i < 20; ++i) {
      session.client.advance(9s);
      if (kind == 0) session.client.write(2, 1, session.user);
      if (kind == 1) session.client.immediate(0, wire::heartbeat_immediate);
      if (kind == 2) session.client.immediate(0, wire::heartbeat_ack_immediate);
      if (kind == 3) session.client.immediate(1, 0x50000000);
    }
    CHECK(session.client.alive());
  }
}

TEST_CASE("connections without traffic are no reason to close a path whose peer answers") {
  Session session;
  session.client.advance(10min);
  CHECK(session.client.alive());
}

// --- Losses

TEST_CASE("disconnect of any connections, in any order, ends the path and frees everything") {
  std::vector<uint16_t> order = {0, 1, 2};
  do {
    for (const bool cut : {false, true}) {
      for (size_t count = 1; count <= 3; ++count) {
        Session session;
        for (size_t i = 0; i < count; ++i) {
          auto& endpoint = *session.client.connections[order[i]]->endpoint;
          if (cut)
            endpoint.drop();
          else
            endpoint.disconnect(session.world.now);
          session.world.turn();
        }
        session.client.settle();
        CHECK(session.client.dead());
        session.check_all_gone();
      }
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_CASE(
    "requests in flight when the path dies are executed to the end; then all is freed, and not "
    "before") {
  for (const bool new_rkey : {false, true}) {
    auto limits = ServerWorld::small_limits();
    limits.always_invalidate = new_rkey;
    Session session(limits);
    auto& upper = session.world.upper;
    session.client.write(1, 1, session.user, std::vector<std::byte>(4096, std::byte{0x5a}));
    session.client.read(2, 2, session.user, 4096, true);
    session.client.settle();
    REQUIRE(upper.waiting.size() == 2);
    session.client.connections[1]->endpoint->drop();
    session.client.settle();
    CHECK(session.client.dead());
    session.client.advance(60s);  // a slow disk

    CHECK(upper.downs == 1);
    CHECK(upper.destroyed == 0);
    CHECK(session.world.allocated == limits.session_bytes());
    CHECK(mentions(session.world.log, "is down with 2 requests in flight"));
    CHECK(upper.waiting[0]->data()[4095] == std::byte{0x5a});  // the disk still reads it
    std::fill(upper.waiting[1]->data().begin(), upper.waiting[1]->data().end(), std::byte{1});

    upper.waiting[0]->respond(0);
    session.world.tick();
    CHECK(session.world.allocated == limits.session_bytes());
    upper.waiting[1]->respond(0);
    CHECK(session.client.answers.empty());
    session.check_all_gone();
  }
}

TEST_CASE(
    "while a lost session's requests run, its uuid cannot be used; then the client comes back at "
    "once") {
  Session session;
  session.client.write(1, 1, session.user);
  session.client.settle();
  session.client.connections[0]->endpoint->drop();
  session.client.settle();
  {
    RawClientOptions options;
    options.path = 9;
    RawClient early(session.world, options);
    CHECK(!early.connect());
    CHECK(early.connections[0]->rejected == ECONNRESET);
  }
  session.world.upper.answer_all();
  RawClientOptions options;
  options.path = 9;
  RawClient back(session.world, options);
  CHECK(back.connect());
  CHECK(session.world.identities.size() == 2);
}

TEST_CASE("one path of two may go; the session goes with the last") {
  Session session;
  RawClientOptions options;
  options.path = 2;
  options.host = "10.0.1.2";
  options.first = false;
  RawClient two(session.world, options);
  REQUIRE(two.connect());
  session.client.connections[2]->endpoint->drop();
  session.client.settle();
  two.settle();
  session.world.tick();
  CHECK(session.client.dead());
  CHECK(two.alive());
  CHECK(session.world.upper.downs == 0);
  CHECK(session.world.fabric.region_count() == 1);

  // The first path comes back under its own uuid.
  RawClient again(session.world, session.client.options);
  CHECK(again.connect());
  CHECK(session.world.server->sessions()[0].paths == 2);
  two.connections[0]->endpoint->drop();
  two.settle();
  again.connections[0]->endpoint->drop();
  again.settle();
  session.check_all_gone();
}

TEST_CASE("a path that is still coming up goes with the session's last connected one") {
  Session session;
  RawClientOptions options;
  options.path = 2;
  options.host = "10.0.1.2";
  options.first = false;
  RawClient two(session.world, options);
  two.open(0);
  two.settle();
  CHECK(two.connections[0]->open());
  session.client.connections[0]->endpoint->drop();
  session.client.settle();
  two.settle();
  CHECK(two.dead());
  session.check_all_gone();
}

TEST_CASE("late answers, after the connections are gone or in the middle of closing, go nowhere") {
  Session session;
  session.client.write(1, 1, session.user);
  session.client.settle();
  // The server has not noticed yet.
  for (auto& connection : session.client.connections) connection->endpoint->drop();
  session.world.upper.answer_all();
  session.client.settle();
  CHECK(session.client.answers.empty());
  session.check_all_gone();
}

TEST_CASE("the server may be destroyed with open connections") {
  Session session;
  RawClient half(session.world, {.name = "half", .session = 2});
  half.open(0);
  half.settle();
  session.world.server.reset();
  CHECK(session.world.attached.empty());
  CHECK(session.world.allocated == 0);
  CHECK(session.world.upper.downs == 1);
  CHECK(session.world.upper.destroyed == 1);
  CHECK(session.world.directory.session_count() == 0);
}

TEST_CASE(
    "clients that come and go in a loop do not fill the log, and others are heard again later") {
  ServerWorld world;
  const auto come_and_go = [&world](uint64_t i) {
    RawClient client(world, {.session = i, .path = i});
    REQUIRE(client.connect());
    client.connections[0]->endpoint->drop();
    client.settle();
  };
  for (uint64_t i = 0; i < 1000; ++i) come_and_go(i);
  CHECK(world.log.size() == 1000);
  world.now += 1s;
  world.tick();
  CHECK(world.log.back().find("lines were not written") != std::string::npos);
  world.log.clear();
  come_and_go(5000);
  CHECK(world.log.size() == 4);  // up, connected, closed, ended
}

// --- Draining

TEST_CASE("shut-down of an idle server closes everything in order") {
  Session session;
  RawClient half(session.world, {.name = "half", .session = 2});
  half.open(0);
  half.settle();
  CHECK(!session.world.server->idle());
  session.world.server->shut_down(session.world.now);
  session.client.settle();
  half.settle();
  for (const auto& connection : session.client.connections)
    CHECK(connection->disconnected == fabric::DisconnectReason::closed_by_peer);
  CHECK(half.dead());
  CHECK(session.world.server->idle());
  session.check_all_gone();
  CHECK(session.world.warnings.empty());
}

TEST_CASE("shut-down answers what is being executed, and begins nothing new") {
  Session session;
  auto& upper = session.world.upper;
  session.client.write(1, 1, session.user);
  session.client.write(2, 2, session.user);
  session.client.settle();
  session.world.server->shut_down(session.world.now);
  session.client.write(1, 3, session.user);
  session.client.settle();
  CHECK(upper.requests == 2);
  CHECK(!session.world.server->idle());
  upper.waiting[0]->respond(0);
  session.client.settle();
  CHECK(session.client.answers.size() == 1);
  CHECK(session.client.alive());
  upper.waiting[1]->respond(EIO);
  session.client.settle();
  REQUIRE(session.client.answers.size() == 2);
  CHECK(session.client.answers[1].error == EIO);
  CHECK(session.client.dead());
  CHECK(session.world.server->idle());
  session.check_all_gone();
}

TEST_CASE("shut-down twice is shut-down once") {
  Session session;
  session.world.server->shut_down(session.world.now);
  session.world.server->shut_down(session.world.now);
  session.client.settle();
  session.world.server->shut_down(session.world.now);
  session.check_all_gone();
}

// --- Directory

TEST_CASE("sessions are spread over the reactors, and found again") {
  rtrs::Directory directory(3, 100);
  std::vector<uint32_t> count(3);
  for (uint64_t i = 0; i < 9; ++i) {
    wire::ConnectRequest request;
    request.session_uuid = test::make_uuid(i);
    request.flags = 1;
    int error = 0;
    const auto reactor = directory.route(request, error);
    REQUIRE(reactor.has_value());
    REQUIRE(directory.add(request.session_uuid, *reactor));
    ++count[*reactor];
    request.flags = 0;  // a further path
    CHECK(directory.route(request, error) == reactor);
  }
  CHECK(count == std::vector<uint32_t>{3, 3, 3});
  CHECK(directory.session_count() == 9);
  directory.remove(test::make_uuid(0));
  directory.remove(test::make_uuid(0));
  CHECK(directory.session_count() == 8);
}

TEST_CASE("the directory refuses unknown sessions, and too many") {
  rtrs::Directory directory(1, 1);
  wire::ConnectRequest request;
  int error = 0;
  CHECK(!directory.route(request, error));
  CHECK(error == ENXIO);
  request.flags = 1;
  CHECK(directory.route(request, error) == 0U);
  CHECK(directory.add(request.session_uuid, 0));
  CHECK(!directory.add(request.session_uuid, 0));  // it exists
  CHECK(!directory.add(test::make_uuid(7), 0));
  request.session_uuid = test::make_uuid(7);
  CHECK(!directory.route(request, error));
  CHECK(error == EUSERS);
}

TEST_CASE("names belong to one session at a time") {
  rtrs::Directory directory(1, 10);
  const auto one = test::make_uuid(1), two = test::make_uuid(2);
  CHECK(!directory.claim_name("a", one));  // no such session
  REQUIRE(directory.add(one, 0));
  REQUIRE(directory.add(two, 0));
  CHECK(directory.claim_name("a", one));
  CHECK(directory.claim_name("a", one));
  CHECK(!directory.claim_name("a", two));
  CHECK(!directory.claim_name("b", one));  // it has a name
  CHECK(directory.claim_name("b", two));
  directory.remove(one);
  REQUIRE(directory.add(one, 0));
  CHECK(directory.claim_name("a", one));
}
