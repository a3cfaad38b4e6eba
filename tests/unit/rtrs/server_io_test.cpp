// SPDX-License-Identifier: BSD-3-Clause
// Requests and answers of a connected path: both modes, and every way to ask for something one
// should not.
#include <doctest/doctest.h>

#include <cerrno>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "tests/support/hex.h"
#include "tests/support/raw_client.h"

using namespace rtrsnbd;
using namespace std::chrono_literals;
using test::Answer;
using test::hex;
using test::RawClient;
using test::RawClientOptions;
using test::ServerWorld;

namespace {

std::vector<std::byte> pattern(size_t length, uint32_t seed) {
  std::vector<std::byte> bytes(length);
  for (size_t i = 0; i < length; ++i)
    bytes[i] = static_cast<std::byte>((i * 31 + seed * 7 + (i >> 8)) & 0xff);
  return bytes;
}

rtrs::ServerLimits limits_of(bool new_rkey) {
  auto limits = ServerWorld::small_limits();
  limits.always_invalidate = new_rkey;
  return limits;
}

// A connected client on a server in one of the modes.
struct Session {
  explicit Session(bool new_rkey, const test::MemoryFabricOptions& options = {})
      : world(limits_of(new_rkey), options), client(world) {
    REQUIRE(client.connect());
  }
  ServerWorld world;
  RawClient client;
  const std::vector<std::byte> user = hex("c0 ff ee 00 01 02 03 04");

  // The request was not answered and cost its path, and only that.
  void check_path_died() {
    client.settle();
    CHECK(client.dead());
    CHECK(client.answers.empty());
    for (auto* request : std::exchange(world.upper.waiting, {})) request->respond(0);
    world.tick();
    CHECK(world.allocated == 0);
    CHECK(world.directory.session_count() == 0);
  }
};

wire::Descriptor descriptor(uint64_t address, uint32_t key, uint32_t length) {
  wire::Descriptor d;
  d.address = address;
  d.key = key;
  d.length = length;
  return d;
}

bool mentions(const std::vector<std::string>& lines, std::string_view text) {
  return std::any_of(lines.begin(), lines.end(), [text](const std::string& line) {
    return line.find(text) != std::string::npos;
  });
}

}  // namespace

TEST_CASE("a write brings data and user message to the upper layer, and the answer back") {
  for (const bool new_rkey : {false, true}) {
    Session session(new_rkey);
    auto& client = session.client;
    const auto data = pattern(4096, 1);
    client.write(1, 5, session.user, data);
    client.settle();
    REQUIRE(session.world.upper.waiting.size() == 1);
    auto& request = *session.world.upper.waiting[0];
    CHECK(!request.is_read());
    CHECK(!request.has_descriptor());
    CHECK(request.registered_index() == 7);
    CHECK(test::to_hex(request.user()) == test::to_hex(session.user));
    REQUIRE(request.data().size() == 4096);
    CHECK(std::memcmp(request.data().data(), data.data(), 4096) == 0);
    CHECK(client.answers.empty());
    CHECK(session.world.server->sessions()[0].in_flight == 1);
    session.world.upper.answer_all();
    client.settle();
    REQUIRE(client.answers.size() == 1);
    CHECK(client.answers[0].cid == 1);
    CHECK(client.answers[0].id == 5);
    CHECK(client.answers[0].error == 0);
    CHECK(session.world.server->sessions()[0].in_flight == 0);
    CHECK(session.world.server->sessions()[0].writes == 1);
  }
}

TEST_CASE("a read brings the start of the chunk into the client's memory before the answer") {
  for (const bool new_rkey : {false, true}) {
    for (const bool invalidate : {false, true}) {
      Session session(new_rkey);
      auto& client = session.client;
      client.read(2, 7, session.user, 8192, invalidate);
      client.settle();
      REQUIRE(session.world.upper.waiting.size() == 1);
      auto& request = *session.world.upper.waiting[0];
      CHECK(request.is_read());
      CHECK(request.has_descriptor());
      REQUIRE(request.data().size() == 8192);
      const auto data = pattern(8192, 2);
      std::copy(data.begin(), data.end(), request.data().begin());
      session.world.upper.answer_all();
      client.settle();
      REQUIRE(client.answers.size() == 1);
      CHECK(client.answers[0].cid == 2);
      CHECK(client.answers[0].id == 7);
      CHECK(client.answers[0].invalidated == invalidate);
      CHECK(client.read_memory[7] == data);
    }
  }
}

