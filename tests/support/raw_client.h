// SPDX-License-Identifier: BSD-3-Clause
// A client's path made by hand, message by message, so that a test can send what no client would.
// It knows how to be good (connect, write, read), and checks the server's answers while it is.
#pragma once

#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "protocol/wire/rnbd.h"
#include "protocol/wire/rtrs.h"
#include "tests/support/server_world.h"

namespace rtrsnbd::test {

inline wire::Uuid make_uuid(uint64_t number) {
  wire::Uuid uuid{};
  std::memcpy(uuid.data(), &number, sizeof number);
  return uuid;
}

struct RawConnection final : fabric::Handler {
  void on_established(std::span<const std::byte> bytes) override {
    const auto parsed = wire::parse_connect_response(bytes);
    if (parsed) response = *parsed;
  }
  void on_rejected(std::span<const std::byte> bytes) override {
    const auto parsed = wire::parse_connect_response(bytes);
    rejected = parsed ? parsed->error_number() : -1;
  }
  void on_completion(const fabric::Completion& completion) override {
    completions.push_back(completion);
  }
  void on_disconnected(fabric::DisconnectReason reason, std::string_view) override {
    disconnected = reason;
  }

  [[nodiscard]] bool open() const { return response.has_value() && !disconnected.has_value(); }

  std::optional<wire::ConnectResponse> response;
  std::optional<int> rejected;
  std::optional<fabric::DisconnectReason> disconnected;
  std::deque<fabric::Completion> completions;
  uint32_t invalidated = 0;  // key the server just invalidated; the answer must follow
  std::vector<std::array<std::byte, sizeof(wire::RkeyResponse)>>
      receives;  // NEW_RKEY: where answers land
  std::unique_ptr<MemoryEndpoint> endpoint;
};

struct RawClientOptions {
  std::string name = "client";
  uint64_t session = 1;
  uint64_t path = 1;
  uint16_t connections = 3;
  bool first = true;  // first_conn
  const char* host = "10.0.0.2";
  const char* server = server_host;
  bool answer_heartbeats = true;
};

struct Answer {
  uint16_t cid = 0;
  uint32_t id = 0;
  uint32_t error = 0;
  bool invalidated = false;
};

class RawClient {
 public:
  RawClient(ServerWorld& world_in, RawClientOptions options_in = {})
      : world(world_in), options(std::move(options_in)), domain(world.fabric.make_domain()) {
    connections.resize(options.connections);
  }

  // --- Being good

  // Everything up to INFO_RSP. False: refused or disconnected on the way.
  bool connect() {
    for (uint16_t cid = 0; cid < options.connections; ++cid) {
      open(cid);
      settle();
      if (!connections[cid]->open()) return false;
    }
    send_info(options.name);
    settle();
    return take_info();
  }

  wire::ConnectRequest connect_request(uint16_t cid) const {
    wire::ConnectRequest request;
    request.cid = cid;
    request.cid_num = options.connections;
    request.reconnect_count = uint16_t{1};
    request.path_uuid = make_uuid(options.path);
    request.session_uuid = make_uuid(0x100 + options.session);
    request.flags = options.first ? 1 : 0;
    return request;
  }

  void open(uint16_t cid) { open_with(cid, connect_request(cid)); }
  void open_with(uint16_t cid, const wire::ConnectRequest& request) {
    open_bytes(cid, wire::bytes_of(request));
  }
  void open_bytes(uint16_t cid, std::span<const std::byte> private_data) {
    if (connections.size() <= cid) connections.resize(cid + size_t{1});
    auto& connection = connections[cid] = std::make_unique<RawConnection>();
    fabric::ConnectOptions where;
    where.target = memory_address(options.server, 1234);
    where.source = memory_address(options.host, static_cast<uint16_t>(10000 + cid));
    where.queues = {.sends = 1U << 16, .receives = 1U << 20};
    connection->endpoint = world.fabric.connect_raw(*domain, where, private_data);
    connection->endpoint->set_handler(connection.get());
  }

  void send_info(const std::string& name, uint16_t cid = 0) {
    wire::InfoRequest request;
    std::memcpy(request.session_name.data(), name.data(), std::min<size_t>(name.size(), 255));
    send_info_bytes(wire::bytes_of(request), cid);
  }
  void send_info_bytes(std::span<const std::byte> bytes, uint16_t cid = 0) {
    info.resize(sizeof(wire::InfoResponseHeader) +
                world.limits.queue_depth * sizeof(wire::Descriptor));
    if (!connections[cid]) return;
    connections[cid]->endpoint->post_receive(info_id, info.data(), info.size());
    send(cid, fabric::SendKind::send, bytes);
  }

