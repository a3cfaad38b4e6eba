// SPDX-License-Identifier: BSD-3-Clause
// The promises of fabric.h, kept by the verbs fabric on a real device: run in a guest with
// soft-RoCE, the address of the device in RIG_IP.
#include <doctest/doctest.h>

#include <array>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "protocol/fabric/verbs/fabric.h"
#include "tests/unit/fabric/pair.h"

namespace rtrsnbd::fabric {

namespace {

Address device_address(uint16_t port) {
  const char* const text = std::getenv("RIG_IP");
  REQUIRE_MESSAGE(text != nullptr, "RIG_IP names the address of an RDMA device");
  const auto addresses = resolve({text, port}, false);
  REQUIRE(addresses.has_value());
  return addresses->front();
}

constexpr uint16_t port = 4791 + 1000;

struct Two {
  explicit Two(QueueSizes sizes = {}) : queues(sizes) {}

  void request(std::string_view private_data = "hello") {
    client = fabric->connect(*client_domain, {device_address(port), {}, queues},
                             as_span(private_data), Clock::now());
    client->set_handler(&client_side);
    drive([&] { step(); }, [&] { return pending != nullptr; });
  }
  void accept(std::string_view private_data = "welcome") {
    if (!server_domain) server_domain = pending->make_domain();
    server = pending->make_endpoint(*server_domain, queues);
    pending.reset();
    server->set_handler(&server_side);
    server->accept(as_span(private_data));
    until([&] { return client_side.established || client_side.reason; });
  }
  void connect() {
    request();
    accept();
    REQUIRE(client_side.established);
    memory.assign(1 << 16, std::byte{0});
    region = server_domain->register_region(memory.data(), memory.size(), Access::remote_write);
    source.resize(memory.size());
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7 + i / 256);
    local = client_domain->register_local(source.data(), source.size());
  }
  bool write(size_t at, size_t length, uint32_t rkey, uint32_t immediate) {
    const Segment segment{source.data(), length, local.get()};
    SendRequest request;
    request.kind = SendKind::write_immediate;
    request.immediate = immediate;
    request.rkey = rkey;
    request.remote_address = region->remote_address() + at;
    request.segments = {&segment, 1};
    return client->post_send(request);
  }
  void step() {
    const TimePoint now = Clock::now();
    listener->progress(now, [this](std::unique_ptr<ConnectRequest> r) { pending = std::move(r); });
    for (Endpoint* const end : {client.get(), server.get()}) {
      if (end == nullptr || end->fd() < 0) continue;
      while (end->progress(Wait::no, now)) continue;
      end->tick(now);
    }
  }
  template <typename Until>
  void until(Until condition) {
    drive([&] { step(); }, condition);
  }

  const QueueSizes queues;
  std::unique_ptr<Fabric> fabric = verbs::make_fabric();
  std::unique_ptr<Domain> client_domain = fabric->make_domain();
  std::unique_ptr<Domain> server_domain;
  std::unique_ptr<Listener> listener = fabric->listen(device_address(port));
  std::vector<std::byte> memory, source;
  std::unique_ptr<Region> region;
  std::unique_ptr<LocalMemory> local;
  Recorder client_side, server_side;
  std::unique_ptr<ConnectRequest> pending;
  std::unique_ptr<Endpoint> client, server;
};

}  // namespace

TEST_CASE("private data reaches both ends, and addresses are told") {
  Two two;
  const std::string question(56, 'q'), answer(56, 'a');
  two.request(question);
  CHECK(as_text(two.pending->private_data()).substr(0, 56) == question);
  CHECK(two.pending->peer_address().same_host(device_address(1)));
  two.accept(answer);
  REQUIRE(two.client_side.established);
  CHECK(two.client_side.established->substr(0, 56) == answer);
  CHECK(two.client->peer_address().port() == port);
  CHECK(two.server->local_address().port() == port);
}

