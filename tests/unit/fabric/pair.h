// SPDX-License-Identifier: BSD-3-Clause
// Two endpoints of the soft fabric over a real loopback connection, and a handler that remembers.
#pragma once

#include <doctest/doctest.h>
#include <netinet/in.h>
#include <poll.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "protocol/fabric/soft/fabric.h"

namespace rtrsnbd::fabric {

inline std::span<const std::byte> as_span(std::string_view text) {
  return std::as_bytes(std::span(text));
}
inline std::string as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline Address any_loopback_port() {
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return {reinterpret_cast<const sockaddr*>(&v4), sizeof v4};
}

class Recorder : public Handler {
 public:
  void on_established(std::span<const std::byte> data) override { established = as_text(data); }
  void on_rejected(std::span<const std::byte> data) override { rejected = as_text(data); }
  void on_completion(const Completion& completion) override { completions.push_back(completion); }
  void on_disconnected(DisconnectReason why, std::string_view text) override {
    REQUIRE(!reason.has_value());
    reason = why;
    detail = text;
  }
  std::optional<std::string> established, rejected;
  std::vector<Completion> completions;
  std::optional<DisconnectReason> reason;
  std::string detail;
};

// Calls until() after each step of everybody; fails after ten seconds.
template <typename Step, typename Until>
void drive(Step step, Until until) {
  const TimePoint end = Clock::now() + std::chrono::seconds(10);
  while (!until()) {
    if (Clock::now() >= end) FAIL("nothing happened for ten seconds");
    step();
  }
}

struct Pair {
  explicit Pair(const soft::Options& options = {}) : Pair(options, options) {}
  Pair(const soft::Options& client_options, const soft::Options& server_options)
      : client_fabric(soft::make_fabric(client_options)),
        server_fabric(soft::make_fabric(server_options)),
        client_domain(client_fabric->make_domain()),
        server_domain(server_fabric->make_domain()),
        listener(server_fabric->listen(any_loopback_port())) {}

  void request(std::string_view private_data = "hello") {
    client = client_fabric->connect(*client_domain, {listener->address(), {}},
                                    as_span(private_data), Clock::now());
    client->set_handler(&client_side);
    drive([&] { step(); }, [&] { return pending != nullptr; });
  }
  void accept(std::string_view private_data = "welcome") {
    server = pending->make_endpoint(*server_domain, {});
    pending.reset();
    server->set_handler(&server_side);
    server->accept(as_span(private_data));
    drive([&] { step(); }, [&] { return client_side.established || client_side.reason; });
  }
  void connect() {
    request();
    accept();
    REQUIRE(client_side.established == "welcome");
  }
  // The first message of the initiator, which frees the responder to send.
  void greet() {
    server->post_empty_receives(99, 1);
    client->post_send({.kind = SendKind::write_immediate, .immediate = 1});
    client->flush(Wait::no);
    drive([&] { step(); }, [&] { return !server_side.completions.empty(); });
    server_side.completions.clear();
  }

  void step() {
    const TimePoint now = Clock::now();
    listener->progress(now, [this](std::unique_ptr<ConnectRequest> r) { pending = std::move(r); });
    if (client && client->fd() >= 0) client->progress(Wait::no, now);
    if (server && server->fd() >= 0) server->progress(Wait::no, now);
  }
  template <typename Until>
  void until(Until condition) {
    drive(
        [&] {
          step();
          if (client) client->tick(Clock::now());
          if (server) server->tick(Clock::now());
        },
        condition);
  }

  std::unique_ptr<Fabric> client_fabric, server_fabric;
  std::unique_ptr<Domain> client_domain, server_domain;
  std::unique_ptr<Listener> listener;
  std::unique_ptr<ConnectRequest> pending;
  std::unique_ptr<Endpoint> client, server;
  Recorder client_side, server_side;
};

}  // namespace rtrsnbd::fabric
