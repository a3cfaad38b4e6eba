// SPDX-License-Identifier: BSD-3-Clause
#include <numeric>
#include <random>
#include <thread>

#include "tests/unit/fabric/pair.h"

namespace rtrsnbd::fabric {

TEST_CASE("private data travels with request and accept") {
  Pair pair;
  pair.request("ask");
  CHECK(as_text(pair.pending->private_data()) == "ask");
  CHECK(pair.pending->peer_address().is_loopback());
  pair.accept("granted");
  CHECK(pair.client_side.established == "granted");
  CHECK(pair.client->local_address().text() == pair.server->peer_address().text());
}

TEST_CASE("a rejected connection delivers the reason and nothing else") {
  Pair pair;
  pair.request("ask");
  pair.pending->reject(as_span("no"));
  pair.pending.reset();
  pair.until([&] { return pair.client_side.rejected.has_value(); });
  CHECK(pair.client_side.rejected == "no");
  CHECK_FALSE(pair.client_side.reason);
  CHECK(pair.client->fd() == -1);
}

TEST_CASE("every verb arrives as its completion") {
  for (const soft::Crc crc : {soft::Crc::off, soft::Crc::on}) {
    Pair pair({.crc = crc});
    pair.connect();

    std::vector<std::byte> target(200000);
    const auto region =
        pair.client_domain->register_region(target.data(), target.size(), Access::remote_write);
    std::byte buffer[64] = {};
    pair.server->post_receive(7, buffer, sizeof buffer);
    pair.server->post_empty_receives(8, 2);
    const std::string text = "RTRS info";
    const Segment segment{as_span(text).data(), text.size(), nullptr};
    REQUIRE(pair.client->post_send({.kind = SendKind::send, .segments = {&segment, 1}}));
    pair.client->flush(Wait::no);
    pair.until([&] { return pair.server_side.completions.size() == 1; });
    CHECK(pair.server_side.completions[0].id == 7);
    CHECK(pair.server_side.completions[0].byte_count == text.size());
    CHECK(std::memcmp(buffer, text.data(), text.size()) == 0);

    // Write; send with invalidate; immediate: the chain of a read's answer.
    std::vector<std::byte> data(200000);
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 7 + (i >> 8));
    const Segment big{data.data(), data.size(), nullptr};
    std::byte reply[8] = {};
    pair.client->post_empty_receives(1, 2);
    pair.client->post_receive(2, reply, sizeof reply);
    const uint32_t key = region->rkey();
    pair.server->post_send({.kind = SendKind::write,
                            .rkey = key,
                            .remote_address = region->remote_address(),
                            .segments = {&big, 1}});
    pair.server->post_send({.kind = SendKind::send_invalidate, .invalidate_rkey = key});
    pair.server->post_send({.kind = SendKind::write_immediate, .immediate = 0x20000005});
    const Segment small{as_span("12345678").data(), 8, nullptr};
    pair.server->post_send({.kind = SendKind::send_immediate,
                            .copy = true,
                            .immediate = 0xfeedbeef,
                            .segments = {&small, 1}});
    pair.server->flush(Wait::no);
    pair.until([&] { return pair.client_side.completions.size() == 3; });
    CHECK(target == data);
    CHECK(pair.client_side.completions[0].invalidated_rkey == key);
    CHECK(pair.client_side.completions[0].id == 1);
    CHECK(pair.client_side.completions[1].has_immediate);
    CHECK(pair.client_side.completions[1].immediate == 0x20000005);
    CHECK(pair.client_side.completions[2].immediate == 0xfeedbeef);
    CHECK(pair.client_side.completions[2].byte_count == 8);
    CHECK(std::memcmp(reply, "12345678", 8) == 0);

    pair.client->disconnect(Clock::now());
    pair.until([&] { return pair.client_side.reason && pair.server_side.reason; });
    CHECK(pair.client_side.reason == DisconnectReason::closed_by_us);
    CHECK(pair.server_side.reason == DisconnectReason::closed_by_peer);
  }
}

}  // namespace rtrsnbd::fabric