TEST_CASE("a rejection brings its private data, and nobody listening is a refusal") {
  {
    Two two;
    two.request();
    two.pending->reject(as_span(std::string(56, 'n')));
    two.until([&] { return two.client_side.rejected || two.client_side.reason; });
    REQUIRE(two.client_side.rejected);
    CHECK(two.client_side.rejected->substr(0, 56) == std::string(56, 'n'));
    CHECK(two.client->fd() == -1);
  }
  Two two;
  two.listener = two.fabric->listen(device_address(port + 1));
  two.client =
      two.fabric->connect(*two.client_domain, {device_address(port), {}, {}}, {}, Clock::now());
  two.client->set_handler(&two.client_side);
  two.until([&] { return two.client_side.reason.has_value(); });
  CHECK(*two.client_side.reason == DisconnectReason::refused);
}

TEST_CASE("sends arrive in order with payload and immediate, copied ones, too") {
  Two two;
  two.connect();
  std::array<std::array<std::byte, 600>, 4> buffers{};
  for (size_t i = 0; i < buffers.size(); ++i)
    two.server->post_receive(100 + i, buffers[i].data(), buffers[i].size());
  two.server->post_empty_receives(5, 1);
  for (const size_t length : {size_t{8}, size_t{64}, size_t{65}, inline_max}) {
    std::vector<std::byte> payload(length, static_cast<std::byte>(length));
    const Segment segment{payload.data(), payload.size(), nullptr};
    SendRequest request;
    request.kind = SendKind::send_immediate;
    request.copy = true;
    request.immediate = 0x80000000 + static_cast<uint32_t>(length);
    request.segments = {&segment, 1};
    CHECK(two.client->post_send(request));
    std::fill(payload.begin(), payload.end(), std::byte{0xff});  // it was copied
  }
  CHECK(two.write(1000, 5000, two.region->rkey(), 77));
  two.client->flush(Wait::yes);
  two.until([&] { return two.server_side.completions.size() == 5; });
  for (size_t i = 0; i < 4; ++i) {
    const Completion& completion = two.server_side.completions[i];
    CHECK(completion.id == 100 + i);
    CHECK(completion.immediate == 0x80000000 + completion.byte_count);
    CHECK(buffers[i][0] == static_cast<std::byte>(completion.byte_count));
    CHECK(buffers[i][completion.byte_count - 1] == static_cast<std::byte>(completion.byte_count));
  }
  CHECK(two.server_side.completions[4].id == 5);
  CHECK(two.server_side.completions[4].byte_count == 0);
  CHECK(std::equal(two.source.begin(), two.source.begin() + 5000, two.memory.begin() + 1000));
}

TEST_CASE("more sends than the queue holds wait and arrive all the same") {
  Two two({.sends = 4, .receives = 600});
  two.connect();
  two.server->post_empty_receives(1, 500);
  for (uint32_t i = 0; i < 500; ++i) CHECK(two.write(i * 64, 64, two.region->rkey(), i));
  CHECK(two.client->unsent_bytes() >= 500 * 64);
  CHECK_FALSE(two.client->wants_write());
  two.client->flush(Wait::yes);
  CHECK(two.client->wants_write());
  two.until([&] { return two.server_side.completions.size() == 500; });
  for (uint32_t i = 0; i < 500; ++i) CHECK(two.server_side.completions[i].immediate == i);
  two.until([&] { return !two.client->wants_write(); });
}

TEST_CASE("a missing receive is a pause, not an error") {
  Two two;
  two.connect();
  CHECK(two.write(0, 64, two.region->rkey(), 1));
  two.client->flush(Wait::yes);
  const auto end = Clock::now() + std::chrono::milliseconds(300);
  while (Clock::now() < end) two.step();
  CHECK_FALSE(two.client_side.reason);
  two.server->post_empty_receives(1, 1);
  two.until([&] { return two.server_side.completions.size() == 1; });
}

