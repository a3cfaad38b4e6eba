// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/soft/receiver.h"

#include <doctest/doctest.h>

#include <functional>
#include <memory>
#include <random>

#include "protocol/fabric/soft/send_queue.h"
#include "tests/support/hex.h"
#include "tests/unit/fabric/fpdu.h"

namespace rtrsnbd::fabric::soft {

namespace error = wire::iwarp::error;
using test::hex;
using test::to_hex;
using wire::iwarp::Opcode;
using wire::iwarp::TerminateError;
using Status = Receiver::Status;

namespace {

constexpr DomainId ours = 1;
constexpr DomainId foreign = 2;

bool all_zero(const std::byte* bytes, size_t length) {
  return std::all_of(bytes, bytes + length, [](std::byte byte) { return byte == std::byte{0}; });
}

struct Fixture {
  explicit Fixture(bool crc = true) : receiver(keys, ours, receives, crc) {}

  Status take(const Bytes& bytes) {
    return feed(receiver, sink, bytes, [](size_t offered) { return offered; });
  }
  Status take_by(size_t step, const Bytes& bytes) {
    return feed(receiver, sink, bytes, [step](size_t) { return step; });
  }
  // Feeds what must fail; returns the error.
  TerminateError refused(const Bytes& bytes) {
    REQUIRE(take(bytes) == Status::failed);
    REQUIRE(receiver.begin().empty());
    return receiver.failure().error;
  }
  bool has_header() const { return receiver.failure().header_size > 0; }

