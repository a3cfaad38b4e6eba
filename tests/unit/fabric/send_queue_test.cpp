// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/soft/send_queue.h"

#include <doctest/doctest.h>

#include <random>
#include <string_view>
#include <vector>

#include "tests/support/hex.h"

namespace rtrsnbd::fabric::soft {

using test::hex;
using test::to_hex;
using Bytes = std::vector<std::byte>;

namespace {

// Takes out everything, by steps of the given size.
Bytes drain(SendQueue& queue, size_t step = SIZE_MAX, size_t vectors = 4) {
  Bytes out;
  while (!queue.empty()) {
    std::vector<iovec> list(vectors);
    size_t total = 0;
    const size_t count = queue.gather(list, total);
    REQUIRE(count > 0);
    const size_t taken = std::min(step, total);
    size_t left = taken;
    for (size_t i = 0; i < count && left > 0; ++i) {
      const size_t part = std::min(left, list[i].iov_len);
      const auto* start = static_cast<const std::byte*>(list[i].iov_base);
      out.insert(out.end(), start, start + part);
      left -= part;
    }
    queue.sent(taken);
  }
  CHECK(queue.sent_bytes() == queue.posted_bytes());
  return out;
}

Segment segment(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size(), nullptr};
}

SendRequest write(const Segment& data, uint32_t key, uint64_t address) {
  return {.kind = SendKind::write, .rkey = key, .remote_address = address, .segments = {&data, 1}};
}

Bytes counting(size_t length) {
  Bytes bytes(length);
  for (size_t i = 0; i < length; ++i) bytes[i] = static_cast<std::byte>(i);
  return bytes;
}

}  // namespace

TEST_CASE("each verb on the wire, with checksum, byte for byte") {
  SendQueue queue(true, segment_payload_default);
  SUBCASE("write with pad") {
    const Segment data = segment("hello");
    queue.post(write(data, 0x00012a07, 0x7f0000001000));
    CHECK(to_hex(drain(queue)) ==
          to_hex(hex("0013c14000012a0700007f000000100068656c6c6f000000c5b54c0e")));
  }
  SUBCASE("immediate, send, heartbeat: numbered from 1") {
    queue.post({.kind = SendKind::write_immediate, .immediate = 0x00001020});
    const Segment text = segment("RTRS info");
    queue.post({.kind = SendKind::send, .segments = {&text, 1}});
    queue.post({.kind = SendKind::write_immediate, .immediate = 0x80000000});
    CHECK(to_hex(drain(queue)) ==
          to_hex(hex("001a414800000000000000000000000100000000000010200000000064ea2d14"
                     "001b4143000000000000000000000002000000005254525320696e666f000000229bba80"
                     "001a4148000000000000000000000003000000008000000000000000a3892c9a")));
  }
  SUBCASE("send with invalidate, send with immediate") {
    queue.post({.kind = SendKind::send_invalidate, .invalidate_rkey = 0x00034501});
    const Bytes message = hex("04000500082a0100");
    const Segment data{message.data(), message.size(), nullptr};
    queue.post({.kind = SendKind::send_immediate,
                .copy = true,
                .immediate = 0x20000005,
                .segments = {&data, 1}});
    CHECK(to_hex(drain(queue)) ==
          to_hex(hex("001241440003450100000000000000010000000058c2428a"
                     "001a414c2000000500000000000000020000000004000500082a0100c64ff11e")));
  }
  SUBCASE("Terminate with the offending header") {
    queue.post_terminate(wire::iwarp::error::invalid_stag, hex("0013c14000012a0600007f0000001000"));
    CHECK(to_hex(drain(queue)) ==
          to_hex(
              hex("00264147000000000000000200000001000000001100c0000005c14000012a0600007f0000001000"
                  "87b05ae8")));
  }
}

