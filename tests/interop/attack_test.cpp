// SPDX-License-Identifier: BSD-3-Clause
// rtrsd attacked over real verbs. Whatever a client does costs that client its path; a good one is
// served meanwhile. Run in a guest beside an rtrsd on RIG_IP, port 1234; tests/hostile has the long
// list of what a client can do, over software RDMA.
#include <doctest/doctest.h>

#include <array>
#include <cstdlib>
#include <random>
#include <string>

#include "protocol/fabric/verbs/fabric.h"
#include "protocol/wire/rnbd.h"
#include "protocol/wire/rtrs.h"
#include "tests/unit/fabric/pair.h"

namespace rtrsnbd::fabric {

namespace {

Address server_address() {
  const char* const text = std::getenv("RIG_IP");
  REQUIRE_MESSAGE(text != nullptr, "RIG_IP names the address where rtrsd listens");
  const auto addresses = resolve({text, wire::default_port}, false);
  REQUIRE(addresses.has_value());
  return addresses->front();
}

wire::Uuid random_uuid() {
  static std::mt19937 generator(std::random_device{}());
  wire::Uuid uuid;
  for (auto& byte : uuid) byte = static_cast<std::byte>(generator());
  return uuid;
}

// A client made of raw endpoints.
class Client {
 public:
  explicit Client(uint16_t connections, uint32_t receives = 64)
      : receives_(receives), connections_(connections) {
    request.cid_num = connections;
    request.path_uuid = random_uuid();
    request.session_uuid = random_uuid();
    request.flags = 1;
  }

  // True: accepted.
  bool open(uint16_t cid) {
    request.cid = cid;
    return open_with(cid, wire::bytes_of(request));
  }
  bool open_with(uint16_t cid, std::span<const std::byte> private_data) {
    Connection& connection = connections_[cid];
    connection.endpoint =
        fabric_->connect(*domain_, {server_address(), {}, {.sends = 256, .receives = 2048}},
                         private_data, Clock::now());
    connection.endpoint->set_handler(&connection.events);
    until([&] {
      return connection.events.established || connection.events.rejected ||
             connection.events.reason;
    });
    if (!connection.events.established) return false;
    const auto response = wire::parse_connect_response(as_span(*connection.events.established));
    REQUIRE(response.has_value());
    geometry = *response;
    return true;
  }
  bool connect() {
    for (uint16_t cid = 0; cid < connections_.size(); ++cid)
      if (!open(cid)) return false;
    return info();
  }
  // True: INFO_RSP came. False: closed.
  bool info() {
    memory_.resize(8192);
    target_.resize(8192);
    local_ = domain_->register_local(memory_.data(), memory_.size());
    region_ = domain_->register_region(target_.data(), target_.size(), Access::remote_write);
    std::vector<std::byte> answer(8 + 16 * geometry.queue_depth.get());
    connections_[0].endpoint->post_receive(7, answer.data(), answer.size());
    wire::InfoRequest message;
    REQUIRE(wire::make_info_request("attacker-" + std::to_string(++names), message));
    wire::store(memory_.data(), message);
    send(0, SendKind::send, sizeof message);
    until([&] { return !connections_[0].events.completions.empty() || closed(); });
    if (closed()) return false;
    windows.resize(geometry.queue_depth);
    REQUIRE(wire::parse_info_response(
                std::span(answer).first(connections_[0].events.completions[0].byte_count),
                chunk_size(), windows) == 0);
    connections_[0].events.completions.clear();
    for (auto& connection : connections_) connection.endpoint->post_empty_receives(1, receives_);
    return true;
  }

  void send(uint16_t cid, SendKind kind, size_t length, uint64_t address = 0, uint32_t rkey = 0,
            uint32_t immediate = 0) {
    const Segment segment{memory_.data(), length, local_.get()};
    SendRequest message;
    message.kind = kind;
    message.immediate = immediate;
    message.rkey = rkey;
    message.remote_address = address;
    if (length != 0) message.segments = {&segment, 1};
    connections_[cid].endpoint->post_send(message);
    connections_[cid].endpoint->flush(Wait::no);
  }
  // A good request: SESS_INFO in a chunk.
  void ask(uint16_t cid, uint32_t chunk) {
    std::byte* const at = memory_.data();
    wire::SessionInfo user;
    wire::ReadMessage read;
    read.user_length = sizeof user;
    read.descriptor_count = 1;
    wire::Descriptor descriptor;
    descriptor.address = region_->remote_address();
    descriptor.key = region_->rkey();
    descriptor.length = sizeof user;
    wire::store(at, user);
    wire::store(at + sizeof user, read);
    wire::store(at + sizeof user + sizeof read, descriptor);
    const wire::IoRequestImmediate where{chunk, 2 * sizeof user};
    send(cid, SendKind::write_immediate, sizeof user + sizeof read + sizeof descriptor,
         windows[chunk].address + sizeof user, windows[chunk].rkey,
         where.encode(geometry.queue_depth));
  }
  // True: the answer came, and is good.
  bool served(uint16_t cid = 1, uint32_t chunk = 3) {
    auto& events = connections_[cid].events;
    events.completions.clear();
    ask(cid, chunk);
    until([&] { return !events.completions.empty() || closed(); });
    if (events.completions.empty()) return false;
    return events.completions[0].immediate == wire::IoResponseImmediate{chunk, 0, false}.encode();
  }