  bool take_info() {
    if (!connections[0]) return false;
    auto& service = *connections[0];
    if (service.completions.empty() || service.completions.front().id != info_id) return false;
    const size_t length = service.completions.front().byte_count;
    service.completions.pop_front();
    chunks.resize(world.limits.queue_depth);
    if (wire::parse_info_response(std::span(info).first(length), world.limits.chunk_size(),
                                  chunks) != 0)
      throw std::logic_error("malformed INFO_RSP");
    for (auto& connection : connections) {
      connection->receives.resize(size_t{3} * world.limits.queue_depth + 64);
      for (size_t i = 0; i < connection->receives.size(); ++i) post_receive(*connection, i);
    }
    return informed = true;
  }

  // One request, laid out as the specification wants it: data, user message, RTRS message.
  void write(uint16_t cid, uint32_t id, std::span<const std::byte> user,
             std::span<const std::byte> data = {}) {
    wire::WriteMessage message;
    message.user_length = static_cast<uint16_t>(user.size());
    std::vector<std::byte> bytes(data.begin(), data.end());
    append(bytes, user);
    append(bytes, wire::bytes_of(message));
    post(cid, id, 0, static_cast<uint32_t>(data.size() + user.size()), bytes);
  }
  // length 0: without a descriptor.
  void read(uint16_t cid, uint32_t id, std::span<const std::byte> user, uint32_t length,
            bool invalidate = false) {
    wire::Descriptor descriptor;
    if (length != 0) {
      read_memory.resize(std::max<size_t>(read_memory.size(), world.limits.queue_depth));
      read_regions.resize(read_memory.size());
      read_memory[id].assign(length, std::byte{0xee});
      read_regions[id] =
          domain->register_region(read_memory[id].data(), length, fabric::Access::remote_write);
      descriptor.address = read_regions[id]->remote_address();
      descriptor.key = read_regions[id]->rkey();
      descriptor.length = length;
    }
    read_with(cid, id, user, length, descriptor, length != 0 ? 1 : 0,
              invalidate ? wire::read_flag_need_invalidation : uint16_t{0});
  }
  void read_with(uint16_t cid, uint32_t id, std::span<const std::byte> user, uint32_t data_length,
                 const wire::Descriptor& descriptor, uint16_t count, uint16_t flags) {
    wire::ReadMessage message;
    message.user_length = static_cast<uint16_t>(user.size());
    message.flags = flags;
    message.descriptor_count = count;
    std::vector<std::byte> bytes(user.begin(), user.end());
    append(bytes, wire::bytes_of(message));
    if (count != 0) append(bytes, wire::bytes_of(descriptor));
    post(cid, id, data_length, data_length + static_cast<uint32_t>(user.size()), bytes);
  }

  // Writes bytes into the chunk at start and says that the RTRS message is at header.
  void post(uint16_t cid, uint32_t id, uint32_t start, uint32_t header,
            std::span<const std::byte> bytes) {
    write_chunk(cid, id, start, bytes,
                wire::IoRequestImmediate{id, header}.encode(world.limits.queue_depth));
  }
  void write_chunk(uint16_t cid, uint32_t id, uint32_t start, std::span<const std::byte> bytes,
                   uint32_t immediate) {
    kept.emplace_back(bytes.begin(), bytes.end());
    const fabric::Segment segment{kept.back().data(), kept.back().size(), local.get()};
    fabric::SendRequest request;
    request.kind = fabric::SendKind::write_immediate;
    request.immediate = immediate;
    request.remote_address = chunks[id].address + start;
    request.rkey = chunks[id].rkey;
    request.segments = {&segment, 1};
    connections[cid]->endpoint->post_send(request);
    connections[cid]->endpoint->flush(fabric::Wait::no);
  }
  void immediate(uint16_t cid, uint32_t value) {
    fabric::SendRequest request;
    request.kind = fabric::SendKind::write_immediate;
    request.immediate = value;
    connections[cid]->endpoint->post_send(request);
    connections[cid]->endpoint->flush(fabric::Wait::no);
  }
  void send(uint16_t cid, fabric::SendKind kind, std::span<const std::byte> bytes,
            uint32_t value = 0) {
    kept.emplace_back(bytes.begin(), bytes.end());
    const fabric::Segment segment{kept.back().data(), kept.back().size(), local.get()};
    fabric::SendRequest request;
    request.kind = kind;
    request.immediate = value;
    request.invalidate_rkey = value;
    if (!bytes.empty()) request.segments = {&segment, 1};
    connections[cid]->endpoint->post_send(request);
    connections[cid]->endpoint->flush(fabric::Wait::no);
  }

  // --- What came back

