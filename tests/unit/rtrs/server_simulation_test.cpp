// SPDX-License-Identifier: BSD-3-Clause
// Random schedules: sessions of two paths whose connections come, go and fall silent at any moment,
// requests that are resent on the other path, answers in any order, messages delivered one at a
// time. A seed is a whole history; a failure prints it.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/support/raw_client.h"

using namespace rtrsnbd;
using namespace std::chrono_literals;
using test::RawClient;
using test::RawClientOptions;
using test::ServerWorld;

namespace {

constexpr uint32_t depth = 4;
constexpr size_t session_count = 2;
constexpr size_t path_count = 2;
constexpr uint16_t connection_count = 2;

struct Simulation {
  explicit Simulation(uint64_t seed)
      : random(seed), world(limits(seed), {.any_local = seed % 3 != 0}) {
    world.make_upper = [this](const rtrs::SessionIdentity& identity) {
      ++ups;
      return std::make_unique<Upper>(*this, identity.name);
    };
  }

  static rtrs::ServerLimits limits(uint64_t seed) {
    rtrs::ServerLimits limits;
    limits.queue_depth = depth;
    limits.max_io_size = 1024;
    limits.always_invalidate = seed % 2 == 1;
    return limits;
  }

  uint64_t pick(uint64_t below) { return random() % below; }

  // --- The upper layer: executes one request per chunk at a time, answers when the schedule says
  // so.

  struct Executing {
    rtrs::ServerRequest* request;
    uint64_t serial;
    std::string session;
  };
  struct Upper final : rtrs::UpperSession {
    Upper(Simulation& simulation_in, std::string name_in)
        : simulation(simulation_in), name(std::move(name_in)) {}
    ~Upper() override {
      CHECK(down);
      ++simulation.destroyed;
      for (const auto& one : simulation.executing) CHECK(one.session != name);
    }
    void on_request(rtrs::ServerRequest& request) override {
      CHECK(!down);
      uint64_t serial = 0;
      REQUIRE(request.user().size() == sizeof serial);
      std::memcpy(&serial, request.user().data(), sizeof serial);
      // Never two requests on one chunk.
      for (const auto& other : simulation.executing)
        CHECK((other.session != name || other.request != &request));
      if (request.is_read()) {
        std::fill(request.data().begin(), request.data().end(), static_cast<std::byte>(serial));
      } else {
        for (const std::byte byte : request.data()) CHECK(byte == static_cast<std::byte>(serial));
      }
      simulation.executing.push_back({&request, serial, name});
    }
    void on_session_down() override {
      CHECK(!down);
      down = true;
    }
    Simulation& simulation;
    const std::string name;
    bool down = false;
  };

  static int error_of(uint64_t serial) { return serial % 7 == 0 ? EIO : 0; }

  void answer_one() {
    if (executing.empty()) return;
    const auto chosen = executing.begin() + static_cast<ptrdiff_t>(pick(executing.size()));
    const Executing one = *chosen;
    executing.erase(chosen);
    // A write's data must be what the client sent until the very end, whatever happened to its
    // path.
    if (!one.request->is_read())
      for (const std::byte byte : one.request->data())
        CHECK(byte == static_cast<std::byte>(one.serial));
    one.request->respond(error_of(one.serial));
  }

  // --- The clients

  struct Outstanding {
    uint64_t serial = 0;
    size_t path = 0;
    uint16_t cid = 0;
    bool read = false;
    uint32_t length = 0;
  };
  struct Path {
    std::unique_ptr<RawClient> client;
    uint16_t opened = 0;
    bool info_sent = false, connected = false;
  };
  struct Session {
    uint64_t uuid = 0;
    std::array<Path, path_count> paths;
    std::array<std::optional<Outstanding>, depth> outstanding;  // by chunk
    [[nodiscard]] bool any_connected() const {
      return std::any_of(paths.begin(), paths.end(),
                         [](const auto& path) { return path.connected; });
    }
  };

