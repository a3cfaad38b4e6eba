// SPDX-License-Identifier: BSD-3-Clause
// The test double itself: what the other tests of this room take for granted.
#include "tests/support/memory_fabric.h"

#include <doctest/doctest.h>

#include <optional>
#include <string>
#include <thread>

using namespace rtrsnbd;
using namespace rtrsnbd::fabric;
using test::memory_address;
using test::MemoryEndpoint;
using test::MemoryFabric;

namespace {

struct Recorder final : Handler {
  std::vector<Completion> completions;
  std::optional<DisconnectReason> disconnected;
  std::optional<std::string> established, rejected;
  static std::string text(std::span<const std::byte> bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  void on_established(std::span<const std::byte> bytes) override { established = text(bytes); }
  void on_rejected(std::span<const std::byte> bytes) override { rejected = text(bytes); }
  void on_completion(const Completion& completion) override { completions.push_back(completion); }
  void on_disconnected(DisconnectReason reason, std::string_view) override {
    CHECK(!disconnected.has_value());
    disconnected = reason;
  }
};

std::span<const std::byte> bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

// A connected pair.
struct Pair {
  explicit Pair(const test::MemoryFabricOptions& options = {}) : fabric(options) {
    active =
        fabric.connect_raw(*active_domain, {memory_address("10.0.0.1", 1234), {}}, bytes("hello"));
    active->set_handler(&active_side);
    listener->progress({}, [this](std::unique_ptr<ConnectRequest> request) {
      CHECK(Recorder::text(request->private_data()) == "hello");
      passive.reset(
          dynamic_cast<MemoryEndpoint*>(request->make_endpoint(*passive_domain, {}).release()));
    });
    passive->set_handler(&passive_side);
    passive->accept(bytes("welcome"));
    fabric.settle({});
    CHECK(active_side.established == "welcome");
  }
  bool write(uint32_t key, uint64_t address, std::string_view text, bool copy = true) {
    const Segment segment{bytes(text).data(), text.size(), nullptr};
    return active->post_send({.kind = SendKind::write_immediate,
                              .copy = copy,
                              .immediate = 7,
                              .rkey = key,
                              .remote_address = address,
                              .segments = {&segment, 1}});
  }