TEST_CASE("a fabric that wants its send memory registered gets it registered") {
  for (const bool new_rkey : {false, true}) {
    Session session(new_rkey, {.any_local = false});  // asserts at each send
    session.world.upper.answer_at_once = true;
    session.client.read(1, 0, session.user, 4096, true);
    session.client.settle();
    CHECK(session.client.answers.size() == 1);
  }
}

TEST_CASE("a failed read transfers nothing, but invalidates what it was told to") {
  for (const bool new_rkey : {false, true}) {
    for (const bool invalidate : {false, true}) {
      Session session(new_rkey);
      session.world.upper.answer_at_once = true;
      session.world.upper.error = EIO;
      session.client.read(1, 0, session.user, 512, invalidate);
      session.client.settle();
      REQUIRE(session.client.answers.size() == 1);
      CHECK(session.client.answers[0].error == EIO);
      CHECK(session.client.answers[0].invalidated == invalidate);
      CHECK(session.client.read_memory[0] == std::vector<std::byte>(512, std::byte{0xee}));
    }
  }
}

TEST_CASE("a read without descriptor, as FLUSH travels, is answered without data or invalidation") {
  for (const bool new_rkey : {false, true}) {
    for (const uint16_t flags :
         {uint16_t{0}, wire::read_flag_need_invalidation, uint16_t{0xffff}}) {
      Session session(new_rkey);
      session.client.read_with(1, 3, session.user, 0, {}, 0, flags);
      session.client.settle();
      REQUIRE(session.world.upper.waiting.size() == 1);
      CHECK(session.world.upper.waiting[0]->is_read());
      CHECK(!session.world.upper.waiting[0]->has_descriptor());
      session.world.upper.answer_all();
      session.client.settle();
      REQUIRE(session.client.answers.size() == 1);
      CHECK(!session.client.answers[0].invalidated);
    }
  }
}

TEST_CASE("answers take the connection of their request, also connection 0, in any order") {
  Session session(false);
  for (const uint16_t cid : {uint16_t{0}, uint16_t{1}, uint16_t{2}, uint16_t{1}})
    session.client.write(cid, static_cast<uint32_t>(session.client.kept.size() % 8), session.user);
  session.client.settle();
  REQUIRE(session.world.upper.waiting.size() == 4);
  std::reverse(session.world.upper.waiting.begin(), session.world.upper.waiting.end());
  session.world.upper.answer_all();
  session.client.settle();
  REQUIRE(session.client.answers.size() == 4);
  int per_connection[3] = {};
  for (const Answer& answer : session.client.answers) ++per_connection[answer.cid];
  CHECK(per_connection[0] == 1);
  CHECK(per_connection[1] == 2);
  CHECK(per_connection[2] == 1);
}

TEST_CASE("every errno of the wire comes through; what does not fit becomes EIO") {
  Session session(false);
  session.world.upper.answer_at_once = true;
  struct {
    int error;
    uint32_t seen;
  } const cases[] = {{0, 0},     {1, 1},        {EOPNOTSUPP, EOPNOTSUPP},
                     {511, 511}, {512, EIO},    {524, EIO},
                     {-5, EIO},  {1 << 20, EIO}};
  for (const auto& c : cases) {
    session.world.upper.error = c.error;
    session.client.write(1, 0, session.user);
    session.client.settle();
    REQUIRE(!session.client.answers.empty());
    CHECK(session.client.answers.back().error == c.seen);
  }
}

TEST_CASE("each request reposts its receive, so a client can go on for ever") {
  for (const bool new_rkey : {false, true}) {
    Session session(new_rkey);
    session.world.upper.answer_at_once = true;
    const auto data = pattern(512, 3);
    for (int i = 0; i < 2000; ++i) {
      session.client.write(static_cast<uint16_t>(i % 3), static_cast<uint32_t>(i % 8), session.user,
                           data);
      session.client.settle();
    }
    CHECK(session.client.answers.size() == 2000);
    CHECK(session.client.connections[0]->endpoint->peer()->receives() == 512);
    CHECK(session.client.connections[1]->endpoint->peer()->receives() == 8);
  }
}