  // Server and client move until nothing moves.
  void settle() {
    for (bool moved = true; moved;) {
      moved = world.turn();
      moved = progress() || moved;
    }
  }
  bool progress() {
    bool moved = false;
    for (uint16_t cid = 0; cid < connections.size(); ++cid) {
      auto& connection = connections[cid];
      if (!connection) continue;
      const uint64_t before = connection->endpoint->deliveries();
      connection->endpoint->progress(fabric::Wait::no, world.now);
      moved = moved || connection->endpoint->deliveries() != before;
      if (informed) digest(cid);
    }
    return moved;
  }
  // Lets the time pass in steps of the server's ticks.
  void advance(Duration duration) {
    const TimePoint end = world.now + duration;
    while (world.now < end) {
      world.now = std::min(world.now + world.server->tick_interval(), end);
      world.tick();
      settle();
    }
  }

  // Looks at what arrived on one connection; progress() does it by itself.
  // The rules of the specification for what a server sends are checked here; a break is a bug of
  // the server.
  void digest(uint16_t cid) {
    auto& connection = *connections[cid];
    while (!connection.completions.empty()) {
      const auto completion = connection.completions.front();
      connection.completions.pop_front();
      const bool late_info =
          completion.id == info_id;  // a receive for INFO_RSP that caught something else
      const std::span<const std::byte> memory =
          late_info ? std::span<const std::byte>(info)
                    : std::span<const std::byte>(connection.receives.at(completion.id));
      take(cid, completion, memory.first(completion.byte_count));
      if (!late_info && !connection.disconnected) post_receive(connection, completion.id);
    }
  }

  [[nodiscard]] bool alive() const {
    for (const auto& connection : connections)
      if (!connection || !connection->open()) return false;
    return true;
  }
  [[nodiscard]] bool dead() const {
    for (const auto& connection : connections)
      if (connection && connection->response && !connection->disconnected) return false;
    return true;
  }

  static constexpr uint64_t info_id = 1 << 20;

  ServerWorld& world;
  RawClientOptions options;
  std::unique_ptr<fabric::Domain> domain;
  std::unique_ptr<fabric::LocalMemory> local =
      std::make_unique<fabric::LocalMemory>();  // stands for all of it
  std::vector<std::byte> info;
  std::vector<wire::ChunkWindow> chunks;
  bool informed = false;                            // INFO_RSP was taken
  std::deque<std::vector<std::byte>> kept;          // sources of what is under way
  std::vector<std::vector<std::byte>> read_memory;  // by id
  std::vector<std::unique_ptr<fabric::Region>> read_regions;
  std::vector<std::unique_ptr<RawConnection>> connections;
  std::deque<Answer> answers;
  int heartbeats = 0, acks = 0;

 private:
  static void append(std::vector<std::byte>& bytes, std::span<const std::byte> more) {
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  void post_receive(RawConnection& connection, size_t index) {
    connection.endpoint->post_receive(index, connection.receives[index].data(),
                                      connection.receives[index].size());
  }

  void take(uint16_t cid, const fabric::Completion& completion,
            std::span<const std::byte> payload) {
    uint32_t& invalidated = connections[cid]->invalidated;
    if (completion.invalidated_rkey != 0) {
      if (invalidated != 0) throw std::logic_error("two invalidations without an answer");
      invalidated = completion.invalidated_rkey;
      return;
    }
    if (!completion.has_immediate) throw std::logic_error("plain SEND after INFO_RSP");
    switch (static_cast<wire::ImmediateType>(wire::immediate_type(completion.immediate))) {
      case wire::ImmediateType::heartbeat:
        if (cid != 0) throw std::logic_error("heartbeat not on connection 0");
        ++heartbeats;
        if (options.answer_heartbeats) immediate(0, wire::heartbeat_ack_immediate);
        return;
      case wire::ImmediateType::heartbeat_ack:
        if (cid != 0) throw std::logic_error("heartbeat ack not on connection 0");
        ++acks;
        return;
      case wire::ImmediateType::io_response:
      case wire::ImmediateType::io_response_invalidated:
        break;
      case wire::ImmediateType::io_request:
      default:
        throw std::logic_error("immediate that no server sends");
    }
    const auto response = wire::IoResponseImmediate::decode(completion.immediate);
    if (world.limits.always_invalidate) {
      const auto renewal = wire::parse_rkey_response(payload);
      if (!renewal) throw std::logic_error("answer without a key in NEW_RKEY mode");
      if (renewal->buffer_id != response.message_id) throw std::logic_error("key of another chunk");
      chunks.at(response.message_id).rkey = renewal->rkey;
    } else if (!payload.empty()) {
      throw std::logic_error("answer with payload in plain mode");
    }
    if (response.invalidated != (invalidated != 0))
      throw std::logic_error("type of the answer and invalidation do not fit");
    invalidated = 0;
    answers.push_back({cid, response.message_id, response.error, response.invalidated});
  }
};

}  // namespace rtrsnbd::test
