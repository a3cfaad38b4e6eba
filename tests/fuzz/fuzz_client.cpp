// SPDX-License-Identifier: BSD-3-Clause
// The client's connection state machine against a server that does whatever the input says, at
// every stage. Whatever happens, each request that was accepted is completed exactly once, and the
// path closes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>

#include "protocol/rnbd/client.h"
#include "tests/fuzz/input.h"
#include "tests/support/scripted_server.h"

using namespace rtrsnbd;
using test::expect;
using test::FuzzInput;

namespace {

struct Pending {
  test::Request request;
  std::vector<std::byte> data = std::vector<std::byte>(1024);
  wire::Io io;
  uint32_t permit = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  const uint8_t mode = input.byte();
  test::MemoryFabricOptions options;
  options.rebind = (mode & 1) == 0;
  options.any_local = (mode & 2) == 0;
  test::ScriptedServer world(options);
  if ((mode & 4) != 0) world.response.flags = wire::connect_flag_new_rkey;
  if ((mode & 8) != 0) {
    const auto raw = input.bytes(sizeof world.response);
    std::memcpy(&world.response, raw.data(), raw.size());
    // A depth and size that fit are allocated by design; keep the fuzzer's memory within bounds.
    if (world.response.queue_depth > 64) world.response.queue_depth = 64;
    if (world.response.max_io_size > 65536 && (mode & 16) != 0) world.response.max_io_size = 65536;
    if (!options.rebind && world.response.max_io_size > 65536) world.response.max_io_size = 65536;
  }
  if ((mode & 32) != 0) world.reject_with = input.bytes(input.byte());
  world.make_path();
  std::deque<Pending> requests;  // stable addresses

  for (int step = 0; step < 200 && !input.empty(); ++step) {
    const uint8_t what = input.byte();
    test::Peer* const peer =
        world.peers.empty() ? nullptr : world.peers[input.byte() % world.peers.size()].get();
    switch (what % 12) {
      case 0:
        world.steps(8);
        break;
      case 1:
        if (peer != nullptr) world.peers[0]->send(fabric::SendKind::send, 0, world.info_response());
        break;
      case 2:
        if (peer != nullptr) peer->send(fabric::SendKind::send, 0, input.bytes(input.byte()));
        break;
      case 3:
        if (peer != nullptr) peer->answer(input.byte() % 8, input.byte());
        break;
      case 4:
        if (peer != nullptr) peer->answer_with_key(input.byte() % 8, input.word(), input.byte());
        break;
      case 5:
        if (peer != nullptr) {
          const auto kind = static_cast<fabric::SendKind>(input.byte() % 5);
          const uint32_t immediate = input.word();
          const auto payload =
              input.bytes(kind == fabric::SendKind::send_invalidate ? 0 : input.byte() % 64);
          peer->send(kind, immediate, payload, input.byte(), input.byte());
        }
        break;
      case 6: {
        if (world.path->state() != rtrs::ClientPath::State::connected) break;
        const uint32_t permit = input.byte() % world.path->geometry().queue_depth;
        bool taken = false;  // the permit's holder alone may use it
        for (const auto& other : requests)
          taken = taken || (other.permit == permit && other.request.done == 0);
        if (taken) break;
        auto& pending = requests.emplace_back();
        pending.permit = permit;
        const uint8_t form = input.byte();
        pending.io = rnbd::make_io(0, (form & 1) != 0 ? wire::RnbdOp::write : wire::RnbdOp::read, 0,
                                   1024, {});
        pending.request.user = wire::bytes_of(pending.io);
        pending.request.is_read = (form & 1) == 0;
        pending.request.data_length =
            (form & 2) != 0 ? 0 : std::min<uint32_t>(1024, world.path->geometry().max_io_size);
        pending.request.read_data = pending.data.data();
        pending.request.write_data = pending.data.data();
        const uint32_t cid = form / 4 % world.path->connection_count();
        if (!world.path->submit(cid, permit, pending.request)) {
          expect(pending.request.done == 0);
          requests.pop_back();
        } else {
          world.path->endpoint(cid).flush(fabric::Wait::no);
        }
        break;
      }
      case 7:  // data for a read, at the place its descriptor names
        if (peer != nullptr && !requests.empty() &&
            world.path->geometry().chunk_size() == test::ScriptedServer::chunk_size) {
          const uint32_t permit = requests.back().permit % test::ScriptedServer::depth;
          const auto descriptor = world.descriptor_at(permit, 1024 + sizeof(wire::Io));
          peer->send(fabric::SendKind::write, 0, input.bytes(input.byte()),
                     descriptor.address + input.byte() % 8, descriptor.key);
        }
        break;
      case 8:
        if (peer != nullptr)
          (input.byte() & 1) != 0 ? peer->endpoint->abort() : peer->endpoint->disconnect(world.now);
        break;
      case 9:
        world.now += std::chrono::milliseconds(input.byte() * 100);
        world.path->tick(world.now);
        break;
      case 10:
        if (world.path->connection_count() != 0) {
          world.path->endpoint(input.byte() % world.path->connection_count())
              .progress(fabric::Wait::no, world.now);
        }
        break;
      case 11:
        world.fabric.set_placement_in_progress((input.byte() & 1) != 0);
        break;
      default:
        break;
    }
    for (const auto& pending : requests) expect(pending.request.done <= 1);
  }
  world.path->fail("the end");
  world.steps(4);
  expect(world.path->closed());
  for (const auto& pending : requests) expect(pending.request.done == 1);
  return 0;
}