TEST_CASE("the whole queue depth may be in flight at once, on one connection") {
  for (const bool new_rkey : {false, true}) {
    Session session(new_rkey);
    for (uint32_t id = 0; id < 8; ++id)
      session.client.write(1, id, session.user, pattern(16384, id));
    session.client.settle();
    REQUIRE(session.world.upper.waiting.size() == 8);
    for (uint32_t id = 0; id < 8; ++id) {
      const auto expected = pattern(16384, id);
      const auto data = session.world.upper.waiting[id]->data();
      CHECK(std::equal(data.begin(), data.end(), expected.begin(), expected.end()));
    }
    session.world.upper.answer_all();
    session.client.settle();
    CHECK(session.client.answers.size() == 8);
  }
}

TEST_CASE("answers of one turn are flushed together") {
  Session session(false);
  session.world.upper.answer_at_once = true;
  for (uint32_t id = 0; id < 8; ++id) session.client.write(1, id, session.user);
  const uint64_t before = session.client.connections[1]->endpoint->peer()->flushes();
  session.client.settle();
  CHECK(session.client.answers.size() == 8);
  CHECK(session.client.connections[1]->endpoint->peer()->flushes() == before + 1);
}

TEST_CASE("NEW_RKEY: each answer brings the next key, and the old one is dead at once") {
  Session session(true);
  auto& client = session.client;
  const uint32_t first = client.chunks[4].rkey;
  session.world.upper.answer_at_once = true;
  for (uint32_t i = 1; i <= 300; ++i) {  // the low byte goes round
    client.write(1, 4, session.user);
    client.settle();
    REQUIRE(client.answers.size() == i);
    REQUIRE(client.chunks[4].rkey == ((first & ~0xffU) | ((first + i) & 0xffU)));
  }
  client.answers.clear();
  const auto last = client.chunks[4];
  client.chunks[4].rkey = (last.rkey & ~0xffU) | ((last.rkey - 1) & 0xffU);
  client.write(1, 4, session.user);
  session.check_path_died();
}

TEST_CASE("NEW_RKEY: the chunk cannot be changed while its request is executed") {
  Session session(true);
  auto& client = session.client;
  client.write(1, 2, session.user, pattern(4096, 1));
  client.settle();
  REQUIRE(session.world.upper.waiting.size() == 1);
  // The client writes again, without an immediate that would be a request.
  client.write_chunk(1, 2, 0, pattern(16, 9), wire::heartbeat_immediate);
  client.settle();
  const auto data = session.world.upper.waiting[0]->data();
  const auto expected = pattern(4096, 1);
  CHECK(std::equal(data.begin(), data.end(), expected.begin()));
  session.check_path_died();
}

TEST_CASE("plain mode: header and user message are private from the moment the request arrives") {
  Session session(false);
  auto& client = session.client;
  client.read(1, 2, session.user, 4096);
  client.settle();
  REQUIRE(session.world.upper.waiting.size() == 1);
  // Now the client makes a monster of what it asked for.
  wire::ReadMessage message;
  message.user_length = uint16_t{0xffff};
  message.descriptor_count = uint16_t{1};
  std::vector<std::byte> evil(8 + sizeof message + sizeof(wire::Descriptor), std::byte{0xff});
  wire::store(evil.data() + 8, message);
  wire::store(evil.data() + 8 + sizeof message, descriptor(0, 0, 0xffffffff));
  client.write_chunk(1, 2, 4096, evil, wire::heartbeat_immediate);
  client.settle();
  CHECK(test::to_hex(session.world.upper.waiting[0]->user()) == test::to_hex(session.user));
  CHECK(session.world.upper.waiting[0]->data().size() == 4096);
  session.world.upper.answer_all();
  client.settle();
  REQUIRE(client.answers.size() == 1);
  CHECK(client.answers[0].error == 0);
  CHECK(client.alive());
}