  [[nodiscard]] bool closed() const {
    for (const auto& connection : connections_)
      if (connection.endpoint && connection.events.reason) return true;
    return false;
  }
  // All connections are gone within ten seconds.
  void wait_closed() {
    until([&] {
      return std::all_of(connections_.begin(), connections_.end(), [](const auto& connection) {
        return !connection.endpoint || connection.events.reason;
      });
    });
  }
  template <typename Until>
  void until(Until condition) {
    drive([&] { step(); }, condition);
  }
  void step() {
    const TimePoint now = Clock::now();
    for (auto& connection : connections_) {
      if (!connection.endpoint || connection.endpoint->fd() < 0) continue;
      while (connection.endpoint->progress(Wait::no, now)) continue;
      connection.endpoint->tick(now);
    }
  }
  [[nodiscard]] uint32_t chunk_size() const { return geometry.max_io_size + geometry.max_hdr_size; }

  static inline unsigned names = 0;
  wire::ConnectRequest request;
  wire::ConnectResponse geometry;
  std::vector<wire::ChunkWindow> windows;

 private:
  struct Connection {
    Recorder events;
    std::unique_ptr<Endpoint> endpoint;
  };
  const std::unique_ptr<Fabric> fabric_ = verbs::make_fabric();
  const std::unique_ptr<Domain> domain_ = fabric_->make_domain();
  std::vector<std::byte> memory_, target_;
  std::unique_ptr<LocalMemory> local_;
  std::unique_ptr<Region> region_;
  const uint32_t receives_;
  std::vector<Connection> connections_;
};

void good_client_is_served() {
  Client good(2);
  REQUIRE(good.connect());
  CHECK(good.served());
}

}  // namespace

TEST_CASE("a good client") {
  Client client(3);
  REQUIRE(client.connect());
  for (uint32_t chunk = 0; chunk < client.geometry.queue_depth; ++chunk)
    CHECK(client.served(static_cast<uint16_t>(chunk % 3), chunk));
}

TEST_CASE("private data that is no connection request is rejected") {
  for (const size_t length : {size_t{0}, size_t{1}, size_t{55}, size_t{56}}) {
    Client client(2);
    CHECK_FALSE(client.open_with(0, std::vector<std::byte>(length)));
  }
  Client client(2);
  client.request.cid_num = 4097;
  CHECK_FALSE(client.open(0));
  good_client_is_served();
}

TEST_CASE("INFO_REQ before all connections are there, or twice, or something else") {
  {
    Client client(2);
    REQUIRE(client.open(0));
    CHECK_FALSE(client.info());
    client.wait_closed();
  }
  Client client(2);
  REQUIRE(client.connect());
  client.send(0, SendKind::send, 272);
  client.wait_closed();
  good_client_is_served();
}

TEST_CASE("immediates that point nowhere") {
  for (const int wrong : {0, 1, 2}) {
    CAPTURE(wrong);
    Client client(3);
    REQUIRE(client.connect());
    const uint32_t depth = client.geometry.queue_depth;
    uint32_t immediate = wire::IoRequestImmediate{0, 0}.encode(depth);
    if (wrong == 1)
      immediate = wire::IoRequestImmediate{depth - 1, client.chunk_size() - 2}.encode(depth);
    if (wrong == 2) immediate = 0x0fffffff;
    client.send(1, SendKind::write_immediate, 64, client.windows[0].address, client.windows[0].rkey,
                immediate);
    client.wait_closed();
  }
  good_client_is_served();
}

TEST_CASE("forged keys and places outside the chunks") {
  for (const int wrong : {0, 1, 2, 3}) {
    CAPTURE(wrong);
    Client client(3);
    REQUIRE(client.connect());
    const auto& last = client.windows.back();
    uint64_t address = client.windows[0].address;
    uint32_t rkey = client.windows[0].rkey;
    if (wrong == 0) rkey ^= 0x100;
    if (wrong == 1) rkey = 0;
    if (wrong == 2) address = last.address + client.chunk_size() - 32;
    if (wrong == 3) address -= 4096;
    client.send(2, SendKind::write, 64, address, rkey);
    client.wait_closed();
  }
  good_client_is_served();
}

TEST_CASE("another session's key is worth nothing") {
  Client victim(2), thief(2);
  REQUIRE(victim.connect());
  REQUIRE(thief.connect());
  thief.send(1, SendKind::write, 64, victim.windows[5].address, victim.windows[5].rkey);
  thief.wait_closed();
  CHECK(victim.served());
}

TEST_CASE("messages where none are due") {
  for (const SendKind kind : {SendKind::send, SendKind::send_immediate}) {
    Client client(2);
    REQUIRE(client.connect());
    client.send(1, kind, kind == SendKind::send ? 0 : 8);
    client.wait_closed();
  }
  good_client_is_served();
}

TEST_CASE("a client that posts no receives stalls itself only") {
  Client client(2, 1);
  REQUIRE(client.connect());
  for (uint32_t chunk = 0; chunk < 32; ++chunk) client.ask(1, chunk);
  const TimePoint end = Clock::now() + std::chrono::seconds(1);
  while (Clock::now() < end) client.step();
}

TEST_CASE("half-open paths, many of them, and clients that vanish") {
  std::vector<std::unique_ptr<Client>> crowd;
  for (int i = 0; i < 40; ++i) {
    crowd.push_back(std::make_unique<Client>(4));
    (void)crowd.back()->open(0);
    if (i % 2 == 0) (void)crowd.back()->open(1);
  }
  crowd.clear();
  good_client_is_served();
}

}  // namespace rtrsnbd::fabric
