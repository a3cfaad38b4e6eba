// SPDX-License-Identifier: BSD-3-Clause
// Our software RDMA against the kernel's: soft endpoints on the one side, verbs endpoints over siw
// (software iWARP) on the other, in both roles, with and without checksums. Run in a guest, the
// address of the siw device in RIG_IP. siw has no immediate data, so RTRS itself cannot run over
// it.
#include <doctest/doctest.h>

#include <array>
#include <cstdlib>
#include <thread>

#include "protocol/fabric/soft/fabric.h"
#include "protocol/fabric/verbs/fabric.h"
#include "tests/unit/fabric/pair.h"

namespace rtrsnbd::fabric {

namespace {

constexpr uint16_t port = 7174;

Address device_address() {
  const char* const text = std::getenv("RIG_IP");
  REQUIRE_MESSAGE(text != nullptr, "RIG_IP names the address of a siw device");
  const auto addresses = resolve({text, port}, false);
  REQUIRE(addresses.has_value());
  return addresses->front();
}

struct Mode {
  bool soft_listens;
  soft::Crc crc;
};
constexpr std::array<Mode, 4> modes{{{false, soft::Crc::off},
                                     {false, soft::Crc::on},
                                     {true, soft::Crc::off},
                                     {true, soft::Crc::on}}};

std::string name_of(const Mode& mode) {
  return std::string(mode.soft_listens ? "siw connects" : "soft connects") +
         (mode.crc == soft::Crc::on ? ", with checksums" : ", without checksums");
}

// What one end needs for both directions.
struct End {
  std::unique_ptr<Fabric> fabric;
  std::unique_ptr<Domain> domain;
  std::unique_ptr<Endpoint> endpoint;
  Recorder events;
  std::vector<std::byte> target = std::vector<std::byte>(1 << 17), source = target;
  std::unique_ptr<Region> region;
  std::unique_ptr<LocalMemory> local;
  std::array<std::vector<std::byte>, 4> buffers;

  void register_memory() {
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 13 + i / 256);
    region = domain->register_region(target.data(), target.size(), Access::remote_write);
    local = domain->register_local(source.data(), source.size());
    for (size_t i = 0; i < buffers.size(); ++i) {
      buffers[i].resize(1 << 16);
      endpoint->post_receive(i, buffers[i].data(), buffers[i].size());
    }
  }
  bool post(SendKind kind, size_t length, uint64_t address = 0, uint32_t rkey = 0) {
    const Segment segment{source.data(), length, local.get()};
    SendRequest request;
    request.kind = kind;
    request.rkey = rkey;
    request.remote_address = address;
    request.invalidate_rkey = rkey;
    if (length != 0) request.segments = {&segment, 1};
    const bool posted = endpoint->post_send(request);
    endpoint->flush(Wait::no);
    return posted;
  }
};

struct Two {
  explicit Two(const Mode& mode) {
    const auto soft = [&] { return soft::make_fabric({.crc = mode.crc}); };
    server.fabric = mode.soft_listens ? soft() : verbs::make_fabric();
    client.fabric = mode.soft_listens ? verbs::make_fabric() : soft();
    listener = server.fabric->listen(device_address());
  }
  void request() {
    client.domain = client.fabric->make_domain();
    client.endpoint = client.fabric->connect(*client.domain,
                                             {device_address(), {}, {.sends = 64, .receives = 64}},
                                             as_span("question"), Clock::now());
    client.endpoint->set_handler(&client.events);
    until([&] { return pending != nullptr; });
  }
  void connect() {
    request();
    CHECK(as_text(pending->private_data()).substr(0, 8) == "question");
    server.domain = pending->make_domain();
    server.endpoint = pending->make_endpoint(*server.domain, {.sends = 64, .receives = 64});
    server.endpoint->set_handler(&server.events);
    server.register_memory();
    server.endpoint->accept(as_span("answer"));
    until([&] { return client.events.established || client.events.reason; });
    REQUIRE(client.events.established);
    CHECK(client.events.established->substr(0, 6) == "answer");
    client.register_memory();
    // siw overlooks what comes within moments of its answer to the request, until more comes.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  void step() {
    const TimePoint now = Clock::now();
    listener->progress(now, [this](std::unique_ptr<ConnectRequest> r) { pending = std::move(r); });
    for (Endpoint* const end : {client.endpoint.get(), server.endpoint.get()}) {
      if (end == nullptr || end->fd() < 0) continue;
      while (end->progress(Wait::no, now)) continue;
      end->flush(Wait::no);
      end->tick(now);
    }
  }
  template <typename Until>
  void until(Until condition) {
    drive([&] { step(); }, condition);
  }