TEST_CASE(
    "a write longer than a segment is cut into FPDUs of rising offsets, the last one marked") {
  SendQueue queue(true, 20);
  const Bytes data = counting(32);
  const Segment whole{data.data(), data.size(), nullptr};
  const auto expected =
      to_hex(hex("0022814000012a0700007f0000002000000102030405060708090a0b0c0d0e0f101112130f3b9e42"
                 "001ac14000012a0700007f00000020141415161718191a1b1c1d1e1f77f9c819"));
  queue.post(write(whole, 0x00012a07, 0x7f0000002000));
  CHECK(to_hex(drain(queue)) == expected);
  // The same bytes from three places.
  const Segment parts[] = {
      {data.data(), 5, nullptr}, {data.data() + 5, 0, nullptr}, {data.data() + 5, 27, nullptr}};
  queue.post({.kind = SendKind::write,
              .rkey = 0x00012a07,
              .remote_address = 0x7f0000002000,
              .segments = parts});
  CHECK(to_hex(drain(queue)) == expected);
}

TEST_CASE(
    "the segments of a write are of nearly equal length, none longer than allowed, all there") {
  const Bytes data = counting(300000);
  for (const size_t total : {61440u, 61441u, 65536u, 100000u, 122880u, 122881u, 131072u, 300000u}) {
    CAPTURE(total);
    SendQueue queue(false, segment_payload_default);
    const Segment whole{data.data(), total, nullptr};
    queue.post(write(whole, 1, 0));
    const Bytes stream = drain(queue);
    std::vector<size_t> lengths;
    size_t offset = 0;
    for (size_t at = 0; at < stream.size();) {
      const auto header = wire::load<wire::iwarp::TaggedHeader>(stream.data() + at);
      CHECK(header.offset == offset);
      lengths.push_back(header.length - wire::iwarp::tagged_ulpdu_min);
      offset += lengths.back();
      at += wire::iwarp::fpdu_size(header.length);
    }
    CHECK(offset == total);
    CHECK(lengths.size() == (total + segment_payload_default - 1) / segment_payload_default);
    for (const size_t length : lengths) {
      CHECK(length <= segment_payload_default);
      CHECK(length <= lengths.front());
      CHECK(lengths.front() - length < 64 * lengths.size());
    }
  }
}

TEST_CASE("without checksums the trailer is zeros") {
  SendQueue queue(false, segment_payload_default);
  const Segment data = segment("hello");
  queue.post(write(data, 0x00012a07, 0x7f0000001000));
  CHECK(to_hex(drain(queue)) ==
        to_hex(hex("0013c14000012a0700007f000000100068656c6c6f00000000000000")));
}

TEST_CASE("a write of nothing sends nothing, with immediate only the immediate") {
  SendQueue queue(true, segment_payload_default);
  queue.post({.kind = SendKind::write, .rkey = 1, .remote_address = 2});
  CHECK(queue.empty());
  const Segment nothing{nullptr, 0, nullptr};
  queue.post({.kind = SendKind::write_immediate,
              .immediate = 0x1020,
              .rkey = 0,
              .remote_address = 0,
              .segments = {&nothing, 1}});
  CHECK(to_hex(drain(queue)) ==
        to_hex(hex("001a414800000000000000000000000100000000000010200000000064ea2d14")));
}

TEST_CASE("a large payload is sent from where it lies, and its neighbours from few pieces") {
  SendQueue queue(false, segment_payload_default);
  const Bytes data(3 * segment_payload_default);
  const Segment whole{data.data(), data.size(), nullptr};
  queue.post({.kind = SendKind::write_immediate,
              .immediate = 1,
              .rkey = 1,
              .remote_address = 0,
              .segments = {&whole, 1}});
  std::vector<iovec> list(64);
  size_t total = 0;
  // header, payload, trailer + header, payload, trailer + header, payload, trailer + immediate
  CHECK(queue.gather(list, total) == 7);
  for (size_t i : {1u, 3u, 5u})
    CHECK(list[i].iov_base == data.data() + (i / 2) * segment_payload_default);
  CHECK(total == queue.posted_bytes());
}

TEST_CASE("many small messages are one piece per arena block") {
  SendQueue queue(true, segment_payload_default);
  for (int i = 0; i < 200; ++i) queue.post({.kind = SendKind::write_immediate, .immediate = 1});
  std::vector<iovec> list(64);
  size_t total = 0;
  CHECK(queue.gather(list, total) == 1);
  CHECK(total == 200 * 32);
}