// --- Malformed requests: each costs its path, silently for everybody else

TEST_CASE("request-outside-the-chunks") {
  for (const bool new_rkey : {false, true}) {
    // Depth 6 leaves ids 6 and 7 expressible.
    for (const uint32_t immediate :
         {wire::IoRequestImmediate{6, 100}.encode(8), wire::IoRequestImmediate{7, 0}.encode(8),
          wire::IoRequestImmediate{0, 20480}.encode(8),
          wire::IoRequestImmediate{0, (1 << 25) - 1}.encode(8), uint32_t{0x0fffffff}}) {
      CAPTURE(immediate);
      auto limits = limits_of(new_rkey);
      limits.queue_depth = 6;
      ServerWorld world(limits);
      RawClient client(world);
      REQUIRE(client.connect());
      client.immediate(1, immediate);
      client.settle();
      CHECK(client.dead());
      CHECK(world.upper.requests == 0);
      CHECK(mentions(world.warnings, "request outside the chunks"));
    }
  }
}

TEST_CASE("header-malformed: offsets, types, lengths, descriptors") {
  constexpr uint32_t chunk = 20480;
  struct {
    const char* what;
    uint32_t offset;
    const char* message;
  } const cases[] = {
      {"nothing there", 0, "00 00"},
      {"type INFO_REQ", 64, "00 00 08 00"},
      {"type INFO_RSP", 64, "01 00 08 00"},
      {"type RKEY_RSP", 64, "04 00 08 00 00 00 00 00"},
      {"type 0xffff", 64, "ff ff 08 00"},
      {"write, one byte before the end", chunk - 1, "02"},
      {"write, three bytes before the end", chunk - 3, "02 00 08"},
      {"read without descriptor over the end", chunk - 4, "03 00 00 40"},
      {"read with descriptor over the end", chunk - 8, "03 00 00 40 00 00 01 00"},
      {"user message longer than what is before it", 64, "02 00 41 00"},
      {"user message of 65535", 64, "02 00 ff ff"},
      {"user message longer than any", 512, "02 00 11 01"},
      {"data longer than allowed", 16384 + 9, "02 00 08 00"},
      {"read of two descriptors", 4096 + 8, "03 00 08 00 00 00 02 00"},
      {"read of 65535 descriptors", 4096 + 8, "03 00 08 00 00 00 ff ff"},
      {"descriptor shorter than the data", 4096 + 8,
       "03 00 08 00 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 ff 0f 00 00"},
      {"descriptor longer than the data", 4096 + 8,
       "03 00 08 00 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 01 10 00 00"},
      {"descriptor without length", 4096 + 8,
       "03 00 08 00 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"},
      {"descriptor of 4 GiB", 4096 + 8,
       "03 00 08 00 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 ff ff ff ff"},
      {"descriptor for no data", 8,
       "03 00 08 00 00 00 01 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"},
  };
  for (const bool new_rkey : {false, true}) {
    for (const auto& c : cases) {
      CAPTURE(c.what);
      Session session(new_rkey);
      RawClient other(session.world, {.name = "other", .session = 2});
      REQUIRE(other.connect());
      session.client.post(1, 3, c.offset, c.offset, hex(c.message));
      session.client.settle();
      CHECK(session.client.dead());
      CHECK(session.world.upper.requests == 0);
      CHECK(mentions(session.world.warnings, "malformed request"));
      // Nobody else notices.
      session.world.upper.answer_at_once = true;
      other.write(1, 0, session.user);
      other.settle();
      CHECK(other.answers.size() == 1);
      CHECK(other.alive());
    }
  }
}

TEST_CASE(
    "requests without user message and with the longest, without data and with the most are fine") {
  Session session(false);
  session.world.upper.answer_at_once = true;
  auto& client = session.client;
  client.write(1, 0, {});
  client.settle();
  client.write(1, 1, std::vector<std::byte>(272), std::vector<std::byte>(16384));
  client.settle();
  CHECK(client.answers.size() == 2);
}

