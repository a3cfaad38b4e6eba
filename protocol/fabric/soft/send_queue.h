// SPDX-License-Identifier: BSD-3-Clause
// The sending half of one iWARP connection without its socket: work requests become FPDUs, a list
// of pieces of memory in stream order. Headers, trailers and small payloads are written into an
// arena that is recycled as it is sent; large payloads stay where the caller has them. Not
// thread-safe.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "protocol/fabric/fabric.h"
#include "protocol/fabric/soft/ring.h"
#include "protocol/wire/iwarp.h"

namespace rtrsnbd::fabric::soft {

inline constexpr uint32_t segment_payload_default = 61440;  // 15 pages
// RFC 5044's ceiling of 64768 for an FPDU's ULPDU, less a header, in whole words.
inline constexpr uint32_t segment_payload_max = 64748;
// Immediate Data must be in one piece.
inline constexpr uint32_t segment_payload_min = sizeof(wire::iwarp::ImmediatePayload);

// Memory that is given out and given back in the same order.
class Arena {
 public:
  static constexpr size_t block_size = 8192;

  struct Bytes {
    std::byte* start = nullptr;
    bool first_of_block = false;
  };
  Bytes allocate(size_t length);
  void release(size_t length);  // the oldest bytes
  [[nodiscard]] size_t in_use() const { return in_use_; }

 private:
  static constexpr size_t spare_max = 4;
  struct Block {
    std::unique_ptr<std::byte[]> bytes;
    size_t used = 0;
    size_t released = 0;
  };
  Ring<Block> blocks_;
  size_t in_use_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> spare_;
};

class SendQueue {
 public:
  // A peer that does not read must not cost memory without end.
  static constexpr size_t pieces_max = size_t{1} << 20;
  static constexpr size_t arena_max = size_t{64} << 20;

  SendQueue(bool crc, uint32_t segment_payload);

  void post(const SendRequest& request);
  // `header`: the offending FPDU's, from its length field on; or empty.
  void post_terminate(wire::iwarp::TerminateError error, std::span<const std::byte> header);

  [[nodiscard]] bool empty() const { return pieces_.empty(); }
  [[nodiscard]] bool full() const {
    return pieces_.size() >= pieces_max || arena_.in_use() >= arena_max;
  }
  // Fills in the next pieces to send, as many as fit; returns how many.
  [[nodiscard]] size_t gather(std::span<iovec> vectors, size_t& bytes) const;
  void sent(size_t bytes);
  void clear();

  // Positions in the stream: what was queued and what was sent since the beginning.
  [[nodiscard]] uint64_t posted_bytes() const { return posted_bytes_; }
  [[nodiscard]] uint64_t sent_bytes() const { return sent_bytes_; }

 private:
  struct Piece {
    const std::byte* data = nullptr;
    uint32_t length = 0;  // at most a segment's payload, or a block of the arena
    bool in_arena = false;
  };

  // Walks over the caller's segments.
  class Payload {
   public:
    explicit Payload(std::span<const Segment> segments) : segments_(segments) {}
    // The next bytes, at most `length` of them, as far as they lie together.
    std::span<const std::byte> take(size_t length);

   private:
    std::span<const Segment> segments_;
    size_t offset_ = 0;
  };

  [[nodiscard]] size_t balanced_segment(size_t total) const;
  void post_write(const SendRequest& request, size_t total);
  void post_untagged(wire::iwarp::Opcode opcode, uint32_t upper_layer,
                     std::span<const Segment> segments, size_t total);
  void post_immediate(uint32_t immediate);
  void post_fpdu(std::span<const std::byte> header, Payload& payload, size_t length, bool copy);
  void append_arena(Arena::Bytes bytes, size_t length);

  const bool crc_;
  const uint32_t segment_payload_;
  uint32_t next_message_number_ = 1;
  Arena arena_;
  Ring<Piece> pieces_;
  size_t front_sent_ = 0;  // bytes of the first piece that are gone
  uint64_t posted_bytes_ = 0;
  uint64_t sent_bytes_ = 0;
};

}  // namespace rtrsnbd::fabric::soft