  void connect_step(size_t s, size_t p) {
    auto& session = sessions[s];
    auto& path = session.paths[p];
    if (path.connected) return;
    if (!path.client) {
      if (!session.any_connected()) session.uuid = s * 1000 + ++generation;
      RawClientOptions options;
      options.name = "session" + std::to_string(s);
      options.session = session.uuid;
      options.path = pick(2) == 0 ? s * 10 + p : 5000 + ++generation;
      options.connections = connection_count;
      options.first = !session.any_connected() || pick(4) == 0;
      options.host = p == 0 ? "10.0.1.1" : "10.0.1.2";
      path = {};
      path.client = std::make_unique<RawClient>(world, options);
      path.client->open(0);
      path.opened = 1;
      return;
    }
    auto& client = *path.client;
    const auto& last = *client.connections[path.opened - size_t{1}];
    if (!last.open()) return;
    if (path.opened < connection_count) {
      client.open(path.opened++);
      return;
    }
    if (!path.info_sent) {
      client.send_info(client.options.name);
      path.info_sent = true;
      return;
    }
    path.connected = client.take_info();
  }

  // Every client notices that a connection of a path is gone, gives up the path, and resends.
  void notice_deaths() {
    for (size_t s = 0; s < session_count; ++s) {
      for (size_t p = 0; p < path_count; ++p) {
        auto& path = sessions[s].paths[p];
        if (!path.client) continue;
        const bool dead =
            std::any_of(path.client->connections.begin(), path.client->connections.end(),
                        [](const auto& connection) {
                          return connection && (connection->disconnected || connection->rejected);
                        });
        if (dead) give_up(s, p);
      }
    }
  }
  void give_up(size_t s, size_t p) {
    auto& session = sessions[s];
    session.paths[p] = {};
    for (uint32_t id = 0; id < depth; ++id) {
      auto& outstanding = session.outstanding[id];
      if (!outstanding || outstanding->path != p) continue;
      const size_t other = 1 - p;
      if (!session.paths[other].connected) {
        outstanding.reset();  // failed; whether it was executed is unknown
        continue;
      }
      outstanding->path = other;
      send(s, id);
    }
  }

  void submit(size_t s) {
    auto& session = sessions[s];
    const size_t p = pick(path_count);
    const auto id = static_cast<uint32_t>(pick(depth));
    if (!session.paths[p].connected || session.outstanding[id]) return;
    session.outstanding[id] = {++serials, p, 0, pick(2) == 0,
                               static_cast<uint32_t>(1 + pick(1024))};
    send(s, id);
  }
  void send(size_t s, uint32_t id) {
    auto& session = sessions[s];
    auto& outstanding = *session.outstanding[id];
    outstanding.cid = static_cast<uint16_t>(pick(connection_count));
    auto& client = *session.paths[outstanding.path].client;
    if (client.connections[outstanding.cid]->endpoint->closed()) return;  // noticed later
    const uint64_t serial = outstanding.serial;
    const auto user = std::as_bytes(std::span(&serial, 1));
    if (outstanding.read)
      client.read(outstanding.cid, id, user, outstanding.length, pick(2) == 0);
    else
      client.write(outstanding.cid, id, user,
                   std::vector<std::byte>(outstanding.length, static_cast<std::byte>(serial)));
  }

  void take_answers(size_t s, size_t p) {
    auto& session = sessions[s];
    auto& client = *session.paths[p].client;
    for (; !client.answers.empty(); client.answers.pop_front()) {
      const auto answer = client.answers.front();
      REQUIRE(answer.id < depth);
      auto& outstanding = session.outstanding[answer.id];
      // Answered once, on the path and connection that carries it now, with its own result.
      REQUIRE(outstanding.has_value());
      CHECK(outstanding->path == p);
      CHECK(outstanding->cid == answer.cid);
      CHECK(answer.error == static_cast<uint32_t>(error_of(outstanding->serial)));
      if (outstanding->read && answer.error == 0)
        for (const std::byte byte : client.read_memory[answer.id])
          CHECK(byte == static_cast<std::byte>(outstanding->serial));
      outstanding.reset();
      ++answered;
    }
  }

  // --- The network

