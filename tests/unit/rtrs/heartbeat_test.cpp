// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/rtrs/heartbeat.h"

#include <doctest/doctest.h>

using namespace std::chrono_literals;
using rtrsnbd::TimePoint;
using rtrsnbd::rtrs::fast_heartbeat;
using rtrsnbd::rtrs::Heartbeat;
using rtrsnbd::rtrs::HeartbeatTiming;
using Action = Heartbeat::Action;

TEST_CASE("the first beat is sent one interval after the start and not earlier") {
  Heartbeat heartbeat(HeartbeatTiming{}, TimePoint{});
  CHECK(heartbeat.tick(TimePoint{} + 4999ms) == Action::none);
  CHECK(heartbeat.tick(TimePoint{} + 5s) == Action::send);
  CHECK(heartbeat.tick(TimePoint{} + 5s) == Action::none);
}

TEST_CASE("a silent peer is dead exactly 30 s after the unanswered beat") {
  Heartbeat heartbeat(HeartbeatTiming{}, TimePoint{});
  REQUIRE(heartbeat.tick(TimePoint{} + 5s) == Action::send);
  for (auto after = 1s; after < 30s; after += 1s)
    CHECK(heartbeat.tick(TimePoint{} + 5s + after) == Action::none);
  CHECK(heartbeat.tick(TimePoint{} + 5s + 29999ms) == Action::none);
  CHECK(heartbeat.tick(TimePoint{} + 35s) == Action::dead);
}

TEST_CASE("traffic at any moment starts the count anew, and beats go on under load") {
  Heartbeat heartbeat(HeartbeatTiming{}, TimePoint{});
  TimePoint now{};
  for (int round = 0; round < 20; ++round) {
    now += 5s;
    CHECK(heartbeat.tick(now) == Action::send);
    heartbeat.sign_of_life();
  }
  now += 5s;
  REQUIRE(heartbeat.tick(now) == Action::send);
  for (int i = 0; i < 5; ++i) REQUIRE(heartbeat.tick(now += 5s) == Action::none);
  heartbeat.sign_of_life();  // in the last moment
  CHECK(heartbeat.tick(now += 5s) == Action::send);
}

TEST_CASE("the fast setting gives up after 3 s") {
  Heartbeat heartbeat(fast_heartbeat, TimePoint{});
  REQUIRE(heartbeat.tick(TimePoint{} + 500ms) == Action::send);
  for (auto after = 500ms; after < 3000ms; after += 500ms)
    REQUIRE(heartbeat.tick(TimePoint{} + 500ms + after) == Action::none);
  CHECK(heartbeat.tick(TimePoint{} + 3500ms) == Action::dead);
}

TEST_CASE("a host that slept for an hour does not blame its peer") {
  Heartbeat heartbeat(HeartbeatTiming{}, TimePoint{});
  REQUIRE(heartbeat.tick(TimePoint{} + 5s) == Action::send);
  CHECK(heartbeat.tick(TimePoint{} + 1h) == Action::none);
  CHECK(heartbeat.next() == TimePoint{} + 1h + 5s);
  CHECK(heartbeat.tick(TimePoint{} + 1h + 4999ms) == Action::none);
}