TEST_CASE("read-into-a-bogus-key: the client's refusal breaks its own path only") {
  for (const bool new_rkey : {false, true}) {
    Session session(new_rkey);
    RawClient other(session.world, {.name = "other", .session = 2});
    REQUIRE(other.connect());
    session.world.upper.answer_at_once = true;
    other.read(1, 0, session.user, 512);  // registers memory whose key the first client now names
    other.settle();
    const auto& foreign = *other.read_regions[0];
    session.client.read_with(1, 0, session.user, 512,
                             descriptor(foreign.remote_address(), foreign.rkey(), 512), 1, 0);
    session.client.settle();
    CHECK(session.client.dead());
    CHECK(other.alive());
    other.write(1, 1, session.user);
    other.settle();
    CHECK(other.answers.size() == 2);
  }
}

TEST_CASE("key-of-another-client: its chunks cannot be written") {
  Session session(false);
  RawClient other(session.world, {.name = "other", .session = 2});
  REQUIRE(other.connect());
  other.chunks = session.client.chunks;
  other.write(1, 0, session.user, pattern(512, 1));
  other.settle();
  CHECK(other.dead());
  CHECK(session.client.alive());
  CHECK(session.world.upper.requests == 0);
}

TEST_CASE("write beyond the chunks by a valid key") {
  for (const bool new_rkey : {false, true}) {
    Session session(new_rkey);
    auto& client = session.client;
    const uint64_t last = new_rkey ? 20480 : uint64_t{8} * 20480;
    client.chunks[0].address += last - 8;
    client.write(1, 0, session.user, pattern(16, 1));
    session.check_path_died();
  }
}

// --- The same chunk twice

TEST_CASE("chunk-in-use-asked-for-again on the same path, same or other connection") {
  for (const bool new_rkey : {false, true}) {
    for (const uint16_t cid : {uint16_t{1}, uint16_t{2}, uint16_t{0}}) {
      Session session(new_rkey);
      session.client.write(1, 3, session.user);
      session.client.settle();
      REQUIRE(session.world.upper.waiting.size() == 1);
      // No bytes, so that the dead key of NEW_RKEY mode is not what stops it.
      session.client.immediate(cid, wire::IoRequestImmediate{3, 8}.encode(8));
      session.client.settle();
      CHECK(mentions(session.world.warnings, "request for a chunk that is in use"));
      CHECK(session.world.upper.waiting.size() == 1);
      session.check_path_died();
    }
  }
}

namespace {

// Two paths of one session.
struct TwoPaths {
  explicit TwoPaths(bool new_rkey)
      : world(limits_of(new_rkey)), one(world), two(world, second(one.options)) {
    REQUIRE(one.connect());
    REQUIRE(two.connect());
  }
  static RawClientOptions second(RawClientOptions options) {
    options.path = 2;
    options.host = "10.0.1.2";
    options.first = false;
    return options;
  }
  void kill(RawClient& client) {
    for (auto& connection : client.connections) connection->endpoint->drop();
    client.settle();
    CHECK(client.dead());
  }
  ServerWorld world;
  RawClient one, two;
  const std::vector<std::byte> user = hex("01 02 03 04");
};

}  // namespace

TEST_CASE(
    "failover: the resent request waits for its first copy, and is then executed and answered") {
  for (const bool new_rkey : {false, true}) {
    for (const bool path_dies_first : {true, false}) {
      TwoPaths paths(new_rkey);
      auto& upper = paths.world.upper;
      const auto data = pattern(4096, 5);
      paths.one.write(1, 6, paths.user, data);
      paths.one.settle();
      REQUIRE(upper.waiting.size() == 1);
      if (path_dies_first) paths.kill(paths.one);
      paths.two.write(2, 6, paths.user, data);
      paths.two.settle();
      CHECK(upper.requests == 1);  // held
      CHECK(paths.two.answers.empty());
      if (!path_dies_first) paths.kill(paths.one);

      upper.answer_all();  // the first copy: nobody is told
      CHECK(upper.requests == 2);
      REQUIRE(upper.waiting.size() == 1);
      CHECK(std::equal(data.begin(), data.end(), upper.waiting[0]->data().begin()));
      CHECK(paths.two.answers.empty());
      upper.answer_all();
      paths.two.settle();
      REQUIRE(paths.two.answers.size() == 1);
      CHECK(paths.two.answers[0].id == 6);
      CHECK(paths.two.answers[0].cid == 2);
      CHECK(paths.one.answers.empty());
      CHECK(paths.two.alive());
      CHECK(upper.downs == 0);
      // And the chunk is as usable as before.
      paths.two.write(1, 6, paths.user, data);
      paths.two.settle();
      CHECK(upper.requests == 3);
      upper.answer_all();
    }
  }
}

