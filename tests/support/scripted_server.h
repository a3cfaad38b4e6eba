// SPDX-License-Identifier: BSD-3-Clause
// A client path and a server made of raw endpoints over the in-memory fabric: every message the
// server sends is the test's.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "protocol/rtrs/client.h"
#include "protocol/wire/rtrs.h"
#include "tests/support/memory_fabric.h"

namespace rtrsnbd::test {

struct Request : rtrs::ClientRequest {
  int done = 0;
  int error = -1;
  void on_done(int result) override {
    ++done;
    error = result;
  }
};

// One connection as the server sees it.
struct Peer : fabric::Handler {
  wire::ConnectRequest request;
  std::unique_ptr<fabric::Endpoint> endpoint;
  std::vector<fabric::Completion> completions;
  std::vector<std::byte> info = std::vector<std::byte>(512);
  std::deque<std::vector<std::byte>> sent;
  std::unique_ptr<fabric::LocalMemory> local;  // stands for all of it
  void on_established(std::span<const std::byte>) override {}
  void on_rejected(std::span<const std::byte>) override {}
  void on_completion(const fabric::Completion& completion) override {
    completions.push_back(completion);
  }
  void on_disconnected(fabric::DisconnectReason, std::string_view) override {}

  void send(fabric::SendKind kind, uint32_t immediate, std::span<const std::byte> payload = {},
            uint64_t address = 0, uint32_t rkey = 0) {
    // Payloads too large to be copied at posting live until the server goes.
    const auto& kept = sent.emplace_back(payload.begin(), payload.end());
    const fabric::Segment segment{kept.data(), kept.size(), local.get()};
    fabric::SendRequest request_out;
    request_out.kind = kind;
    request_out.immediate = immediate;
    request_out.remote_address = address;
    request_out.rkey = rkey;
    if (!payload.empty()) request_out.segments = {&segment, 1};
    endpoint->post_send(request_out);
    endpoint->flush(fabric::Wait::no);
  }
  void answer(uint32_t id, uint32_t error = 0) {
    send(fabric::SendKind::write_immediate, wire::IoResponseImmediate{id, error, false}.encode());
  }
  void answer_with_key(uint32_t id, uint32_t rkey, uint32_t error = 0) {
    wire::RkeyResponse renewal;
    renewal.buffer_id = static_cast<uint16_t>(id);
    renewal.rkey = rkey;
    send(fabric::SendKind::send_immediate, wire::IoResponseImmediate{id, error, false}.encode(),
         wire::bytes_of(renewal));
  }
};

// Accepts what the client connects and then does what the test says.
struct ScriptedServer {
  static constexpr uint32_t depth = 4;
  static constexpr uint32_t io_size = 8192;
  static constexpr uint32_t chunk_size = io_size + 4096;

  explicit ScriptedServer(MemoryFabricOptions options = {})
      : fabric(options), listener(fabric.listen(address)) {
    response.queue_depth = depth;
    response.max_io_size = io_size;
    response.max_hdr_size = 4096;
    chunks.resize(size_t{depth} * chunk_size);
    region = domain->register_region(chunks.data(), chunks.size(), fabric::Access::remote_write);
    client_options.where.target = address;
    client_options.session_name = "host-1";
    client_options.io_connections = 2;
    client_options.session_uuid[0] = std::byte{0xa0};
    client_options.path_uuid[0] = std::byte{0x10};
  }

  void make_path() {
    path = std::make_unique<rtrs::ClientPath>(fabric, client_options,
                                              [](LogLevel, std::string_view) {});
    path->start(now);
  }

  void step() {
    listener->progress(now, [&](std::unique_ptr<fabric::ConnectRequest> incoming) {
      auto peer = std::make_unique<Peer>();
      peer->request = *wire::parse_connect_request(incoming->private_data());
      if (reject_with) {
        incoming->reject(*reject_with);
        return;
      }
      peer->endpoint = incoming->make_endpoint(*domain, {});
      peer->endpoint->set_handler(peer.get());
      peer->local = domain->register_local(peer->info.data(), peer->info.size());
      if (peer->request.cid == 0)
        peer->endpoint->post_receive(7, peer->info.data(), peer->info.size());
      peer->endpoint->post_empty_receives(1, 100);
      peer->endpoint->accept(wire::bytes_of(response));
      peers.push_back(std::move(peer));
    });
    fabric.settle(now);
  }
  void steps(int count = 12) {
    for (int i = 0; i < count; ++i) step();
  }

  std::vector<std::byte> info_response() const {
    std::vector<std::byte> bytes(sizeof(wire::InfoResponseHeader) + sizeof(wire::Descriptor));
    wire::InfoResponseHeader header;
    header.descriptor_count = 1;
    wire::Descriptor descriptor;
    descriptor.address = region->remote_address();
    descriptor.key = region->rkey();
    descriptor.length = static_cast<uint32_t>(chunks.size());
    wire::store(bytes.data(), header);
    wire::store(bytes.data() + sizeof header, descriptor);
    return bytes;
  }
  // The message of a request as it lies in its chunk.
  std::span<const std::byte> chunk(uint32_t id) const {
    return {chunks.data() + size_t{id} * chunk_size, chunk_size};
  }
  wire::Descriptor descriptor_at(uint32_t id, uint32_t offset) const {
    return wire::load<wire::Descriptor>(chunk(id).data() + offset + sizeof(wire::ReadMessage));
  }

  const fabric::Address address = memory_address("10.0.0.1", 1234);
  TimePoint now = TimePoint{} + std::chrono::hours(1);
  MemoryFabric fabric;
  std::unique_ptr<fabric::Listener> listener;
  std::unique_ptr<fabric::Domain> domain = fabric.make_domain();
  std::vector<std::byte> chunks;
  std::unique_ptr<fabric::Region> region;
  wire::ConnectResponse response;
  std::optional<std::vector<std::byte>> reject_with;
  std::vector<std::unique_ptr<Peer>> peers;
  rtrs::ClientOptions client_options;
  std::unique_ptr<rtrs::ClientPath> path;
};

}  // namespace rtrsnbd::test
