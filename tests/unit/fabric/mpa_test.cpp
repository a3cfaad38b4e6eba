// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/soft/mpa.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tests/support/hex.h"

namespace rtrsnbd::fabric::soft {

using test::hex;
using test::to_hex;
using Bytes = std::vector<std::byte>;
using Kind = MpaReader::Kind;
using State = MpaReader::State;

namespace {

Bytes counting(unsigned first, size_t length) {
  Bytes bytes(length);
  for (size_t i = 0; i < length; ++i) bytes[i] = static_cast<std::byte>(first + i);
  return bytes;
}

Bytes joined(Bytes a, const Bytes& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const Bytes request_key = hex("4d504120494420526571204672616d65");
const Bytes reply_key = hex("4d504120494420526570204672616d65");

Bytes request(const char* fixed, const Bytes& data = {}) {
  return joined(joined(request_key, hex(fixed)), data);
}
Bytes reply(const char* fixed, const Bytes& data = {}) {
  return joined(joined(reply_key, hex(fixed)), data);
}

// Feeds at most `step` bytes at a time; returns how many the reader took.
size_t feed(MpaReader& reader, const Bytes& bytes, size_t step = 1000) {
  size_t done = 0;
  while (reader.state() == State::reading && done < bytes.size()) {
    const auto room = reader.buffer();
    REQUIRE(!room.empty());
    const size_t count = std::min({room.size(), step, bytes.size() - done});
    std::memcpy(room.data(), bytes.data() + done, count);
    reader.received(count);
    done += count;
  }
  return done;
}

State state_of(Kind kind, const Bytes& bytes, MpaTerms sent = {}) {
  MpaReader reader(kind, sent);
  feed(reader, bytes);
  return reader.state();
}

}  // namespace

TEST_CASE("a request is read in any pieces, and not a byte beyond it") {
  const Bytes frame = request("40010038", counting(0x10, 56));
  for (size_t step = 1; step <= frame.size(); ++step) {
    MpaReader reader(Kind::request);
    CHECK(feed(reader, joined(frame, counting(0, 40)), step) == frame.size());
    CHECK(reader.state() == State::complete);
    CHECK(reader.terms().crc);
    CHECK(reader.terms().revision == 1);
    CHECK_FALSE(reader.terms().enhanced);
    CHECK(to_hex(reader.private_data()) == to_hex(counting(0x10, 56)));
    CHECK(reader.buffer().empty());
  }
}

TEST_CASE("the kernel's request of revision 2 and the answers to it") {
  MpaReader reader(Kind::request);
  feed(reader, request("1002003c 00010001", counting(0x10, 56)));
  REQUIRE(reader.state() == State::complete);
  CHECK(reader.terms().enhanced);
  CHECK_FALSE(reader.terms().crc);
  CHECK(to_hex(reader.private_data()) == to_hex(counting(0x10, 56)));

  MpaFrame frame;
  size_t length = make_mpa_accept(frame, reader.terms(), false, counting(0x80, 56));
  CHECK(to_hex(std::span(frame).first(length)) ==
        to_hex(reply("1002003c 00000000", counting(0x80, 56))));
  length = make_mpa_reject(frame, reader.terms(), counting(0x80, 56));
  CHECK(to_hex(std::span(frame).first(length)) ==
        to_hex(reply("3002003c 00000000", counting(0x80, 56))));
}

TEST_CASE("peer-to-peer mode is granted by a zero-length write only") {
  MpaFrame frame;
  MpaReader write(Kind::request);
  feed(write, request("10020004 8004c004"));
  CHECK(write.terms().peer_to_peer);
  size_t length = make_mpa_accept(frame, write.terms(), false, {});
  CHECK(to_hex(std::span(frame).first(length)) == to_hex(reply("10020004 80008000")));
  MpaReader read(Kind::request);
  feed(read, request("10020004 80044004"));
  length = make_mpa_accept(frame, read.terms(), false, {});
  CHECK(to_hex(std::span(frame).first(length)) == to_hex(reply("10020004 00000000")));
}

TEST_CASE("the frames we send are the standard's byte for byte") {
  MpaFrame frame;
  size_t length = make_mpa_request(frame, true, counting(0x10, 56));
  CHECK(to_hex(std::span(frame).first(length)) == to_hex(request("40010038", counting(0x10, 56))));
  length = make_mpa_request(frame, false, {});
  CHECK(to_hex(std::span(frame).first(length)) == to_hex(request("00010000")));

  MpaTerms asked;
  asked.crc = true;
  length = make_mpa_accept(frame, asked, true, counting(0x80, 56));
  CHECK(to_hex(std::span(frame).first(length)) == to_hex(reply("40010038", counting(0x80, 56))));
  length = make_mpa_accept(frame, asked, true, {});
  CHECK(to_hex(std::span(frame).first(length)) == to_hex(reply("40010000")));
  length = make_mpa_reject(frame, asked, counting(0x80, 56));
  CHECK(to_hex(std::span(frame).first(length)) == to_hex(reply("60010038", counting(0x80, 56))));
}

TEST_CASE("checksums wanted by the responder alone are announced in its reply") {
  MpaFrame frame;
  const size_t length = make_mpa_accept(frame, MpaTerms{}, true, {});
  CHECK(to_hex(std::span(frame).first(length)) == to_hex(reply("40010000")));
  MpaReader reader(Kind::reply);
  feed(reader, reply("40010000"));
  CHECK(reader.terms().crc);
}

TEST_CASE("requests that break the rules are dropped without an answer") {
  CHECK(state_of(Kind::request, reply("00010000")) == State::broken);  // key of a reply
  CHECK(state_of(Kind::request, Bytes(20, std::byte{0})) == State::broken);
  CHECK(state_of(Kind::request, request("00000000")) == State::broken);  // revision 0
  CHECK(state_of(Kind::request, request("00030000")) == State::broken);  // revision 3
  CHECK(state_of(Kind::request, request("20010000")) == State::broken);  // rejected
  CHECK(state_of(Kind::request, request("00010101")) == State::broken);  // 257 bytes
  CHECK(state_of(Kind::request, request("0001ffff")) == State::broken);
  CHECK(state_of(Kind::request, request("00010100", counting(0, 256))) == State::complete);
  CHECK(state_of(Kind::request, request("00010100", counting(0, 255))) == State::reading);
}

TEST_CASE("markers are refused, with revision and checksum flag as they came") {
  MpaFrame frame;
  MpaReader reader(Kind::request);
  CHECK(feed(reader, request("80010008", counting(0, 8))) == 20);
  CHECK(reader.state() == State::refused);
  size_t length = make_mpa_reject(frame, reader.terms(), {});
  CHECK(to_hex(std::span(frame).first(length)) == to_hex(reply("20010000")));

  MpaReader with_crc(Kind::request);
  feed(with_crc, request("c0020000"));
  CHECK(with_crc.state() == State::refused);
  length = make_mpa_reject(frame, with_crc.terms(), {});
  CHECK(to_hex(std::span(frame).first(length)) == to_hex(reply("60020000")));
}

TEST_CASE("an enhanced request without its fields is refused") {
  CHECK(state_of(Kind::request, request("10020003", counting(0, 3))) == State::refused);
  CHECK(state_of(Kind::request, request("10020000")) == State::refused);
}

TEST_CASE("flags that have no meaning are not looked at, nor sent back") {
  MpaReader reader(Kind::request);
  feed(reader, request("0f010000"));
  CHECK(reader.state() == State::complete);
  MpaFrame frame;
  const size_t length = make_mpa_accept(frame, reader.terms(), false, {});
  CHECK(to_hex(std::span(frame).first(length)) == to_hex(reply("00010000")));

  // The enhanced flag belongs to revision 2; revision 2 without it is like revision 1.
  MpaReader first(Kind::request);
  feed(first, request("10010004", counting(0, 4)));
  CHECK(first.private_data().size() == 4);
  MpaReader second(Kind::request);
  feed(second, request("00020004", counting(0, 4)));
  CHECK(second.private_data().size() == 4);
  const size_t second_length = make_mpa_accept(frame, second.terms(), false, {});
  CHECK(to_hex(std::span(frame).first(second_length)) == to_hex(reply("00020000")));
}

TEST_CASE("a reply is accepted, rejected or unusable") {
  MpaReader accepted(Kind::reply);
  feed(accepted, reply("00010003", counting(1, 3)));
  CHECK(accepted.state() == State::complete);
  CHECK_FALSE(accepted.rejected());
  CHECK(to_hex(accepted.private_data()) == "01 02 03");

  MpaReader rejected(Kind::reply);
  feed(rejected, reply("20010003", counting(1, 3)));
  CHECK(rejected.state() == State::complete);
  CHECK(rejected.rejected());
  CHECK(to_hex(rejected.private_data()) == "01 02 03");

  CHECK(state_of(Kind::reply, request("00010000")) == State::broken);  // an echo
  CHECK(state_of(Kind::reply, reply("00020000")) == State::broken);    // revision above ours
  CHECK(state_of(Kind::reply, reply("00000000")) == State::complete);  // below
  CHECK(state_of(Kind::reply, reply("80010000")) == State::broken);    // markers
  CHECK(state_of(Kind::reply, reply("00010101")) == State::broken);    // too long
  MpaTerms enhanced;
  enhanced.revision = 2;
  enhanced.enhanced = true;
  CHECK(state_of(Kind::reply, reply("00020000"), enhanced) == State::broken);
  CHECK(state_of(Kind::reply, reply("10020003", counting(0, 3)), enhanced) == State::broken);
  CHECK(state_of(Kind::reply, reply("10020004", counting(0, 4)), enhanced) == State::complete);
}

}  // namespace rtrsnbd::fabric::soft