TEST_CASE("failover: a held request of a path that dies is never begun") {
  for (const bool new_rkey : {false, true}) {
    TwoPaths paths(new_rkey);
    auto& upper = paths.world.upper;
    paths.one.write(1, 6, paths.user);
    paths.one.settle();
    paths.two.write(1, 6, paths.user);
    paths.two.settle();
    paths.kill(paths.two);
    upper.answer_all();
    paths.one.settle();
    CHECK(upper.requests == 1);
    CHECK(paths.one.answers.size() == 1);
    CHECK(paths.one.alive());
  }
}

TEST_CASE("failover: a third request for the chunk costs the path it comes on") {
  TwoPaths paths(false);
  paths.one.write(1, 6, paths.user);
  paths.one.settle();
  paths.two.write(1, 6, paths.user);
  paths.two.settle();
  paths.two.write(2, 6, paths.user);
  paths.two.settle();
  CHECK(paths.two.dead());
  CHECK(paths.one.alive());
  paths.world.upper.answer_all();
  paths.one.settle();
  CHECK(paths.one.answers.size() == 1);
  CHECK(paths.world.upper.requests == 1);
}

// --- Other things to send

TEST_CASE("SEND after INFO_REQ costs the path, empty or not") {
  for (const size_t length : std::initializer_list<size_t>{0, 1, 8, 272}) {
    Session session(false);
    session.client.send(1, fabric::SendKind::send, std::vector<std::byte>(length));
    session.check_path_died();
  }
}

TEST_CASE("an invalidation of our keys costs the path") {
  Session session(true);
  session.client.send(1, fabric::SendKind::send_invalidate, {}, session.client.chunks[0].rkey);
  session.check_path_died();
}

TEST_CASE("an empty SEND with immediate is as good as an empty write with it") {
  Session session(false);
  session.client.send(0, fabric::SendKind::send_immediate, {}, wire::heartbeat_immediate);
  session.client.settle();
  CHECK(session.client.acks == 1);
  CHECK(session.client.alive());
}

TEST_CASE(
    "immediates that no client sends are ignored, with one line in the log, and starve nobody") {
  Session session(false);
  session.world.upper.answer_at_once = true;
  const size_t before = session.world.log.size();
  for (int round = 0; round < 300; ++round) {
    for (const uint32_t type : {1U, 2U, 3U, 4U, 5U, 6U, 7U, 10U, 11U, 12U, 13U, 14U, 15U})
      session.client.immediate(static_cast<uint16_t>(round % 3), (type << 28) | 5);
    session.client.settle();
  }
  CHECK(session.world.log.size() == before + 1);
  session.client.write(1, 5, session.user);
  session.client.settle();
  CHECK(session.client.answers.size() == 1);
  CHECK(session.client.connections[1]->endpoint->peer()->receives() == 8);
}

TEST_CASE("a request before INFO_RSP is no request") {
  ServerWorld world;
  RawClient client(world);
  for (uint16_t cid = 0; cid < 3; ++cid) client.open(cid);
  client.settle();
  client.immediate(0, wire::IoRequestImmediate{0, 8}.encode(8));
  client.settle();
  CHECK(client.dead());
  CHECK(world.upper.requests == 0);
}

TEST_CASE("requests that arrive after the path began to close are dropped") {
  Session session(false);
  session.client.immediate(1, 0x0fffffff);   // closes the path
  session.client.write(1, 1, session.user);  // in the same batch
  session.client.write(2, 2, session.user);
  session.client.settle();
  CHECK(session.world.upper.requests == 0);
  CHECK(session.client.dead());
}