  void deliver_to_server() {
    if (world.attached.empty()) return;
    auto* const endpoint = world.attached[pick(world.attached.size())];
    dynamic_cast<test::MemoryEndpoint&>(*endpoint).deliver_one(world.now);
  }
  void flush_server() {
    if (world.wanted.empty()) return;
    const auto chosen = world.wanted.begin() + static_cast<ptrdiff_t>(pick(world.wanted.size()));
    fabric::Endpoint* const endpoint = *chosen;
    world.wanted.erase(chosen);
    endpoint->flush(fabric::Wait::no);
  }
  void accept() {
    world.listener->progress(world.now, [this](std::unique_ptr<fabric::ConnectRequest> request) {
      world.server->on_connect_request(std::move(request), world.now);
    });
  }
  void deliver_to_client(size_t s, size_t p) {
    auto& path = sessions[s].paths[p];
    if (!path.client) return;
    const auto cid = static_cast<uint16_t>(pick(connection_count));
    auto& connection = path.client->connections[cid];
    if (!connection) return;
    connection->endpoint->deliver_one(world.now);
    if (!path.connected) return;
    path.client->digest(cid);
    take_answers(s, p);
  }
  void disturb(size_t s, size_t p) {
    auto& path = sessions[s].paths[p];
    if (!path.client) return;
    auto& connection = path.client->connections[pick(connection_count)];
    if (!connection) return;
    switch (pick(4)) {
      case 0:
        return connection->endpoint->drop();
      case 1:
        return connection->endpoint->disconnect(world.now);
      case 2:
        return connection->endpoint->abort();
      case 3:
        for (auto& each : path.client->connections)
          if (each) each->endpoint->go_silent();
        return give_up(s, p);  // the client gives up at once; the server has to find out
    }
  }

  void step() {
    const size_t s = pick(session_count), p = pick(path_count);
    switch (pick(20)) {
      case 0:
      case 1:
      case 2:
        connect_step(s, p);
        break;
      case 3:
      case 4:
        accept();
        break;
      case 5:
      case 6:
      case 7:
        submit(s);
        break;
      case 8:
      case 9:
      case 10:
        deliver_to_server();
        break;
      case 11:
      case 12:
        flush_server();
        break;
      case 13:
      case 14:
      case 15:
        deliver_to_client(s, p);
        break;
      case 16:
      case 17:
        answer_one();
        break;
      case 18:
        if (pick(10) == 0) disturb(s, p);
        break;
      case 19:
        world.now += pick(20) == 0 ? Duration(10s) : Duration(std::chrono::milliseconds(pick(300)));
        world.tick();
        break;
    }
    notice_deaths();
  }

  void run(int steps) {
    for (int i = 0; i < steps; ++i) step();

    // The end of the world: nobody holds on to anything.
    for (auto& session : sessions)
      for (auto& path : session.paths) path = {};
    for (int i = 0; i < 50; ++i) {
      while (world.turn()) {
      }
      answer_one();
      world.now += 1s;
      world.tick();
    }
    CHECK(executing.empty());
    CHECK(world.allocated == 0);
    CHECK(world.attached.empty());
    CHECK(world.directory.session_count() == 0);
    CHECK(world.fabric.region_count() == 0);
    CHECK(ups == destroyed);
    CHECK(world.server->idle());
    // Good clients, however unlucky, are never accused.
    for (const auto& line : world.warnings)
      CHECK(line.find("protocol violation") == std::string::npos);
  }

  std::mt19937_64 random;
  ServerWorld world;
  std::array<Session, session_count> sessions;
  std::vector<Executing> executing;
  uint64_t generation = 0, serials = 0, answered = 0;
  int ups = 0, destroyed = 0;
};

}  // namespace

TEST_CASE("simulation: whatever the schedule, requests are answered once and everything is freed") {
  uint64_t answered = 0, sessions = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    CAPTURE(seed);
    Simulation simulation(seed);
    simulation.run(3000);
    answered += simulation.answered;
    sessions += static_cast<uint64_t>(simulation.ups);
  }
  // The schedules do get somewhere.
  CHECK(answered > 5000);
  CHECK(sessions > 500);
}