  KeyTable keys;
  std::unique_ptr<std::byte[]> memory = std::make_unique<std::byte[]>(300000);
  uint32_t index = keys.allocate(ours, memory.get(), 300000, Access::remote_write);
  uint32_t key = keys.key(index);
  uint64_t base = KeyTable::base_offset(index);
  ReceiveQueue receives;
  Collector sink;
  Receiver receiver;
};

struct WithoutCrc : Fixture {
  WithoutCrc() : Fixture(false) {}
};

}  // namespace

// What must work.

TEST_CASE_FIXTURE(Fixture, "a write lands where it should and completes nothing") {
  CHECK(take(Write{key, base + 100, counting(37)}) == Status::running);
  CHECK(std::memcmp(memory.get() + 100, counting(37).data(), 37) == 0);
  CHECK(sink.completions.empty());
  CHECK(receiver.messages() == 1);
  CHECK_FALSE(receiver.inside_fpdu());
}

TEST_CASE_FIXTURE(WithoutCrc, "the kernel's Send is delivered into the posted receive") {
  std::byte buffer[16];
  receives.post(5, buffer, sizeof buffer);
  take(hex("0022414300000000000000000000000100000000000055aa9dfb0420a12b8f0000000fa000000000"));
  REQUIRE(sink.completions.size() == 1);
  CHECK(sink.completions[0].id == 5);
  CHECK(sink.completions[0].byte_count == 16);
  CHECK_FALSE(sink.completions[0].has_immediate);
  CHECK(to_hex(buffer) == "00 00 55 aa 9d fb 04 20 a1 2b 8f 00 00 00 0f a0");
}

TEST_CASE_FIXTURE(Fixture, "the kernel's Send with checksum is delivered") {
  std::byte buffer[16] = {std::byte{1}};
  receives.post(5, buffer, sizeof buffer);
  CHECK(take(hex(
            "00224143000000000000000000000001000000000000000000000000000000000000000084609a12")) ==
        Status::running);
  CHECK(sink.completions.size() == 1);
  CHECK(buffer[0] == std::byte{0});
}

TEST_CASE_FIXTURE(
    Fixture,
    "immediates, sends and heartbeats complete in order, with or without solicited event") {
  std::byte buffer[64];
  receives.post_empty(1, 1);
  receives.post(2, buffer, sizeof buffer);
  receives.post_empty(3, 2);
  Bytes stream =
      hex("001a414800000000000000000000000100000000000010200000000064ea2d14"
          "001b4143000000000000000000000002000000005254525320696e666f000000229bba80"
          "001a4148000000000000000000000003000000008000000000000000a3892c9a"
          "001a414900000000000000000000000400000000800000000000000005eb2626");
  CHECK(take(stream) == Status::running);
  REQUIRE(sink.completions.size() == 4);
  CHECK(sink.completions[0].id == 1);
  CHECK(sink.completions[0].immediate == 0x1020);
  CHECK(sink.completions[0].byte_count == 0);
  CHECK(sink.completions[1].id == 2);
  CHECK(sink.completions[1].byte_count == 9);
  CHECK(std::memcmp(buffer, "RTRS info", 9) == 0);
  CHECK(sink.completions[2].immediate == 0x80000000);
  CHECK(sink.completions[3].immediate == 0x80000000);
  CHECK(sink.completions[3].id == 3);
}

TEST_CASE_FIXTURE(Fixture, "an immediate leaves the buffer of its receive alone") {
  std::byte buffer[8] = {std::byte{7}};
  receives.post(1, buffer, sizeof buffer);
  take(Message{Opcode::immediate_data, 1, hex("0000102000000000")});
  REQUIRE(sink.completions.size() == 1);
  CHECK(sink.completions[0].byte_count == 0);
  CHECK(buffer[0] == std::byte{7});
}

TEST_CASE_FIXTURE(Fixture, "Send with Immediate brings both in one completion") {
  std::byte buffer[8];
  receives.post(1, buffer, sizeof buffer);
  Bytes fpdu = hex("001a414c2000000500000000000000010000000004000500082a0100");
  CHECK(take(sealed(fpdu)) == Status::running);
  REQUIRE(sink.completions.size() == 1);
  CHECK(sink.completions[0].has_immediate);
  CHECK(sink.completions[0].immediate == 0x20000005);
  CHECK(sink.completions[0].byte_count == 8);
  CHECK(to_hex(buffer) == "04 00 05 00 08 2a 01 00");
}

TEST_CASE_FIXTURE(
    Fixture, "the key is dead when Send with Invalidate completes, whichever opcode of the two") {
  for (const Opcode opcode : {Opcode::send_invalidate, Opcode::send_solicited_invalidate}) {
    const uint32_t number = opcode == Opcode::send_invalidate ? 1 : 2;
    key = keys.renew(index);
    receives.post_empty(1, 1);
    take(Message{.opcode = opcode, .number = number, .payload = {}, .upper_layer = key});
    REQUIRE(sink.completions.size() == number);
    CHECK(sink.completions.back().invalidated_rkey == key);
  }
  CHECK(refused(Write{key, base, counting(1)}) == error::invalid_stag);
}

TEST_CASE_FIXTURE(Fixture, "an already invalid key may be invalidated again") {
  keys.invalidate(index);
  receives.post_empty(1, 1);
  CHECK(take(Message{.opcode = Opcode::send_invalidate, .payload = {}, .upper_layer = key}) ==
        Status::running);
  CHECK(sink.completions.size() == 1);
}

TEST_CASE_FIXTURE(Fixture,
                  "a message in segments is one completion, with the first segment's immediate") {
  std::byte buffer[30];
  receives.post(1, buffer, sizeof buffer);
  const Bytes data = counting(30);
  take(Message{.opcode = Opcode::send_immediate,
               .payload = Bytes(data.begin(), data.begin() + 10),
               .last = false,
               .upper_layer = 77});
  CHECK(receiver.inside_message());
  take(Message{.opcode = Opcode::send_immediate,
               .payload = Bytes(data.begin() + 10, data.begin() + 11),
               .last = false,
               .offset = 10,
               .upper_layer = 78});
  CHECK(sink.completions.empty());
  take(Message{.opcode = Opcode::send_immediate,
               .payload = Bytes(data.begin() + 11, data.end()),
               .offset = 11,
               .upper_layer = 79});
  REQUIRE(sink.completions.size() == 1);
  CHECK(sink.completions[0].byte_count == 30);
  CHECK(sink.completions[0].immediate == 77);
  CHECK(std::memcmp(buffer, data.data(), 30) == 0);
  CHECK_FALSE(receiver.inside_message());
}

TEST_CASE_FIXTURE(Fixture, "a write of nothing is silent whatever it names") {
  CHECK(take(Write{0xdeadbeef, 0x1234, {}}) == Status::running);
  CHECK(take(Write{0, UINT64_MAX, {}}) == Status::running);
  CHECK(receiver.fpdus() == 2);
}

TEST_CASE_FIXTURE(Fixture, "reserved bits are not looked at") {
  Bytes fpdu = Write{key, base, counting(4)}.unsealed();
  fpdu[2] |= std::byte{0x3c};
  fpdu[3] |= std::byte{0x30};
  CHECK(take(sealed(fpdu)) == Status::running);
  receives.post_empty(1, 1);
  CHECK(take(Message{.opcode = Opcode::immediate_data,
                     .payload = hex("00000001ffffffff"),
                     .upper_layer = 0x55}) == Status::running);
  CHECK(sink.completions.at(0).immediate == 1);
}

TEST_CASE_FIXTURE(WithoutCrc,
                  "without checksums the trailer may hold anything, and pad always may") {
  Bytes fpdu = Write{key, base, counting(5)};
  fpdu[fpdu.size() - 1] ^= std::byte{0xff};
  fpdu[fpdu.size() - 5] = std::byte{0xee};
  CHECK(take(fpdu) == Status::running);
}

TEST_CASE_FIXTURE(Fixture, "the largest FPDU of either kind fits") {
  const Bytes data = counting(65535 - 18);
  Bytes buffer(data.size());
  receives.post(1, buffer.data(), buffer.size());
  CHECK(take(Message{.payload = data}) == Status::running);
  CHECK(buffer == data);
  const Bytes more = counting(65535 - 14, 3);
  for (const size_t step : {1u, 1000u, 65536u}) {
    std::fill_n(memory.get(), more.size(), std::byte{0});
    CHECK(take_by(step, Write{key, base, more}) == Status::running);
    CHECK(std::memcmp(memory.get(), more.data(), more.size()) == 0);
  }
}

TEST_CASE_FIXTURE(Fixture, "the sink's no stops the receiver in the middle of what was read") {
  receives.post_empty(1, 3);
  sink.stop_after = 2;
  Bytes stream;
  for (uint32_t i = 1; i <= 3; ++i) stream += Message{Opcode::immediate_data, i, Bytes(8)};
  CHECK(take(stream) == Status::stopped);
  CHECK(sink.completions.size() == 2);
  CHECK(receiver.begin().empty());
}

// Where large writes go.

TEST_CASE_FIXTURE(Fixture, "what is missing of a large write is read straight into its target") {
  const Bytes data = counting(60000);
  const Bytes fpdu = Write{key, base + 8, data};
  take(Bytes(fpdu.begin(), fpdu.begin() + 1016));
  const auto vectors = receiver.begin();
  REQUIRE(vectors.size() == 3);
  CHECK(vectors[0].iov_base == memory.get() + 8 + 1000);
  CHECK(vectors[0].iov_len == 59000);
  CHECK(vectors[1].iov_len == 4);
  receiver.end(0, sink);
  CHECK(take(Bytes(fpdu.begin() + 1016, fpdu.end())) == Status::running);
  CHECK(std::memcmp(memory.get() + 8, data.data(), data.size()) == 0);
  CHECK_FALSE(receiver.inside_fpdu());
}

TEST_CASE_FIXTURE(Fixture, "after a large write little is read ahead, after small ones much") {
  const auto room = [this] {
    const auto vectors = receiver.begin();
    const size_t length = vectors.back().iov_len;
    receiver.end(0, sink);
    return length;
  };
  take(Write{key, base, counting(60000)});
  CHECK(room() <= 4096);
  Bytes many;
  for (int i = 0; i < 100; ++i) many += Write{key, base, counting(4096)};
  take(many);
  CHECK(room() >= 65536);
}

TEST_CASE_FIXTURE(Fixture, "a key revoked while a large write pauses is not written any more") {
  for (const bool renewed : {false, true}) {
    CAPTURE(renewed);
    Fixture f;
    const Bytes data(60000, std::byte{0xaa});
    const Bytes fpdu = Write{f.key, f.base, data};
    f.take(Bytes(fpdu.begin(), fpdu.begin() + 20000));
    CHECK(f.keys.invalidate(f.index));  // nobody is placing: it is quiet at once
    if (renewed) f.keys.renew(f.index);
    std::fill_n(f.memory.get(), 60000, std::byte{0});
    CHECK(f.receiver.begin().empty());
    CHECK(f.receiver.status() == Status::failed);
    CHECK(f.receiver.failure().error == error::invalid_stag);
    CHECK(f.has_header());
    CHECK(all_zero(f.memory.get(), 60000));
  }
}

TEST_CASE_FIXTURE(Fixture,
                  "a key revoked while the kernel may be placing is reported as not quiet") {
  const Bytes fpdu = Write{key, base, counting(60000)};
  take(Bytes(fpdu.begin(), fpdu.begin() + 20000));
  CHECK_FALSE(receiver.begin().empty());
  CHECK_FALSE(keys.invalidate(index));
  receiver.end(0, sink);
  CHECK(keys.invalidate(index));
  CHECK(receiver.begin().empty());
}

// What must fail, in the order of the checks: each with its Terminate.

TEST_CASE_FIXTURE(Fixture, "an FPDU too short for a header") {
  SUBCASE("of any kind") {
    CHECK(refused(sealed(hex("000dc140000000000000000000000000"))) == error::framing);
  }
  SUBCASE("at once, before more of it came") {
    CHECK(refused(hex("00000000")) == error::framing);
  }
  SUBCASE("untagged, long enough for tagged") {
    CHECK(refused(hex("00114143")) == error::framing);
  }
  CHECK_FALSE(has_header());
}

TEST_CASE_FIXTURE(Fixture, "a wrong DDP version") {
  SUBCASE("tagged") {
    Bytes fpdu = Write{key, base, counting(4)}.unsealed();
    fpdu[2] ^= std::byte{0x03};
    CHECK(refused(sealed(fpdu)) == error::tagged_ddp_version);
  }
  SUBCASE("untagged") {
    Bytes fpdu = Message{}.unsealed();
    fpdu[2] &= std::byte{0xfc};
    CHECK(refused(sealed(fpdu)) == error::untagged_ddp_version);
  }
  CHECK_FALSE(has_header());
}

TEST_CASE_FIXTURE(Fixture, "a wrong RDMAP version") {
  Bytes fpdu = Write{key, base, counting(4)}.unsealed();
  fpdu[3] = std::byte{0x80};
  CHECK(refused(sealed(fpdu)) == error::rdmap_version);
  CHECK_FALSE(has_header());
}

TEST_CASE("opcodes that are unknown, not for us or of the wrong kind") {
  const auto check = [](const Bytes& fpdu) {
    Fixture f;
    f.receives.post_empty(1, 1);
    CHECK(f.refused(fpdu) == error::unexpected_opcode);
    CHECK_FALSE(f.has_header());
    CHECK(f.sink.completions.empty());
  };
  for (unsigned opcode = 0; opcode < 16; ++opcode) {
    CAPTURE(opcode);
    if (opcode != 0) check(Write{1, 0, counting(4), true, static_cast<Opcode>(opcode)});
    if (opcode < 3 || opcode == 10 || opcode == 11 || opcode > 12)
      check(Message{static_cast<Opcode>(opcode), 1, {}});
  }
}

TEST_CASE_FIXTURE(WithoutCrc, "the kernel's Read Request is refused") {
  CHECK(
      refused(hex("002e414100000000000000010000000100000000ea32bd0000005590fec3f96000000fa0a12b8f00"
                  "000055aa9dfb042000000000")) == error::unexpected_opcode);
}

TEST_CASE_FIXTURE(Fixture, "messages interleaved") {
  std::byte buffer[100];
  receives.post(1, buffer, sizeof buffer);
  receives.post(1, buffer, sizeof buffer);
  SUBCASE("another opcode in the middle of a send") {
    take(Message{.payload = counting(4), .last = false});
    CHECK(refused(Message{.opcode = Opcode::send_immediate, .payload = counting(4), .offset = 4}) ==
          error::stream_catastrophic);
  }
  SUBCASE("a write in the middle of a send") {
    take(Message{.payload = counting(4), .last = false});
    CHECK(refused(Write{key, base, counting(4)}) == error::stream_catastrophic);
  }
  SUBCASE("a send in the middle of a write") {
    take(Write{key, base, counting(4), false});
    CHECK(receiver.inside_message());
    CHECK(refused(Message{.payload = counting(4)}) == error::stream_catastrophic);
  }
  CHECK_FALSE(has_header());
  CHECK(sink.completions.empty());
}

TEST_CASE_FIXTURE(Fixture, "a wrong queue") {
  receives.post_empty(1, 1);
  CHECK(refused(Message{.payload = {}, .queue = 1}) == error::invalid_queue);
  CHECK(has_header());
}

TEST_CASE_FIXTURE(Fixture, "a wrong message number") {
  receives.post_empty(1, 3);
  SUBCASE("zero") {
    CHECK(refused(Message{.number = 0, .payload = {}}) == error::message_number);
  }
  SUBCASE("skipped") {
    CHECK(refused(Message{.number = 2, .payload = {}}) == error::message_number);
  }
  SUBCASE("repeated") {
    take(Message{.number = 1, .payload = {}});
    CHECK(refused(Message{.number = 1, .payload = {}}) == error::message_number);
  }
  SUBCASE("changed within the message") {
    take(Message{.number = 1, .payload = {}, .last = false});
    CHECK(refused(Message{.number = 2, .payload = {}}) == error::message_number);
  }
  CHECK(has_header());
}

TEST_CASE_FIXTURE(Fixture, "a message nobody waits for") {
  CHECK(refused(Message{.payload = {}}) == error::no_receive);
  CHECK(has_header());
}

TEST_CASE_FIXTURE(Fixture, "a wrong offset in the message") {
  std::byte buffer[100];
  receives.post(1, buffer, sizeof buffer);
  SUBCASE("of the first segment") {
    CHECK(refused(Message{.payload = counting(4), .offset = 1}) == error::message_offset);
  }
  SUBCASE("of a later one: a gap") {
    take(Message{.payload = counting(4), .last = false});
    CHECK(refused(Message{.payload = counting(4), .offset = 5}) == error::message_offset);
  }
  SUBCASE("of a later one: going back") {
    take(Message{.payload = counting(4), .last = false});
    CHECK(refused(Message{.payload = counting(4), .offset = 0}) == error::message_offset);
  }
  SUBCASE("of an immediate") {
    CHECK(refused(Message{.opcode = Opcode::immediate_data, .payload = Bytes(8), .offset = 8}) ==
          error::message_offset);
  }
  CHECK(has_header());
}

TEST_CASE_FIXTURE(Fixture, "a message too long for its receive") {
  auto buffer = std::make_unique<std::byte[]>(10);
  SUBCASE("in one segment") {
    receives.post(1, buffer.get(), 10);
    CHECK(refused(Message{.payload = counting(11)}) == error::message_too_long);
  }
  SUBCASE("in two") {
    receives.post(1, buffer.get(), 10);
    take(Message{.payload = counting(10), .last = false});
    CHECK(refused(Message{.payload = counting(1), .offset = 10}) == error::message_too_long);
  }
  SUBCASE("into an empty receive") {
    receives.post_empty(1, 1);
    CHECK(refused(Message{.payload = counting(1)}) == error::message_too_long);
  }
  CHECK(has_header());
}

TEST_CASE("Immediate Data of a wrong size or in segments") {
  for (const Opcode opcode : {Opcode::immediate_data, Opcode::immediate_data_solicited})
    for (const size_t size : {0u, 4u, 7u, 9u, 16u}) {
      Fixture f;
      f.receives.post_empty(1, 1);
      CHECK(f.refused(Message{opcode, 1, Bytes(size)}) == error::operation_unspecified);
      CHECK_FALSE(f.has_header());
    }
  Fixture f;
  f.receives.post_empty(1, 1);
  CHECK(f.refused(Message{Opcode::immediate_data, 1, Bytes(8), false}) ==
        error::operation_unspecified);
}

TEST_CASE("a write under a bad key or beyond its memory, small or large") {
  for (const size_t size : {8u, 60000u}) {
    CAPTURE(size);
    const auto check = [size](const std::function<Write(Fixture&)>& make, TerminateError expected) {
      Fixture f;
      Write write = make(f);
      write.payload = counting(size, 1);
      CHECK(f.refused(write) == expected);
      CHECK(f.has_header());
      CHECK(all_zero(f.memory.get(), 300000));
      // Also when only its beginning has come.
      Fixture g;
      write = make(g);
      write.payload = counting(size, 1);
      const Bytes fpdu = write;
      if (size > Receiver::direct_min)
        CHECK(g.refused(Bytes(fpdu.begin(), fpdu.begin() + 100)) == expected);
    };
    check([](Fixture&) { return Write{0x12345600, 0, {}}; }, error::invalid_stag);
    check([](Fixture&) { return Write{0, 0, {}}; }, error::invalid_stag);
    check([](Fixture& f) { return Write{f.key ^ 1, f.base, {}}; }, error::invalid_stag);
    check(
        [](Fixture& f) {
          f.keys.invalidate(f.index);
          return Write{f.key, f.base, {}};
        },
        error::invalid_stag);
    check(
        [](Fixture& f) {
          f.keys.renew(f.index);
          return Write{f.key, f.base, {}};
        },
        error::invalid_stag);
    check(
        [](Fixture& f) {
          f.keys.release(f.index);
          return Write{f.key, f.base, {}};
        },
        error::invalid_stag);
    check(
        [](Fixture& f) {
          const uint32_t other =
              f.keys.allocate(foreign, f.memory.get(), 300000, Access::remote_write);
          return Write{f.keys.key(other), KeyTable::base_offset(other), {}};
        },
        error::foreign_stag);
    check([](Fixture& f) { return Write{f.key, UINT64_MAX - 3, {}}; }, error::offset_wrap);
    check([](Fixture& f) { return Write{f.key, f.base - 1, {}}; }, error::out_of_bounds);
    check([](Fixture& f) { return Write{f.key, f.base + 300000 - 7, {}}; }, error::out_of_bounds);
    check([](Fixture& f) { return Write{f.key, 0, {}}; }, error::out_of_bounds);
    check(
        [](Fixture& f) {
          const uint32_t closed = f.keys.allocate(ours, f.memory.get(), 300000, Access::none);
          return Write{f.keys.key(closed), KeyTable::base_offset(closed), {}};
        },
        error::access_rights);
  }
}

TEST_CASE("a stale key is answered with the Terminate of the standard, byte for byte") {
  KeyTable keys;
  std::byte memory[16];
  uint32_t index = 0;
  while (index < 0x12a) index = keys.allocate(ours, memory, sizeof memory, Access::remote_write);
  while ((keys.key(index) & 0xff) != 7) keys.renew(index);
  ReceiveQueue receives;
  Receiver receiver(keys, ours, receives, true);
  Collector sink;
  const Bytes fpdu = hex("0013c14000012a0600007f000000100068656c6c6f0000009a69a851");
  feed(receiver, sink, fpdu, [](size_t n) { return n; });
  REQUIRE(receiver.status() == Status::failed);
  SendQueue answer(true, segment_payload_default);
  answer.post_terminate(receiver.failure().error, receiver.failure().header_bytes());
  iovec vector{};
  size_t total = 0;
  REQUIRE(answer.gather({&vector, 1}, total) == 1);
  CHECK(
      to_hex({static_cast<const std::byte*>(vector.iov_base), total}) ==
      to_hex(hex("00264147000000000000000200000001000000001100c0000005c14000012a0600007f0000001000"
                 "87b05ae8")));
}

TEST_CASE_FIXTURE(Fixture, "invalidating a key that is unknown, another's or closed") {
  receives.post_empty(1, 1);
  const auto invalidate = [this](uint32_t stag) {
    return refused(Message{.opcode = Opcode::send_invalidate, .payload = {}, .upper_layer = stag});
  };
  SUBCASE("zero") {
    CHECK(invalidate(0) == error::invalidate_unknown);
  }
  SUBCASE("never issued") {
    CHECK(invalidate(0x00034501) == error::invalidate_unknown);
  }
  SUBCASE("stale") {
    CHECK(invalidate(key ^ 1) == error::invalidate_unknown);
  }
  SUBCASE("of another domain") {
    const uint32_t other = keys.allocate(foreign, memory.get(), 8, Access::remote_write);
    CHECK(invalidate(keys.key(other)) == error::invalidate_not_permitted);
  }
  SUBCASE("closed") {
    const uint32_t closed = keys.allocate(ours, memory.get(), 8, Access::none);
    CHECK(invalidate(keys.key(closed)) == error::invalidate_not_permitted);
  }
  CHECK(has_header());
  CHECK(sink.completions.empty());
}

TEST_CASE("a bad checksum delivers nothing, and comes before any other complaint") {
  for (const size_t size : {8u, 9u, 60000u}) {
    for (const size_t step : {size_t{1} << 20, size_t{100}}) {
      Fixture f;
      Bytes fpdu = Write{f.key, f.base, counting(size)};
      fpdu[fpdu.size() - 6] ^= std::byte{1};
      CHECK(f.take_by(step, fpdu) == Status::failed);
      CHECK(f.receiver.failure().error == error::crc);
      CHECK_FALSE(f.has_header());
      CHECK(f.receiver.fpdus() == 0);
    }
  }
  Fixture f;
  Bytes fpdu = Message{.opcode = Opcode::read_request, .number = 9, .payload = Bytes(28)};
  fpdu.back() ^= std::byte{1};
  CHECK(f.refused(fpdu) == error::crc);
  Fixture g;
  g.receives.post_empty(1, 2);
  Bytes stream = Message{.payload = {}};
  Bytes bad = Message{.number = 2, .payload = {}};
  bad[5] ^= std::byte{1};
  stream += bad;
  CHECK(g.take(stream) == Status::failed);
  CHECK(g.sink.completions.size() == 1);
}

// The peer's complaints.

TEST_CASE_FIXTURE(Fixture, "the kernel's Terminates are understood") {
  SUBCASE("unexpected opcode, mirrored") {
    CHECK(take(hex("0016414700000000000000020000000100000000200600006540fb1b")) ==
          Status::terminated);
    CHECK(receiver.detail().find("unexpected opcode (02/06)") != std::string::npos);
  }
  SUBCASE("invalid STag, with header") {
    CHECK(take(hex("0026414700000000000000020000000100000000110003000008c14012345600000000000000000"
                   "089db3c78")) == Status::terminated);
    CHECK(receiver.detail().find("invalid STag (11/00)") != std::string::npos);
  }
  CHECK(receiver.begin().empty());
  CHECK(sink.completions.empty());
}

TEST_CASE_FIXTURE(
    Fixture, "a Terminate may come within a message, and needs no receive and no good header") {
  SUBCASE("in a write") {
    take(Write{key, base, counting(4), false});
  }
  SUBCASE("in a send") {
    std::byte buffer[8];
    receives.post(1, buffer, sizeof buffer);
    take(Message{.payload = counting(4), .last = false});
  }
  CHECK(take(Message{
            .opcode = Opcode::terminate, .number = 7, .payload = {}, .offset = 3, .queue = 5}) ==
        Status::terminated);
}

// The stream cut into reads.

namespace {

struct Outcome {
  std::vector<Completion> completions;
  Status status = Status::running;
  TerminateError error;
  Bytes memory;
  Bytes buffers;
  uint64_t fpdus = 0;
  bool operator==(const Outcome& other) const {
    if (completions.size() != other.completions.size()) return false;
    for (size_t i = 0; i < completions.size(); ++i) {
      const Completion &a = completions[i], &b = other.completions[i];
      if (a.id != b.id || a.byte_count != b.byte_count || a.has_immediate != b.has_immediate ||
          a.immediate != b.immediate || a.invalidated_rkey != b.invalidated_rkey)
        return false;
    }
    return status == other.status && error == other.error && memory == other.memory &&
           buffers == other.buffers && fpdus == other.fpdus;
  }
};

// One of everything, in sizes around every limit; ends with an error if wanted.
template <typename Step>
Outcome run(bool crc, bool bad_end, size_t scale, Step step) {
  KeyTable keys;
  Outcome outcome;
  outcome.memory.resize(100 * scale);
  outcome.buffers.resize(4000);
  const uint32_t index =
      keys.allocate(ours, outcome.memory.data(), outcome.memory.size(), Access::remote_write);
  const uint32_t spare = keys.allocate(ours, outcome.memory.data(), 1, Access::remote_write);
  const uint64_t base = KeyTable::base_offset(index);
  ReceiveQueue receives;
  receives.post_empty(1, 2);
  receives.post(2, outcome.buffers.data(), 1500);
  receives.post(3, outcome.buffers.data() + 1500, 2500);
  receives.post_empty(4, 5);
  Receiver receiver(keys, ours, receives, crc);
  Collector sink;

  Bytes stream;
  uint32_t number = 1;
  stream += Write{keys.key(index), base, counting(5)};
  stream += Message{Opcode::immediate_data, number++, hex("0000000100000000")};
  stream += Write{keys.key(index), base + 5, counting(60 * scale, 1), false};
  stream += Write{keys.key(index), base + 5 + 60 * scale, counting(12 * scale + 3, 2)};
  stream += Message{Opcode::immediate_data_solicited, number++, hex("0000000200000000")};
  stream +=
      Message{.opcode = Opcode::send, .number = number, .payload = counting(700, 3), .last = false};
  stream += Message{
      .opcode = Opcode::send, .number = number++, .payload = counting(799, 4), .offset = 700};
  stream += Message{.opcode = Opcode::send_immediate,
                    .number = number++,
                    .payload = counting(8, 5),
                    .upper_layer = 99};
  stream += Write{keys.key(index), base + 90 * scale, counting(8 * scale, 6)};
  stream += Message{.opcode = Opcode::send_invalidate,
                    .number = number++,
                    .payload = {},
                    .upper_layer = keys.key(spare)};
  stream += Message{Opcode::immediate_data, number++, hex("0000000300000000")};
  if (bad_end) stream += Write{keys.key(spare), 0, counting(9 * scale)};
  outcome.status = feed(receiver, sink, stream, step);
  outcome.error = receiver.failure().error;
  outcome.completions = sink.completions;
  outcome.fpdus = receiver.fpdus();
  return outcome;
}

}  // namespace

TEST_CASE("every cut of a short stream in two, and every even cut, gives the same") {
  for (const bool crc : {false, true}) {
    const bool bad_end = crc;
    const Outcome whole = run(crc, bad_end, 1, [](size_t n) { return n; });
    CHECK(whole.completions.size() == 6);
    CHECK(whole.status == (bad_end ? Status::failed : Status::running));
    for (size_t cut = 1; cut < 2500; ++cut) {
      size_t fed = 0;
      const Outcome two = run(crc, bad_end, 1, [&fed, cut](size_t n) {
        const size_t take = fed < cut ? std::min(n, cut - fed) : n;
        fed += take;
        return take;
      });
      REQUIRE(two == whole);
    }
    for (size_t step = 1; step < 100; ++step)
      REQUIRE(run(crc, bad_end, 1, [step](size_t) { return step; }) == whole);
  }
}

TEST_CASE("random cuts of a stream with large writes give the same") {
  std::mt19937 random(3);
  for (const bool crc : {false, true}) {
    const bool bad_end = !crc;
    const Outcome whole = run(crc, bad_end, 1024, [](size_t n) { return n; });
    CHECK(whole.completions.size() == 6);
    for (int round = 0; round < 50; ++round) {
      CAPTURE(round);
      const size_t step_max = size_t{1} << (random() % 17);
      REQUIRE(run(crc, bad_end, 1024,
                  [&random, step_max](size_t) { return random() % step_max + 1; }) == whole);
    }
    REQUIRE(run(crc, bad_end, 1024, [](size_t) { return size_t{1}; }) == whole);
  }
}

TEST_CASE("what SendQueue makes of any request, Receiver takes as it was meant") {
  std::mt19937 random(4);
  const Bytes data = counting(100000, 9);
  for (const bool crc : {false, true})
    for (const uint32_t segment : {8u, 1000u, segment_payload_default, segment_payload_max}) {
      KeyTable keys;
      Bytes target(data.size());
      const uint32_t index =
          keys.allocate(ours, target.data(), target.size(), Access::remote_write);
      ReceiveQueue receives;
      Receiver receiver(keys, ours, receives, crc);
      Collector sink;
      SendQueue queue(crc, segment);
      for (int round = 0; round < 100; ++round) {
        const size_t length = random() % 3 == 0 ? random() % data.size() : random() % 600;
        const size_t offset = random() % (data.size() - length);
        const Segment piece{data.data() + random() % (data.size() - length), length, nullptr};
        SendRequest request{.kind = static_cast<SendKind>(random() % 5),
                            .immediate = static_cast<uint32_t>(random()),
                            .rkey = keys.key(index),
                            .remote_address = KeyTable::base_offset(index) + offset,
                            .invalidate_rkey = keys.key(index),
                            .segments = {&piece, 1}};
        if (request.kind == SendKind::send_invalidate) request.segments = {};
        Bytes buffer(length);
        const bool message =
            request.kind == SendKind::send || request.kind == SendKind::send_immediate;
        if (request.kind != SendKind::write) receives.post(7, buffer.data(), message ? length : 0);
        queue.post(request);
        while (!queue.empty()) {
          std::vector<iovec> list(8);
          size_t total = 0;
          const size_t count = queue.gather(list, total);
          for (size_t i = 0; i < count; ++i)
            feed(receiver, sink, {static_cast<const std::byte*>(list[i].iov_base), list[i].iov_len},
                 [&random](size_t n) { return random() % n + 1; });
          queue.sent(total);
        }
        CAPTURE(receiver.detail());
        REQUIRE(receiver.status() == Status::running);
        const auto& done = sink.completions;
        CHECK(done.size() == (request.kind == SendKind::write ? 0 : 1));
        if (request.kind == SendKind::write || request.kind == SendKind::write_immediate)
          CHECK(std::memcmp(target.data() + offset, piece.data, length) == 0);
        if (message) {
          CHECK(std::equal(buffer.begin(), buffer.end(), piece.data));
          CHECK(done[0].byte_count == length);
        }
        if (!done.empty()) {
          const bool immediate =
              request.kind == SendKind::send_immediate || request.kind == SendKind::write_immediate;
          CHECK(done[0].has_immediate == immediate);
          if (immediate) CHECK(done[0].immediate == request.immediate);
        }
        if (request.kind == SendKind::send_invalidate) {
          CHECK(done[0].invalidated_rkey == keys.key(index));
          keys.renew(index);
        }
        sink.completions.clear();
      }
    }
}

}  // namespace rtrsnbd::fabric::soft