// --- Peers that do not take what they get

TEST_CASE("a client that reads nothing cannot make us queue without end") {
  Session session(false, {.messages_in_flight_max = 4});
  auto& world = session.world;
  auto& client = session.client;
  RawClient good(world, {.name = "good", .session = 2});
  REQUIRE(good.connect());
  world.upper.answer_at_once = true;
  for (auto& connection : client.connections) connection->endpoint->hold(true);

  size_t most = 0;
  for (uint32_t i = 0; i < 5000 && !client.connections[1]->endpoint->closed(); ++i) {
    client.write(1, i % 8, session.user);
    while (world.turn()) {
    }
    if (auto* const peer = client.connections[1]->endpoint->peer())
      most = std::max(most, peer->unflushed());
  }
  CHECK(client.connections[1]->endpoint->closed());
  CHECK(most <= 4 * (4 * 8 + 64));
  CHECK(mentions(world.warnings, "the client asks, but does not take the answers"));

  good.write(1, 0, session.user);
  good.settle();
  CHECK(good.answers.size() == 1);
  CHECK(good.alive());
}

TEST_CASE(
    "a client that is slow, but keeps to its queue depth, is not taken for one that reads "
    "nothing") {
  Session session(false, {.messages_in_flight_max = 4});
  auto& world = session.world;
  auto& client = session.client;
  world.upper.answer_at_once = true;
  // The queue is never empty: each answer taken makes room for the next request.
  for (uint32_t id = 0; id < 8; ++id) client.read(1, id, session.user, 16384);
  for (int i = 0; i < 3000; ++i) {
    while (world.turn()) {
    }
    client.connections[1]->endpoint->deliver_one(world.now);
    client.digest(1);
    for (; !client.answers.empty(); client.answers.pop_front())
      client.read(1, client.answers.front().id, session.user, i % 3 == 0 ? 16384 : 16);
  }
  CHECK(client.alive());
  CHECK(world.upper.requests > 1000);
}

TEST_CASE("a flood of heartbeats gets a bounded number of acks, and does not keep others waiting") {
  Session session(false, {.messages_in_flight_max = 4});
  auto& world = session.world;
  auto& client = session.client;
  for (int i = 0; i < 10000; ++i) {
    client.immediate(0, wire::heartbeat_immediate);
    if (i % 100 == 0)
      while (world.turn()) {
      }
  }
  client.connections[0]->endpoint->hold(true);
  for (int tick = 0; tick < 20; ++tick) {
    world.now += 500ms;
    world.tick();
    for (int i = 0; i < 100; ++i) client.immediate(0, wire::heartbeat_immediate);
    while (world.turn()) {
    }
  }
  CHECK(client.connections[0]->endpoint->peer()->unflushed() <= 64);
  client.connections[0]->endpoint->hold(false);
  client.settle();
  CHECK(client.alive());
  CHECK(client.acks >= 16);
  CHECK(client.acks <= 16 * 25);
  // A sober heartbeat is answered as ever.
  const int before = client.acks;
  world.now += 500ms;
  world.tick();
  client.immediate(0, wire::heartbeat_immediate);
  client.settle();
  CHECK(client.acks == before + 1);
}

TEST_CASE("a client that never posts receives stalls itself only, and can still be closed") {
  test::MemoryFabricOptions options;
  options.no_receive = test::MemoryFabricOptions::NoReceive::waits;
  Session session(false, options);
  auto& client = session.client;
  RawClient good(session.world, {.name = "good", .session = 2});
  REQUIRE(good.connect());
  session.world.upper.answer_at_once = true;
  for (auto& connection : client.connections) connection->endpoint->hold(true);
  for (uint32_t id = 0; id < 8; ++id) client.read(1, id, session.user, 4096);
  while (session.world.turn()) {
  }
  good.write(1, 0, session.user);
  good.settle();
  CHECK(good.answers.size() == 1);
  session.world.server->shut_down(session.world.now);
  for (auto& connection : client.connections) connection->endpoint->hold(false);
  client.settle();
  good.settle();
  session.world.tick();
  CHECK(session.world.server->idle());
}