  std::unique_ptr<Listener> listener;
  std::unique_ptr<ConnectRequest> pending;
  End client, server;
};

}  // namespace

TEST_CASE("sends and writes in both directions, and an orderly end") {
  for (const Mode& mode : modes) {
    CAPTURE(name_of(mode));
    Two two(mode);
    two.connect();
    const std::array<std::pair<End*, End*>, 2> directions{
        {{&two.client, &two.server}, {&two.server, &two.client}}};
    for (const auto& [from, to] : directions) {
      for (const size_t length : {size_t{1}, size_t{1000}, size_t{60000}})
        CHECK(from->post(SendKind::send, length));
      CHECK(from->post(SendKind::write, 100000, to->region->remote_address() + 77,
                       to->region->rkey()));
      CHECK(from->post(SendKind::send, 8));  // when it is there, the write before it is, too
      two.until([&, end = to] { return end->events.completions.size() == 4; });
      const std::array<size_t, 4> lengths{1, 1000, 60000, 8};
      for (size_t i = 0; i < lengths.size(); ++i) {
        const Completion& completion = to->events.completions[i];
        CHECK(completion.byte_count == lengths[i]);
        CHECK(std::equal(from->source.begin(),
                         from->source.begin() + static_cast<std::ptrdiff_t>(lengths[i]),
                         to->buffers[completion.id].begin()));
      }
      CHECK(
          std::equal(from->source.begin(), from->source.begin() + 100000, to->target.begin() + 77));
      CHECK(to->target[76] == std::byte{0});
    }
    two.client.endpoint->disconnect(Clock::now());
    two.until([&] { return two.client.events.reason && two.server.events.reason; });
    CHECK(*two.client.events.reason == DisconnectReason::closed_by_us);
    CHECK(*two.server.events.reason == DisconnectReason::closed_by_peer);
  }
}

TEST_CASE("a key nobody gave out ends in a Terminate, in both directions") {
  for (const Mode& mode : modes) {
    for (const bool client_sins : {true, false}) {
      CAPTURE(name_of(mode));
      CAPTURE(client_sins);
      Two two(mode);
      two.connect();
      CHECK(two.client.post(SendKind::send, 8));  // the passive end may not send before
      two.until([&] { return two.server.events.completions.size() == 1; });
      End& sinner = client_sins ? two.client : two.server;
      End& other = client_sins ? two.server : two.client;
      const auto before = other.target;
      sinner.post(SendKind::write, 5000, other.region->remote_address(),
                  other.region->rkey() ^ 0x4400);
      const TimePoint end = Clock::now() + std::chrono::seconds(20);
      while (!(sinner.events.reason && other.events.reason) && Clock::now() < end) two.step();
      REQUIRE(sinner.events.reason);
      CAPTURE(sinner.events.detail);
      REQUIRE(other.events.reason);
      CHECK(*sinner.events.reason != DisconnectReason::closed_by_us);
      CHECK(other.target == before);
    }
  }
}

TEST_CASE("a rejection brings its private data") {
  for (const Mode& mode : modes) {
    CAPTURE(name_of(mode));
    Two two(mode);
    two.request();
    two.pending->reject(as_span("no"));
    two.until([&] { return two.client.events.rejected || two.client.events.reason; });
    CAPTURE(two.client.events.detail);
    REQUIRE(two.client.events.rejected);
    CHECK(two.client.events.rejected->substr(0, 2) == "no");
  }
}

TEST_CASE("siw sends with invalidation, and the key of ours is dead") {
  Two two({true, soft::Crc::on});
  two.connect();
  const uint32_t key = two.server.region->rkey();
  const uint64_t address = two.server.region->remote_address();
  CHECK(two.client.post(SendKind::send_invalidate, 0, 0, key));
  two.until([&] { return two.server.events.completions.size() == 1 || two.client.events.reason; });
  REQUIRE(two.server.events.completions.size() == 1);
  CHECK(two.server.events.completions[0].invalidated_rkey == key);
  two.client.post(SendKind::write, 64, address, key);
  two.until([&] { return two.client.events.reason && two.server.events.reason; });
  CHECK(two.server.target[0] == std::byte{0});
}

}  // namespace rtrsnbd::fabric