TEST_CASE(
    "a wrong key, a place beside the region, or a dead key costs the connection and writes "
    "nothing") {
  for (const int wrong : {0, 1, 2, 3}) {
    CAPTURE(wrong);
    Two two;
    two.connect();
    two.server->post_empty_receives(1, 4);
    uint32_t rkey = two.region->rkey();
    size_t at = 0;
    std::vector<std::byte> foreign_memory(4096);
    std::unique_ptr<Region> foreign;
    if (wrong == 0) rkey ^= 0x1000;
    if (wrong == 1) at = two.memory.size() - 32;
    if (wrong == 2) CHECK(two.region->invalidate());
    if (wrong == 3) {  // of the client's own domain: worth nothing at the server
      foreign = two.client_domain->register_region(foreign_memory.data(), foreign_memory.size(),
                                                   Access::remote_write);
      rkey = foreign->rkey();
    }
    CHECK(two.write(at, 64, rkey, 1));
    two.client->flush(Wait::yes);
    two.until([&] { return two.client_side.reason && two.server_side.reason; });
    CHECK(*two.client_side.reason == DisconnectReason::remote_error);
    CHECK(two.server_side.completions.empty());
    CHECK(std::all_of(two.memory.begin(), two.memory.end(),
                      [](std::byte byte) { return byte == std::byte{0}; }));
    CHECK_FALSE(two.write(0, 64, two.region->rkey(), 1));
  }
}

TEST_CASE("a message longer than its receive breaks the connection, not the memory behind") {
  Two two;
  two.connect();
  std::array<std::byte, 16> buffer{};
  two.server->post_receive(1, buffer.data(), 8);
  const Segment segment{two.source.data(), 16, two.local.get()};
  SendRequest request;
  request.segments = {&segment, 1};
  CHECK(two.client->post_send(request));
  two.client->flush(Wait::yes);
  two.until([&] { return two.client_side.reason && two.server_side.reason; });
  CAPTURE(two.server_side.detail);
  CHECK(*two.server_side.reason != DisconnectReason::closed_by_peer);
  CHECK(buffer[8] == std::byte{0});
}

TEST_CASE("an orderly end: what was posted arrives first") {
  Two two({.sends = 4, .receives = 200});
  two.connect();
  two.server->post_empty_receives(1, 100);
  for (uint32_t i = 0; i < 100; ++i) CHECK(two.write(0, 64, two.region->rkey(), i));
  two.client->disconnect(Clock::now());
  CHECK_FALSE(two.write(0, 64, two.region->rkey(), 1));
  two.until([&] { return two.client_side.reason && two.server_side.reason; });
  CHECK(two.server_side.completions.size() == 100);
  CHECK(*two.client_side.reason == DisconnectReason::closed_by_us);
  CHECK(*two.server_side.reason == DisconnectReason::closed_by_peer);
}

TEST_CASE("abort wakes up who sleeps in progress, and the peer hears of it") {
  Two two;
  two.connect();
  std::thread sleeper([&] {
    while (two.client->fd() >= 0) two.client->progress(Wait::yes, Clock::now());
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  two.client->abort();
  sleeper.join();
  CHECK(two.client_side.reason == DisconnectReason::closed_by_us);
  two.until([&] { return two.server_side.reason.has_value(); });
  CHECK(*two.server_side.reason == DisconnectReason::closed_by_peer);
}

TEST_CASE("a request that is dropped unanswered is a refusal at the other end") {
  Two two;
  two.request();
  two.pending.reset();
  two.until([&] { return two.client_side.reason || two.client_side.rejected; });
}

TEST_CASE("more receives than the device holds are refused in words") {
  Two two;
  two.request();
  const auto domain = two.pending->make_domain();
  try {
    (void)two.pending->make_endpoint(*domain, {.sends = 16, .receives = 1U << 30});
    FAIL("should have been refused");
  } catch (const std::system_error& error) {
    CHECK(std::string_view(error.what()).find("receives per connection") != std::string_view::npos);
  }
  two.pending->reject({});
  two.until([&] { return two.client_side.reason || two.client_side.rejected; });
}

// What is left of them, the guest's script looks up in the device.
TEST_CASE("a thousand connections come and go") {
  Two two({.sends = 16, .receives = 16});
  for (int i = 0; i < 1000; ++i) {
    CAPTURE(i);
    two.client_side = {};
    two.server_side = {};
    two.request();
    two.accept();
    REQUIRE(two.client_side.established);
    if (i % 3 == 0) two.client->disconnect(Clock::now());
    if (i % 3 == 1) two.server->abort();
    if (i % 3 != 2) two.until([&] { return two.client_side.reason && two.server_side.reason; });
    two.client.reset();
    two.server.reset();
  }
}

}  // namespace rtrsnbd::fabric
