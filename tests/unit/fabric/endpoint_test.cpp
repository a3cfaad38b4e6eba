// SPDX-License-Identifier: BSD-3-Clause
// Endpoints over real sockets: what goes wrong, who is told what, and that nothing hangs.
#include <sys/socket.h>

#include <atomic>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "tests/support/hex.h"
#include "tests/unit/fabric/fpdu.h"
#include "tests/unit/fabric/pair.h"
#include "tests/unit/fabric/raw_peer.h"

namespace rtrsnbd::fabric {

using soft::Bytes;
using soft::counting;
using soft::Message;
using soft::Write;
using wire::iwarp::Opcode;

namespace {

// Nobody listens there: bound, then given back.
Address closed_port() {
  const auto fabric = soft::make_fabric();
  return fabric->listen(any_loopback_port())->address();
}

SendRequest immediate(uint32_t value) {
  return {.kind = SendKind::write_immediate, .immediate = value};
}

}  // namespace

// Connecting.

TEST_CASE("nobody listens: refused") {
  for (const bool by_tick : {false, true}) {
    const auto fabric = soft::make_fabric();
    const auto domain = fabric->make_domain();
    Recorder side;
    const auto endpoint = fabric->connect(*domain, {closed_port(), {}}, {}, Clock::now());
    endpoint->set_handler(&side);
    CHECK(endpoint->wants_write());
    drive(
        [&] {
          if (by_tick) endpoint->tick(Clock::now());
          endpoint->progress(Wait::no, Clock::now());
        },
        [&] { return side.reason.has_value(); });
    CHECK(side.reason == DisconnectReason::refused);
    CHECK(endpoint->fd() == -1);
    CHECK_FALSE(endpoint->post_send(immediate(1)));
    endpoint->flush(Wait::yes);
    endpoint->tick(Clock::now());
    CHECK_FALSE(endpoint->progress(Wait::yes, Clock::now()));
  }
}

TEST_CASE("a source address that is not ours: unreachable, with the address in the text") {
  Pair pair;
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_addr.s_addr = htonl(0xc0000201);  // 192.0.2.1
  pair.client = pair.client_fabric->connect(
      *pair.client_domain,
      {pair.listener->address(), Address(reinterpret_cast<const sockaddr*>(&v4), sizeof v4)}, {},
      Clock::now());
  pair.client->set_handler(&pair.client_side);
  pair.until([&] { return pair.client_side.reason.has_value(); });
  CHECK(pair.client_side.reason == DisconnectReason::unreachable);
  CHECK(pair.client_side.detail.find("192.0.2.1") != std::string::npos);
}

TEST_CASE("a source address that is ours is used") {
  Pair pair;
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_addr.s_addr = htonl(0x7f000005);  // 127.0.0.5
  pair.client = pair.client_fabric->connect(
      *pair.client_domain,
      {pair.listener->address(), Address(reinterpret_cast<const sockaddr*>(&v4), sizeof v4)}, {},
      Clock::now());
  pair.client->set_handler(&pair.client_side);
  pair.until([&] { return pair.pending != nullptr; });
  CHECK(pair.pending->peer_address().host_text() == "127.0.0.5");
}

TEST_CASE("a request nobody answers: the initiator gives up at its limit") {
  Pair pair;
  pair.request();
  const TimePoint start = Clock::now();
  pair.client->tick(start + std::chrono::seconds(29));
  CHECK_FALSE(pair.client_side.reason);
  pair.client->tick(start + std::chrono::seconds(31));
  CHECK(pair.client_side.reason == DisconnectReason::unreachable);
}

TEST_CASE("a request dropped unanswered closes the connection") {
  Pair pair;
  pair.request();
  pair.pending.reset();
  pair.until([&] { return pair.client_side.reason.has_value(); });
  CHECK(pair.client_side.reason == DisconnectReason::connection_lost);
}

TEST_CASE("an endpoint that is never accepted closes after five seconds") {
  Pair pair;
  pair.request();
  pair.server = pair.pending->make_endpoint(*pair.server_domain, {});
  pair.server->set_handler(&pair.server_side);
  const TimePoint start = Clock::now();
  pair.server->tick(start);
  pair.server->tick(start + std::chrono::seconds(4));
  CHECK_FALSE(pair.server_side.reason);
  pair.server->tick(start + std::chrono::seconds(5));
  CHECK(pair.server_side.reason == DisconnectReason::closed_by_us);
  pair.until([&] { return pair.client_side.reason.has_value(); });
}

TEST_CASE("an initiator that leaves before it was accepted is noticed") {
  Pair pair;
  pair.request();
  pair.server = pair.pending->make_endpoint(*pair.server_domain, {});
  pair.server->set_handler(&pair.server_side);
  pair.client.reset();
  pair.until([&] { return pair.server_side.reason.has_value(); });
  CHECK(pair.server_side.reason == DisconnectReason::connection_lost);
}

TEST_CASE("a server that does not speak MPA is a protocol error") {
  RawListener raw;
  const auto fabric = soft::make_fabric();
  const auto domain = fabric->make_domain();
  for (const char* answer : {"HTTP/1.1 400 Bad Request\r\n\r\n", "MPA ID Req Frame....",
                             "MPA ID Rep Frame\x80\x01\0\0"}) {
    Recorder side;
    const auto endpoint = fabric->connect(*domain, {raw.address(), {}}, {}, Clock::now());
    endpoint->set_handler(&side);
    RawPeer peer = raw.accept();
    drive([&] { endpoint->progress(Wait::no, Clock::now()); }, [&] { return peer.readable(); });
    peer.send(Bytes(reinterpret_cast<const std::byte*>(answer),
                    reinterpret_cast<const std::byte*>(answer) + 20));
    drive([&] { endpoint->progress(Wait::no, Clock::now()); },
          [&] { return side.reason.has_value(); });
    CHECK(side.reason == DisconnectReason::protocol_error);
  }
}

TEST_CASE("a server that closes or resets within its reply is a lost connection") {
  RawListener raw;
  const auto fabric = soft::make_fabric();
  const auto domain = fabric->make_domain();
  for (const bool reset : {false, true})
    for (const ptrdiff_t length : {0, 1, 19, 20, 29}) {
      Recorder side;
      const auto endpoint = fabric->connect(*domain, {raw.address(), {}}, {}, Clock::now());
      endpoint->set_handler(&side);
      RawPeer peer = raw.accept();
      drive([&] { endpoint->progress(Wait::no, Clock::now()); }, [&] { return peer.readable(); });
      peer.receive();
      const Bytes reply = raw_reply(10);
      peer.send(Bytes(reply.begin(), reply.begin() + length));
      reset ? peer.reset() : peer.close();
      drive([&] { endpoint->progress(Wait::no, Clock::now()); },
            [&] { return side.reason.has_value(); });
      CHECK(side.reason == DisconnectReason::connection_lost);
      CHECK_FALSE(side.established);
    }
}

// Checksums.

TEST_CASE("checksums are used when either end wants them") {
  for (const bool client_wants : {false, true})
    for (const bool server_wants : {false, true}) {
      const auto policy = [](bool wants) { return wants ? soft::Crc::on : soft::Crc::off; };
      Pair pair({.crc = policy(client_wants)}, {.crc = policy(server_wants)});
      pair.connect();
      pair.greet();
    }
  Pair both_automatic;  // on one host: off
  both_automatic.connect();
  both_automatic.greet();
}

TEST_CASE("on one host there are no checksums unless wanted") {
  RawListener raw;
  for (const soft::Crc policy : {soft::Crc::automatic, soft::Crc::on, soft::Crc::off}) {
    const auto fabric = soft::make_fabric({.crc = policy});
    const auto domain = fabric->make_domain();
    Recorder side;
    const auto endpoint = fabric->connect(*domain, {raw.address(), {}}, {}, Clock::now());
    endpoint->set_handler(&side);
    RawPeer peer = raw.accept();
    drive([&] { endpoint->progress(Wait::no, Clock::now()); }, [&] { return peer.readable(); });
    const Bytes request = peer.receive();
    REQUIRE(request.size() == 20);
    CHECK(request[16] == (policy == soft::Crc::on ? std::byte{0x40} : std::byte{0}));
  }
}

// Who may speak first.

TEST_CASE("a responder keeps its messages until the initiator has spoken") {
  Pair pair;
  pair.connect();
  pair.client->post_empty_receives(1, 1);
  REQUIRE(pair.server->post_send(immediate(5)));
  pair.server->flush(Wait::no);
  pair.server->flush(Wait::yes);  // must not wait for what may not be sent
  for (int i = 0; i < 100; ++i) pair.step();
  CHECK(pair.client->counters().bytes_received == 20 + 7);  // the reply
  pair.greet();
  pair.until([&] { return !pair.client_side.completions.empty(); });
  CHECK(pair.client_side.completions[0].immediate == 5);
}

TEST_CASE("an initiator in peer-to-peer mode frees the responder by a write of nothing") {
  Pair pair;
  RawPeer peer(RawPeer::connect(pair.listener->address()));
  peer.send(test::hex("4d504120494420526571204672616d65 10020004 80048004"));
  pair.until([&] { return pair.pending != nullptr; });
  pair.server = pair.pending->make_endpoint(*pair.server_domain, {});
  pair.server->set_handler(&pair.server_side);
  pair.server->accept({});
  CHECK(test::to_hex(peer.receive_exactly(24)) ==
        test::to_hex(test::hex("4d504120494420526570204672616d65 10020004 80008000")));
  pair.server->post_send(immediate(0x80000000));
  pair.server->flush(Wait::no);
  for (int i = 0; i < 10; ++i) pair.step();
  CHECK_FALSE(peer.readable());
  peer.send(Write{0, 0, {}});
  pair.until([&] { return peer.readable(); });
  CHECK(peer.receive().size() == 32);
  CHECK(pair.server_side.completions.empty());
}

// Errors on the wire.

TEST_CASE("a broken rule costs the connection, and both ends know why") {
  Pair pair;
  pair.connect();
  pair.greet();
  const Bytes data = counting(5);
  const Segment segment{data.data(), data.size(), nullptr};
  pair.client->post_send({.kind = SendKind::write,
                          .rkey = 0x12345600,
                          .remote_address = 0,
                          .segments = {&segment, 1}});
  pair.client->flush(Wait::no);
  pair.until([&] { return pair.client_side.reason && pair.server_side.reason; });
  CHECK(pair.server_side.reason == DisconnectReason::protocol_error);
  CHECK(pair.server_side.detail.find("key 0x12345600") != std::string::npos);
  CHECK(pair.client_side.reason == DisconnectReason::remote_error);
  CHECK(pair.client_side.detail.find("invalid STag") != std::string::npos);
  CHECK_FALSE(pair.client->post_send(immediate(1)));
  CHECK_FALSE(pair.server->post_send(immediate(1)));
}

TEST_CASE("the Terminate gets through however much the offender goes on sending") {
  Pair pair;
  pair.connect();
  pair.greet();
  const Bytes data = counting(4096);
  const Segment segment{data.data(), data.size(), nullptr};
  for (int i = 0; i < 1000; ++i)
    pair.client->post_send(
        {.kind = SendKind::write, .rkey = 1, .remote_address = 0, .segments = {&segment, 1}});
  pair.client->flush(Wait::no);
  pair.until([&] { return pair.client_side.reason && pair.server_side.reason; });
  CHECK(pair.client_side.reason == DisconnectReason::remote_error);
}

TEST_CASE("what the responder had queued comes before its Terminate") {
  Pair pair;
  pair.connect();
  pair.greet();
  pair.client->post_empty_receives(3, 1);
  pair.server->post_send(immediate(9));
  pair.client->post_send({.kind = SendKind::send});
  pair.client->flush(Wait::no);
  pair.until([&] { return pair.client_side.reason.has_value(); });
  REQUIRE(pair.client_side.completions.size() == 1);
  CHECK(pair.client_side.reason == DisconnectReason::remote_error);
}

TEST_CASE(
    "a responder answers a bad first FPDU by Terminate, but bytes that are no FPDU by closing") {
  for (const bool fpdu : {true, false}) {
    Pair pair({.crc = soft::Crc::off});
    RawPeer peer(RawPeer::connect(pair.listener->address()));
    peer.send(raw_request(0));
    pair.until([&] { return pair.pending != nullptr; });
    pair.server = pair.pending->make_endpoint(*pair.server_domain, {});
    pair.server->set_handler(&pair.server_side);
    pair.server->accept({});
    CHECK(peer.receive_exactly(20).size() == 20);
    peer.send(fpdu ? Bytes(Write{0x100, 0, counting(4)}) : Bytes(20));
    pair.until([&] { return peer.readable(); });
    const Bytes answer = peer.receive();
    if (fpdu) {
      REQUIRE(answer.size() == 44);
      CHECK(answer[20] == std::byte{0x11});
    } else {
      CHECK(answer.empty());
    }
    peer.close();
    pair.until([&] { return pair.server_side.reason.has_value(); });
    CHECK(pair.server_side.reason == DisconnectReason::protocol_error);
  }
}

TEST_CASE("a peer that ends its stream in the middle is lost, at a boundary closed") {
  const Bytes fpdu = Write{0, 0, {}};
  for (const size_t length : {size_t{0}, size_t{1}, fpdu.size() - 1, fpdu.size()}) {
    Pair pair;
    RawPeer peer(RawPeer::connect(pair.listener->address()));
    peer.send(raw_request(0));
    pair.until([&] { return pair.pending != nullptr; });
    pair.server = pair.pending->make_endpoint(*pair.server_domain, {});
    pair.server->set_handler(&pair.server_side);
    pair.server->accept({});
    peer.receive_exactly(20);
    peer.send(Bytes(fpdu.begin(), fpdu.begin() + static_cast<ptrdiff_t>(length)));
    peer.close();
    pair.until([&] { return pair.server_side.reason.has_value(); });
    const bool boundary = length == 0 || length == fpdu.size();
    CHECK(pair.server_side.reason ==
          (boundary ? DisconnectReason::closed_by_peer : DisconnectReason::connection_lost));
  }
}

TEST_CASE("a peer that stops in the middle of an FPDU is given up after the silence limit") {
  Pair pair;
  RawPeer peer(RawPeer::connect(pair.listener->address()));
  peer.send(raw_request(0));
  pair.until([&] { return pair.pending != nullptr; });
  pair.server = pair.pending->make_endpoint(*pair.server_domain, {});
  pair.server->set_handler(&pair.server_side);
  pair.server->accept({});
  peer.receive_exactly(20);
  peer.send(Bytes(10, std::byte{0x41}));
  pair.until([&] { return pair.server->counters().bytes_received == 10; });
  const TimePoint start = Clock::now();
  pair.server->tick(start);
  pair.server->tick(start + std::chrono::seconds(24));
  CHECK_FALSE(pair.server_side.reason);
  pair.server->tick(start + std::chrono::seconds(26));
  CHECK(pair.server_side.reason == DisconnectReason::connection_lost);
}

TEST_CASE("a reset is a lost connection") {
  Pair pair;
  RawPeer peer(RawPeer::connect(pair.listener->address()));
  peer.send(raw_request(0));
  pair.until([&] { return pair.pending != nullptr; });
  pair.server = pair.pending->make_endpoint(*pair.server_domain, {});
  pair.server->set_handler(&pair.server_side);
  pair.server->accept({});
  peer.reset();
  pair.until([&] { return pair.server_side.reason.has_value(); });
  CHECK(pair.server_side.reason == DisconnectReason::connection_lost);
}

// Endings in every state.

TEST_CASE("disconnect and abort while connecting, asking, asked: told once, by tick as well") {
  for (const bool abort : {false, true})
    for (const bool by_tick : {false, true})
      for (const int state : {0, 1, 2}) {
        CAPTURE(abort);
        CAPTURE(state);
        Pair pair;
        if (state == 0) {
          pair.client = pair.client_fabric->connect(
              *pair.client_domain, {pair.listener->address(), {}}, {}, Clock::now());
          pair.client->set_handler(&pair.client_side);
        } else {
          pair.request();
        }
        if (state == 2) {
          pair.server = pair.pending->make_endpoint(*pair.server_domain, {});
          pair.server->set_handler(&pair.server_side);
        }
        Endpoint& endpoint = state == 2 ? *pair.server : *pair.client;
        Recorder& side = state == 2 ? pair.server_side : pair.client_side;
        if (abort)
          endpoint.abort();
        else
          endpoint.disconnect(Clock::now());
        endpoint.disconnect(Clock::now());
        CHECK_FALSE(side.reason);
        drive(
            [&] {
              by_tick ? endpoint.tick(Clock::now())
                      : void(endpoint.progress(Wait::no, Clock::now()));
            },
            [&] { return side.reason.has_value(); });
        CHECK(side.reason == DisconnectReason::closed_by_us);
        CHECK(endpoint.fd() == -1);
        endpoint.abort();
        endpoint.disconnect(Clock::now());
        endpoint.tick(Clock::now());
      }
}

TEST_CASE("disconnect sends what is queued first") {
  Pair pair;
  pair.connect();
  pair.server->post_empty_receives(1, 3);
  for (uint32_t i = 0; i < 3; ++i) pair.client->post_send(immediate(i));
  pair.client->disconnect(Clock::now());
  CHECK_FALSE(pair.client->post_send(immediate(9)));
  pair.until([&] { return pair.server_side.reason && pair.client_side.reason; });
  CHECK(pair.server_side.completions.size() == 3);
  CHECK(pair.server_side.reason == DisconnectReason::closed_by_peer);
  CHECK(pair.client_side.reason == DisconnectReason::closed_by_us);
}

TEST_CASE(
    "a peer that does not read delays an orderly close by a second, one that does not close by "
    "two") {
  for (const bool unsent : {false, true}) {
    Pair pair;
    pair.connect();
    const Bytes data(64 << 20);
    const Segment segment{data.data(), data.size(), nullptr};
    if (unsent)
      pair.client->post_send({.kind = SendKind::write, .rkey = 1, .segments = {&segment, 1}});
    const TimePoint start = Clock::now();
    pair.client->disconnect(start);
    const auto at = [&](int milliseconds) {
      pair.client->tick(start + std::chrono::milliseconds(milliseconds));
      return pair.client_side.reason.has_value();
    };
    CHECK_FALSE(at(900));
    CHECK(at(1100) == unsent);
    if (!unsent) CHECK(at(2100));
    CHECK(pair.client_side.reason == DisconnectReason::closed_by_us);
  }
}

TEST_CASE("both ends disconnect at once") {
  Pair pair;
  pair.connect();
  pair.client->disconnect(Clock::now());
  pair.server->disconnect(Clock::now());
  pair.until([&] { return pair.server_side.reason && pair.client_side.reason; });
  CHECK(pair.server_side.reason == DisconnectReason::closed_by_us);
  CHECK(pair.client_side.reason == DisconnectReason::closed_by_us);
}

TEST_CASE("disconnect from inside a completion stops the deliveries") {
  struct Leaver : Recorder {
    void on_completion(const Completion& completion) override {
      Recorder::on_completion(completion);
      endpoint->disconnect(Clock::now());
    }
    Endpoint* endpoint = nullptr;
  } leaver;
  Pair pair;
  pair.connect();
  leaver.endpoint = pair.server.get();
  pair.server->set_handler(&leaver);
  pair.server->post_empty_receives(1, 10);
  for (uint32_t i = 0; i < 10; ++i) pair.client->post_send(immediate(i));
  pair.client->flush(Wait::no);
  pair.until([&] { return leaver.reason && pair.client_side.reason; });
  CHECK(leaver.completions.size() == 1);
  CHECK(leaver.reason == DisconnectReason::closed_by_us);
  CHECK(pair.client_side.reason == DisconnectReason::closed_by_peer);
}

TEST_CASE("endpoints may be destroyed in any state") {
  for (int state = 0; state < 5; ++state) {
    Pair pair;
    if (state == 0)
      pair.client = pair.client_fabric->connect(*pair.client_domain, {pair.listener->address(), {}},
                                                {}, Clock::now());
    if (state >= 1) pair.request();
    if (state == 2) pair.server = pair.pending->make_endpoint(*pair.server_domain, {});
    if (state >= 3) pair.accept();
    if (state == 4) {
      pair.client->disconnect(Clock::now());
      pair.server->abort();
    }
    if (pair.client) pair.client.reset();
    pair.server.reset();
  }
}

TEST_CASE("a region may outlive its domain and fabric") {
  std::byte memory[8];
  std::unique_ptr<Region> region;
  {
    const auto fabric = soft::make_fabric();
    region = fabric->make_domain()->register_region(memory, sizeof memory, Access::remote_write);
  }
  CHECK(region->invalidate());
}

// Sockets that take little at a time.

TEST_CASE("a full socket: wants_write until the peer has read") {
  Pair pair;
  pair.connect();
  const int small = 4096;
  setsockopt(pair.client->fd(), SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
  Bytes target(8 << 20);
  const auto region =
      pair.server_domain->register_region(target.data(), target.size(), Access::remote_write);
  const Bytes data = counting(target.size(), 5);
  const Segment segment{data.data(), data.size(), nullptr};
  pair.server->post_empty_receives(1, 1);
  pair.client->post_send({.kind = SendKind::write_immediate,
                          .immediate = 3,
                          .rkey = region->rkey(),
                          .remote_address = region->remote_address(),
                          .segments = {&segment, 1}});
  pair.client->flush(Wait::no);
  CHECK(pair.client->wants_write());
  pair.until([&] { return !pair.server_side.completions.empty(); });
  CHECK_FALSE(pair.client->wants_write());
  CHECK(target == data);
}

TEST_CASE(
    "random messages both ways at once, in any size, with and without checksums, through small "
    "sockets") {
  const int seed = 5;
  for (const soft::Crc crc : {soft::Crc::off, soft::Crc::on})
    for (const int buffer_size : {0, 4096}) {
      std::mt19937 random(seed);
      Pair pair({.crc = crc});
      pair.connect();
      pair.greet();
      if (buffer_size != 0)
        for (Endpoint* endpoint : {pair.client.get(), pair.server.get()})
          setsockopt(endpoint->fd(), SOL_SOCKET, SO_SNDBUF, &buffer_size, sizeof buffer_size);
      struct Side {
        Endpoint& from;
        Endpoint& to;
        Domain& domain;
        Recorder& recorder;
        Bytes target = Bytes(300000);
        std::unique_ptr<Region> region =
            domain.register_region(target.data(), target.size(), Access::remote_write);
        std::vector<Bytes> payloads{}, buffers{};
        std::vector<uint32_t> immediates{};
        Bytes expected = Bytes(300000);
      };
      Side sides[] = {{*pair.client, *pair.server, *pair.server_domain, pair.server_side},
                      {*pair.server, *pair.client, *pair.client_domain, pair.client_side}};
      constexpr int rounds = 60;
      for (Side& side : sides) {
        side.payloads.reserve(rounds);
        side.buffers.reserve(rounds);
      }
      for (int round = 0; round < rounds; ++round)
        for (Side& side : sides) {
          const size_t length = random() % 4 == 0 ? random() % 200000 : random() % 5000;
          side.payloads.push_back(counting(length, static_cast<unsigned>(random())));
          const Bytes& payload = side.payloads.back();
          const size_t half = length / 2;
          const Segment segments[] = {{payload.data(), half, nullptr},
                                      {payload.data() + half, length - half, nullptr}};
          SendRequest request{.immediate = static_cast<uint32_t>(random()), .segments = segments};
          side.buffers.emplace_back();
          if (random() % 2 == 0) {
            request.kind = SendKind::write_immediate;
            request.rkey = side.region->rkey();
            const size_t offset = random() % (side.target.size() - length);
            request.remote_address = side.region->remote_address() + offset;
            std::copy(payload.begin(), payload.end(),
                      side.expected.begin() + static_cast<ptrdiff_t>(offset));
            side.to.post_empty_receives(static_cast<uint64_t>(round), 1);
          } else {
            request.kind = SendKind::send_immediate;
            side.buffers.back().resize(length);
            side.to.post_receive(static_cast<uint64_t>(round), side.buffers.back().data(), length);
          }
          side.immediates.push_back(request.immediate);
          REQUIRE(side.from.post_send(request));
          side.from.flush(Wait::no);
          if (random() % 3 == 0) pair.step();
        }
      pair.until([&] {
        if (pair.client_side.reason || pair.server_side.reason) FAIL("disconnected");
        return sides[0].recorder.completions.size() == rounds &&
               sides[1].recorder.completions.size() == rounds;
      });
      for (const Side& side : sides) {
        CHECK(side.target == side.expected);
        for (size_t i = 0; i < rounds; ++i) {
          const Completion& completion = side.recorder.completions[i];
          CHECK(completion.id == i);
          CHECK(completion.immediate == side.immediates[i]);
          CHECK(completion.byte_count == side.buffers[i].size());
          if (!side.buffers[i].empty()) CHECK(side.buffers[i] == side.payloads[i]);
        }
      }
    }
}

TEST_CASE("a chain of small messages leaves in one call and arrives in one") {
  Pair pair;
  pair.connect();
  pair.greet();
  const Endpoint::Counters before = pair.client->counters();
  const Endpoint::Counters server_before = pair.server->counters();
  pair.server->post_empty_receives(1, 32);
  for (uint32_t i = 0; i < 32; ++i) pair.client->post_send(immediate(i));
  pair.client->flush(Wait::no);
  CHECK(pair.client->counters().send_calls == before.send_calls + 1);
  CHECK(pair.client->counters().messages_sent == before.messages_sent + 32);
  // All of it is there on loopback; one read is enough, and it knows that there is no more.
  CHECK_FALSE(pair.server->progress(Wait::no, Clock::now()));
  CHECK(pair.server_side.completions.size() == 32);
  CHECK(pair.server->counters().receive_calls == server_before.receive_calls + 1);
}

// Threads.

TEST_CASE(
    "many threads post and flush while one receives: nothing is lost, each thread's order is "
    "kept") {
  Pair pair;
  pair.connect();
  pair.greet();
  constexpr uint32_t threads = 4, each = 2000;
  // The server echoes every immediate.
  struct Echo : Recorder {
    void on_completion(const Completion& completion) override {
      endpoint->post_empty_receives(1, 1);
      endpoint->post_send({.kind = SendKind::write_immediate, .immediate = completion.immediate});
      ++count;
    }
    Endpoint* endpoint = nullptr;
    uint32_t count = 0;
  } echo;
  echo.endpoint = pair.server.get();
  pair.server->set_handler(&echo);
  pair.server->post_empty_receives(1, threads * each);
  pair.client->post_empty_receives(1, threads * each);
  std::thread server([&pair, &echo] {
    while (!echo.reason) {
      pair.server->progress(Wait::yes, Clock::now());
      pair.server->flush(Wait::yes);
    }
  });
  std::vector<std::thread> posters;
  for (uint32_t t = 0; t < threads; ++t)
    posters.emplace_back([&pair, t] {
      for (uint32_t i = 0; i < each; ++i) {
        if (!pair.client->post_send({.kind = SendKind::write_immediate, .immediate = t << 16 | i}))
          std::abort();
        pair.client->flush(i % 2 == 0 ? Wait::yes : Wait::no);
      }
      pair.client->flush(Wait::yes);
    });
  while (pair.client_side.completions.size() < threads * each) {
    if (pair.client_side.reason) FAIL("disconnected");
    pair.client->progress(Wait::yes, Clock::now());
  }
  for (auto& poster : posters) poster.join();
  uint32_t next[threads] = {};
  for (const Completion& completion : pair.client_side.completions)
    CHECK(next[completion.immediate >> 16]++ == (completion.immediate & 0xffff));
  pair.client->abort();
  server.join();
  CHECK(echo.reason == DisconnectReason::closed_by_peer);
}

TEST_CASE("a sender is not kept sending for the others once its own is sent") {
  Pair pair;
  pair.connect();
  pair.greet();
  const Bytes data = counting(64 << 20, 5);
  Bytes target(data.size());
  const auto region =
      pair.server_domain->register_region(target.data(), target.size(), Access::remote_write);
  const auto send = [&](size_t length) {
    const Segment segment{data.data(), length, nullptr};
    pair.client->post_send({.kind = SendKind::write,
                            .rkey = region->rkey(),
                            .remote_address = region->remote_address(),
                            .segments = {&segment, 1}});
    pair.client->flush(Wait::yes);
  };
  // The server does not read yet: one fills the socket and sleeps, the other waits behind it.
  constexpr size_t own = 12 << 20;
  std::atomic<bool> returned{false};
  std::thread sender([&] {
    send(own);
    returned = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  std::thread other([&] { send(data.size()); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  REQUIRE_FALSE(returned);
  uint64_t received = 0;
  while (pair.server->counters().bytes_received < own + data.size()) {
    pair.server->progress(Wait::no, Clock::now());
    if (!returned) received = pair.server->counters().bytes_received;
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  sender.join();
  other.join();
  CHECK(received < own + data.size() / 2);
}

TEST_CASE("abort wakes a receiver that sleeps and a sender that waits") {
  Pair pair;
  pair.connect();
  const Bytes data(64 << 20);
  const Segment segment{data.data(), data.size(), nullptr};
  pair.client->post_send({.kind = SendKind::write, .rkey = 1, .segments = {&segment, 1}});
  std::thread sender([&pair] { pair.client->flush(Wait::yes); });
  std::thread second([&pair] { pair.client->flush(Wait::yes); });
  std::thread receiver([&pair] {
    while (!pair.client_side.reason) pair.client->progress(Wait::yes, Clock::now());
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  pair.client->abort();
  sender.join();
  second.join();
  receiver.join();
  CHECK(pair.client_side.reason == DisconnectReason::closed_by_us);
}

TEST_CASE(
    "abort wakes a receiver into whose memory the kernel may be writing, then the memory is "
    "quiet") {
  Pair pair({.crc = soft::Crc::off});
  pair.connect();
  pair.greet();
  auto memory = std::make_unique<std::byte[]>(1 << 20);
  const auto region =
      pair.client_domain->register_region(memory.get(), 1 << 20, Access::remote_write);
  // Half a write, by a peer that then sleeps: sent past the endpoint.
  const Bytes fpdu = Write{region->rkey(), region->remote_address(), counting(60000)};
  REQUIRE(::send(pair.server->fd(), fpdu.data(), 30000, 0) == 30000);
  std::thread receiver([&pair] {
    while (!pair.client_side.reason) pair.client->progress(Wait::yes, Clock::now());
  });
  while (pair.client->counters().bytes_received < 30000) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_FALSE(region->invalidate());
  pair.client->abort();
  receiver.join();
  CHECK(region->invalidate());
  CHECK(pair.client_side.reason == DisconnectReason::closed_by_us);
  memory.reset();
}

TEST_CASE("disconnect by another thread ends a sleeping receiver when the peer closes") {
  Pair pair;
  pair.connect();
  pair.greet();
  std::thread receiver([&pair] {
    while (!pair.client_side.reason) pair.client->progress(Wait::yes, Clock::now());
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  pair.client->disconnect(Clock::now());
  drive([&] { pair.server->progress(Wait::no, Clock::now()); },
        [&] { return pair.server_side.reason.has_value(); });
  receiver.join();
  CHECK(pair.client_side.reason == DisconnectReason::closed_by_us);
}

TEST_CASE("a lone receiver sees to its timers: it wakes up twice a second") {
  Pair pair;
  pair.connect();
  const TimePoint start = Clock::now();
  CHECK_FALSE(pair.client->progress(Wait::yes, start));
  const auto slept = Clock::now() - start;
  CHECK(slept >= std::chrono::milliseconds(400));
  CHECK(slept < std::chrono::seconds(5));
}

TEST_CASE("regions are revoked and rebound while writes to them arrive on several connections") {
  // Two connections of one domain; the owner hands out a region, takes it back and frees its
  // memory.
  const auto fabric = soft::make_fabric();
  const auto domain = fabric->make_domain();
  const auto peer_domain = fabric->make_domain();
  const auto listener = fabric->listen(any_loopback_port());
  auto memory = std::make_unique<std::byte[]>(100000);
  const auto region = domain->register_region(memory.get(), 100000, Access::remote_write);
  std::atomic<uint32_t> key{region->rkey()};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 random(static_cast<unsigned>(i));
      const Bytes data = counting(100000);
      while (!stop) {
        // Each round ends with the first write under a dead key.
        Recorder from, to;
        std::unique_ptr<ConnectRequest> request;
        static std::mutex accepting;
        std::unique_ptr<Endpoint> client, server;
        {
          const std::lock_guard lock(accepting);
          client = fabric->connect(*peer_domain, {listener->address(), {}}, {}, Clock::now());
          client->set_handler(&from);
          while (!request) {
            client->progress(Wait::no, Clock::now());
            listener->progress(Clock::now(),
                               [&](std::unique_ptr<ConnectRequest> r) { request = std::move(r); });
          }
        }
        server = request->make_endpoint(*domain, {});
        server->set_handler(&to);
        server->accept({});
        while (!from.established) client->progress(Wait::no, Clock::now());
        while (!to.reason && !stop) {
          // Each connection into a half of its own: what two write at once is nobody's.
          const Segment segment{data.data(), random() % 50000, nullptr};
          client->post_send(
              {.kind = SendKind::write,
               .rkey = key,
               .remote_address = region->remote_address() + static_cast<uint64_t>(i) * 50000,
               .segments = {&segment, 1}});
          client->flush(Wait::no);
          server->progress(Wait::no, Clock::now());
          client->progress(Wait::no, Clock::now());
          server->tick(Clock::now());
        }
      }
    });
  }
  int quiet = 0;
  for (int round = 0; round < 100; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (!region->invalidate()) continue;
    ++quiet;
    memory = std::make_unique<std::byte[]>(100000);  // frees the old: a late write would be seen
    region->rebind(memory.get(), 100000);
    key = region->rkey();
  }
  stop = true;
  for (auto& thread : threads) thread.join();
  CHECK(quiet > 0);
}

}  // namespace rtrsnbd::fabric