  MemoryFabric fabric;
  std::unique_ptr<Domain> active_domain = fabric.make_domain(),
                          passive_domain = fabric.make_domain();
  std::unique_ptr<Listener> listener = fabric.listen(memory_address("10.0.0.1", 1234));
  Recorder active_side, passive_side;
  std::unique_ptr<MemoryEndpoint> active, passive;
};

}  // namespace

TEST_CASE("a write lands where the key says, and takes a receive for its immediate") {
  Pair pair;
  std::string memory(16, '.');
  const auto region = pair.passive_domain->register_region(
      reinterpret_cast<std::byte*>(memory.data()), 16, Access::remote_write);
  pair.passive->post_empty_receives(3, 2);
  pair.write(region->rkey(), region->remote_address() + 4, "data");
  CHECK(pair.passive->pending() == 0);  // not flushed
  pair.active->flush(Wait::no);
  CHECK(pair.passive->pending() == 1);
  CHECK(memory == "................");
  pair.passive->progress(Wait::no, {});
  CHECK(memory == "....data........");
  REQUIRE(pair.passive_side.completions.size() == 1);
  CHECK(pair.passive_side.completions[0].id == 3);
  CHECK(pair.passive_side.completions[0].immediate == 7);
  CHECK(pair.passive->receives() == 1);
}

TEST_CASE(
    "keys that are unknown, stale, revoked, of another domain or out of bounds cost the "
    "connection") {
  std::string memory(16, '.');
  const auto outcome = [&memory](auto choose) {
    Pair pair;
    const auto mine = pair.passive_domain->register_region(
        reinterpret_cast<std::byte*>(memory.data()), 16, Access::remote_write);
    const auto other_domain = pair.fabric.make_domain();
    const auto foreign = other_domain->register_region(reinterpret_cast<std::byte*>(memory.data()),
                                                       16, Access::remote_write);
    pair.passive->post_empty_receives(3, 2);
    choose(pair, *mine, *foreign);
    pair.active->flush(Wait::no);
    pair.fabric.settle({});
    if (pair.passive_side.completions.size() == 1) return true;
    CHECK(pair.passive_side.disconnected == DisconnectReason::protocol_error);
    CHECK(pair.active_side.disconnected == DisconnectReason::remote_error);
    CHECK(memory == "................");
    return false;
  };
  CHECK(!outcome([](Pair& p, Region& mine, Region&) {
    p.write(mine.rkey() + 256, mine.remote_address(), "x");
  }));
  CHECK(!outcome([](Pair& p, Region& mine, Region&) {
    p.write(mine.rkey() + 1, mine.remote_address(), "x");
  }));
  CHECK(!outcome([](Pair& p, Region&, Region& foreign) {
    p.write(foreign.rkey(), foreign.remote_address(), "x");
  }));
  CHECK(!outcome([](Pair& p, Region& mine, Region&) {
    p.write(mine.rkey(), mine.remote_address() + 16, "x");
  }));
  CHECK(!outcome([](Pair& p, Region& mine, Region&) {
    p.write(mine.rkey(), mine.remote_address() - 1, "x");
  }));
  CHECK(!outcome([](Pair& p, Region& mine, Region&) { p.write(mine.rkey(), UINT64_MAX, "xx"); }));
  CHECK(!outcome([](Pair& p, Region& mine, Region&) {
    mine.invalidate();
    p.write(mine.rkey(), mine.remote_address(), "x");
  }));
  CHECK(!outcome([](Pair& p, Region& mine, Region&) {
    const uint32_t old = mine.rkey();
    CHECK(mine.renew() == old + 1);
    p.write(old, mine.remote_address(), "x");
  }));
  CHECK(outcome([](Pair& p, Region&, Region&) { p.write(0, 0, ""); }));  // no bytes, no key needed
  CHECK(outcome([&memory](Pair& p, Region& mine, Region&) {
    mine.renew();
    p.write(mine.rkey(), mine.remote_address() + 15, ".");
    CHECK(memory.size() == 16);
  }));
}

TEST_CASE("payloads that are not copied are read at delivery") {
  Pair pair;
  std::string memory(4, '.'), source = "old!";
  const auto region = pair.passive_domain->register_region(
      reinterpret_cast<std::byte*>(memory.data()), 4, Access::remote_write);
  pair.passive->post_empty_receives(0, 2);
  pair.write(region->rkey(), region->remote_address(), source, false);
  pair.active->flush(Wait::no);
  source = "new!";
  pair.fabric.settle({});
  CHECK(memory == "new!");
}

TEST_CASE("a send needs a receive that is long enough") {
  Pair pair;
  std::byte buffer[4];
  pair.passive->post_receive(1, buffer, 4);
  pair.passive->post_receive(2, buffer, 4);
  const std::string text = "12345";
  Segment segment{bytes(text).data(), 4, nullptr};
  pair.active->post_send({.kind = SendKind::send, .segments = {&segment, 1}});
  segment.length = 5;
  pair.active->post_send({.kind = SendKind::send, .segments = {&segment, 1}});
  pair.active->flush(Wait::no);
  pair.fabric.settle({});
  REQUIRE(pair.passive_side.completions.size() == 1);
  CHECK(pair.passive_side.completions[0].byte_count == 4);
  CHECK(pair.passive_side.disconnected == DisconnectReason::protocol_error);
}

TEST_CASE("a message without a receive breaks the connection or waits, as the test wants") {
  Pair breaks;
  breaks.write(0, 0, "");
  breaks.active->flush(Wait::no);
  breaks.fabric.settle({});
  CHECK(breaks.passive_side.disconnected == DisconnectReason::protocol_error);

  Pair waits({.no_receive = test::MemoryFabricOptions::NoReceive::waits});
  waits.write(0, 0, "");
  waits.active->flush(Wait::no);
  waits.fabric.settle({});
  CHECK(!waits.passive_side.disconnected.has_value());
  waits.passive->post_empty_receives(0, 1);
  waits.fabric.settle({});
  CHECK(waits.passive_side.completions.size() == 1);
}

TEST_CASE("an orderly disconnect delivers what was queued, a cut does not") {
  {
    Pair pair;
    pair.passive->post_empty_receives(0, 1);
    pair.write(0, 0, "");
    pair.active->disconnect({});
    CHECK(!pair.active->post_send({}));
    pair.fabric.settle({});
    CHECK(pair.passive_side.completions.size() == 1);
    CHECK(pair.passive_side.disconnected == DisconnectReason::closed_by_peer);
    CHECK(pair.active_side.disconnected == DisconnectReason::closed_by_us);
  }
  {
    Pair pair;
    pair.passive->post_empty_receives(0, 1);
    pair.write(0, 0, "");
    pair.active->flush(Wait::no);
    pair.active->drop();
    pair.fabric.settle({});
    CHECK(pair.passive_side.completions.empty());
    CHECK(pair.passive_side.disconnected == DisconnectReason::connection_lost);
    CHECK(pair.active_side.disconnected == DisconnectReason::connection_lost);
  }
}

TEST_CASE("refused, rejected and ignored connects are told apart") {
  MemoryFabric fabric;
  const auto domain = fabric.make_domain();
  Recorder side;
  auto nobody = fabric.connect_raw(*domain, {memory_address("10.0.0.1", 1), {}}, {});
  nobody->set_handler(&side);
  fabric.settle({});
  CHECK(side.disconnected == DisconnectReason::refused);

  const auto listener = fabric.listen(memory_address("10.0.0.1", 1234));
  Recorder rejected, ignored;
  auto one = fabric.connect_raw(*domain, {memory_address("10.0.0.1", 1234), {}}, {});
  auto two = fabric.connect_raw(*domain, {memory_address("10.0.0.1", 1234), {}}, {});
  one->set_handler(&rejected);
  two->set_handler(&ignored);
  int count = 0;
  listener->progress({}, [&count](std::unique_ptr<ConnectRequest> request) {
    if (count++ == 0) request->reject(bytes("no"));
  });
  fabric.settle({});
  CHECK(rejected.rejected == "no");
  CHECK(!rejected.disconnected.has_value());
  CHECK(ignored.disconnected == DisconnectReason::connection_lost);
}

TEST_CASE("a window makes the sender wait, and held endpoints receive nothing") {
  Pair pair({.messages_in_flight_max = 2});
  pair.passive->post_empty_receives(0, 10);
  for (int i = 0; i < 5; ++i) pair.write(0, 0, "");
  pair.active->flush(Wait::no);
  CHECK(pair.passive->pending() == 2);
  CHECK(pair.active->wants_write());
  pair.passive->hold(true);
  pair.fabric.settle({});
  CHECK(pair.passive_side.completions.empty());
  pair.passive->hold(false);
  pair.fabric.settle({});
  CHECK(pair.passive_side.completions.size() == 5);
  CHECK(!pair.active->wants_write());
}

TEST_CASE("silence is silence in both directions") {
  Pair pair;
  pair.passive->post_empty_receives(0, 1);
  pair.active->go_silent();
  pair.write(0, 0, "");
  pair.active->flush(Wait::no);
  pair.active->abort();
  pair.fabric.settle({});
  CHECK(pair.passive_side.completions.empty());
  CHECK(!pair.passive_side.disconnected.has_value());
  CHECK(pair.active_side.disconnected == DisconnectReason::closed_by_us);
}

TEST_CASE("two threads: a receiver that sleeps wakes for a message and for an abort") {
  Pair pair;
  pair.passive->post_empty_receives(0, 2);
  std::thread receiver([&pair] {
    while (!pair.passive_side.disconnected) pair.passive->progress(Wait::yes, {});
  });
  pair.write(0, 0, "");
  pair.active->flush(Wait::yes);
  pair.passive->abort();
  receiver.join();
  CHECK(pair.passive_side.disconnected == DisconnectReason::closed_by_us);
}