TEST_CASE("payload that was to be copied may change at once") {
  SendQueue queue(true, segment_payload_default);
  std::byte data[] = {std::byte{1}, std::byte{2}};
  const Segment whole{data, sizeof data, nullptr};
  queue.post({.kind = SendKind::send, .copy = true, .segments = {&whole, 1}});
  data[0] = data[1] = std::byte{0};
  const Bytes out = drain(queue);
  CHECK(to_hex(std::span(out).subspan(20, 4)) == "01 02 00 00");
}

TEST_CASE("whatever the socket takes at a time, the stream is the same") {
  std::mt19937 random(2);
  const Bytes data = counting(3000);
  for (const bool crc : {false, true})
    for (int round = 0; round < 50; ++round) {
      SendQueue all(crc, 64), parts(crc, 64);
      Bytes expected, got;
      for (int burst = 0; burst < 20; ++burst) {
        for (int message = 0; message < 5; ++message) {
          const Segment pieces[] = {{data.data(), random() % 1000, nullptr},
                                    {data.data() + random() % 1000, random() % 100, nullptr}};
          SendRequest request{.kind = static_cast<SendKind>(random() % 5),
                              .immediate = static_cast<uint32_t>(random()),
                              .rkey = static_cast<uint32_t>(random()),
                              .remote_address = random(),
                              .invalidate_rkey = static_cast<uint32_t>(random()),
                              .segments = pieces};
          if (request.kind == SendKind::send_invalidate) request.segments = {};
          all.post(request);
          parts.post(request);
        }
        const Bytes whole = drain(all, SIZE_MAX, 1000);
        expected.insert(expected.end(), whole.begin(), whole.end());
        // Some of it only, so that queue and arena go on from the middle.
        for (int i = 0; i < 10 && !parts.empty(); ++i) {
          std::vector<iovec> list(1 + random() % 5);
          size_t total = 0;
          const size_t count = parts.gather(list, total);
          size_t left = 1 + random() % total;
          const size_t taken = left;
          for (size_t k = 0; k < count && left > 0; ++k) {
            const size_t part = std::min(left, list[k].iov_len);
            const auto* start = static_cast<const std::byte*>(list[k].iov_base);
            got.insert(got.end(), start, start + part);
            left -= part;
          }
          parts.sent(taken);
        }
      }
      const Bytes rest = drain(parts, 100, 3);
      got.insert(got.end(), rest.begin(), rest.end());
      CHECK(got == expected);
    }
}

TEST_CASE("a cleared queue starts again clean") {
  SendQueue queue(false, segment_payload_default);
  const Bytes data(100000);
  const Segment whole{data.data(), data.size(), nullptr};
  queue.post(write(whole, 1, 0));
  queue.sent(10);
  queue.clear();
  CHECK(queue.empty());
  queue.post({.kind = SendKind::write_immediate, .immediate = 0x1020});
  CHECK(to_hex(drain(queue)) ==
        to_hex(hex("001a4148000000000000000000000001000000000000102000000000 00000000")));
}

TEST_CASE("a queue nobody drains becomes full") {
  SendQueue queue(false, segment_payload_min);
  const Bytes data(1 << 21);
  const Segment whole{data.data(), data.size(), nullptr};
  CHECK_FALSE(queue.full());
  for (int i = 0; i < 3 && !queue.full(); ++i) queue.post(write(whole, 1, 0));
  CHECK(queue.full());
  drain(queue, SIZE_MAX, 1000);
  CHECK_FALSE(queue.full());
  // Small messages join in few pieces, but they are memory too.
  while (!queue.full() && queue.posted_bytes() - queue.sent_bytes() < SendQueue::arena_max * 2)
    queue.post({.kind = SendKind::write_immediate, .immediate = 1});
  CHECK(queue.full());
  CHECK(queue.posted_bytes() - queue.sent_bytes() <= SendQueue::arena_max + 64);
}

}  // namespace rtrsnbd::fabric::soft
