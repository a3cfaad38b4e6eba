// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/soft/send_queue.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "protocol/wire/crc32c.h"

namespace rtrsnbd::fabric::soft {

using namespace wire::iwarp;

static_assert(sizeof(UntaggedHeader) + inline_max + fpdu_trailer_max <= Arena::block_size);
static_assert(segment_payload_default <= segment_payload_max && segment_payload_max % 4 == 0);

Arena::Bytes Arena::allocate(size_t length) {
  assert(length <= block_size);
  if (blocks_.empty() || block_size - blocks_.back().used < length) {
    Block block;
    if (spare_.empty()) {
      block.bytes = std::make_unique_for_overwrite<std::byte[]>(block_size);
    } else {
      block.bytes = std::move(spare_.back());
      spare_.pop_back();
    }
    blocks_.push_back(std::move(block));
  }
  Block& block = blocks_.back();
  const Bytes result{block.bytes.get() + block.used, block.used == 0};
  block.used += length;
  in_use_ += length;
  return result;
}

void Arena::release(size_t length) {
  in_use_ -= length;
  while (length > 0) {
    Block& block = blocks_.front();
    const size_t step = std::min(length, block.used - block.released);
    block.released += step;
    length -= step;
    if (block.released < block.used) return;
    if (blocks_.size() == 1) {
      block.used = block.released = 0;
      assert(length == 0);
    } else {
      if (spare_.size() < spare_max) spare_.push_back(std::move(block.bytes));
      blocks_.pop_front();
    }
  }
}

std::span<const std::byte> SendQueue::Payload::take(size_t length) {
  while (segments_.front().length == offset_) {
    segments_ = segments_.subspan(1);
    offset_ = 0;
  }
  const Segment& segment = segments_.front();
  const size_t step = std::min(length, segment.length - offset_);
  const std::byte* start = segment.data + offset_;
  offset_ += step;
  return {start, step};
}

SendQueue::SendQueue(bool crc, uint32_t segment_payload)
    : crc_(crc), segment_payload_(segment_payload) {
  assert(segment_payload >= segment_payload_min && segment_payload <= segment_payload_max &&
         segment_payload % 4 == 0);
}

void SendQueue::post(const SendRequest& request) {
  assert(request.segments.size() <= segments_max);
  size_t total = 0;
  for (const Segment& segment : request.segments) total += segment.length;
  assert(total <= UINT32_MAX && (!request.copy || total <= inline_max));

  switch (request.kind) {
    case SendKind::send:
      return post_untagged(Opcode::send, 0, request.segments, total);
    case SendKind::send_immediate:
      return post_untagged(Opcode::send_immediate, request.immediate, request.segments, total);
    case SendKind::send_invalidate:
      assert(total == 0);
      return post_untagged(Opcode::send_invalidate, request.invalidate_rkey, {}, 0);
    case SendKind::write:
      return post_write(request, total);
    case SendKind::write_immediate:
      post_write(request, total);
      return post_immediate(request.immediate);
  }
}

// Segments of nearly equal size: a short last one would be copied where the others are placed by
// the kernel.
size_t SendQueue::balanced_segment(size_t total) const {
  const size_t count = (total + segment_payload_ - 1) / segment_payload_;
  if (count <= 1) return total;
  const size_t share = (total + count - 1) / count;
  return std::min<size_t>((share + 63) / 64 * 64, segment_payload_);
}

// A message of 0 bytes would say nothing at the peer, so none is sent.
void SendQueue::post_write(const SendRequest& request, size_t total) {
  Payload payload(request.segments);
  const bool copy = total <= inline_max;
  const size_t segment = balanced_segment(total);
  for (size_t done = 0; done < total;) {
    const size_t length = std::min(total - done, segment);
    TaggedHeader header;
    header.length = static_cast<uint16_t>(tagged_ulpdu_min + length);
    if (done + length == total) header.ddp_control |= ddp_last;
    header.rdmap_control |= static_cast<uint8_t>(Opcode::write);
    header.stag = request.rkey;
    header.offset = request.remote_address + done;
    post_fpdu(wire::bytes_of(header), payload, length, copy);
    done += length;
  }
}

void SendQueue::post_untagged(Opcode opcode, uint32_t upper_layer,
                              std::span<const Segment> segments, size_t total) {
  Payload payload(segments);
  const bool copy = total <= inline_max;
  size_t done = 0;
  do {
    const size_t length = std::min<size_t>(total - done, segment_payload_);
    UntaggedHeader header;
    header.length = static_cast<uint16_t>(untagged_ulpdu_min + length);
    if (done + length == total) header.ddp_control |= ddp_last;
    header.rdmap_control |= static_cast<uint8_t>(opcode);
    header.upper_layer = upper_layer;
    header.queue_number = send_queue_number;
    header.message_number = next_message_number_;
    header.message_offset = static_cast<uint32_t>(done);
    post_fpdu(wire::bytes_of(header), payload, length, copy);
    done += length;
  } while (done < total);
  ++next_message_number_;
}

void SendQueue::post_immediate(uint32_t immediate) {
  ImmediatePayload payload;
  payload.immediate = immediate;
  const auto bytes = wire::bytes_of(payload);
  const Segment segment{bytes.data(), bytes.size(), nullptr};
  post_untagged(Opcode::immediate_data, 0, {&segment, 1}, sizeof payload);
}

void SendQueue::post_terminate(TerminateError error, std::span<const std::byte> offending) {
  std::byte bytes[terminate_payload_max];
  const Segment segment{bytes, make_terminate_payload(bytes, error, offending), nullptr};
  UntaggedHeader header;
  header.length = static_cast<uint16_t>(untagged_ulpdu_min + segment.length);
  header.ddp_control |= ddp_last;
  header.rdmap_control |= static_cast<uint8_t>(Opcode::terminate);
  header.queue_number = terminate_queue_number;
  header.message_number = 1;
  Payload payload({&segment, 1});
  post_fpdu(wire::bytes_of(header), payload, segment.length, true);
}

void SendQueue::post_fpdu(std::span<const std::byte> header, Payload& payload, size_t length,
                          bool copy) {
  const size_t pad = pad_size(length);
  const size_t trailer_size = pad + fpdu_crc_size;
  std::byte trailer[fpdu_trailer_max] = {};
  posted_bytes_ += header.size() + length + trailer_size;

  if (copy) {
    const size_t size = header.size() + length + trailer_size;
    const Arena::Bytes bytes = arena_.allocate(size);
    std::byte* to = bytes.start;
    std::memcpy(to, header.data(), header.size());
    to += header.size();
    for (size_t left = length; left > 0;) {
      const auto part = payload.take(left);
      std::memcpy(to, part.data(), part.size());
      to += part.size();
      left -= part.size();
    }
    std::memcpy(to, trailer, trailer_size);
    if (crc_) store_crc(to + pad, wire::crc32c({bytes.start, size - fpdu_crc_size}));
    append_arena(bytes, size);
    return;
  }

  const Arena::Bytes head = arena_.allocate(header.size());
  std::memcpy(head.start, header.data(), header.size());
  append_arena(head, header.size());
  wire::Crc32c crc;
  if (crc_) crc.update(header);
  for (size_t left = length; left > 0;) {
    const auto part = payload.take(left);
    if (crc_) crc.update(part);
    Piece piece;
    piece.data = part.data();
    piece.length = static_cast<uint32_t>(part.size());
    pieces_.push_back(piece);
    left -= part.size();
  }
  if (crc_) {
    crc.update(trailer, pad);
    store_crc(trailer + pad, crc.value());
  }
  const Arena::Bytes tail = arena_.allocate(trailer_size);
  std::memcpy(tail.start, trailer, trailer_size);
  append_arena(tail, trailer_size);
}

void SendQueue::append_arena(Arena::Bytes bytes, size_t length) {
  if (!pieces_.empty() && !bytes.first_of_block) {
    Piece& last = pieces_.back();
    if (last.in_arena && last.data + last.length == bytes.start) {
      last.length += static_cast<uint32_t>(length);
      return;
    }
  }
  Piece piece;
  piece.data = bytes.start;
  piece.length = static_cast<uint32_t>(length);
  piece.in_arena = true;
  pieces_.push_back(piece);
}

size_t SendQueue::gather(std::span<iovec> vectors, size_t& bytes) const {
  const size_t count = std::min(vectors.size(), pieces_.size());
  bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    const Piece& piece = pieces_[i];
    const size_t skip = i == 0 ? front_sent_ : 0;
    vectors[i].iov_base = const_cast<std::byte*>(piece.data + skip);
    vectors[i].iov_len = piece.length - skip;
    bytes += vectors[i].iov_len;
  }
  return count;
}

void SendQueue::sent(size_t bytes) {
  sent_bytes_ += bytes;
  while (bytes > 0) {
    const Piece& piece = pieces_.front();
    const size_t step = std::min<size_t>(bytes, piece.length - front_sent_);
    if (piece.in_arena) arena_.release(step);
    bytes -= step;
    front_sent_ += step;
    if (front_sent_ == piece.length) {
      pieces_.pop_front();
      front_sent_ = 0;
    }
  }
}

void SendQueue::clear() {
  while (!pieces_.empty()) sent(pieces_.front().length - front_sent_);
}

}  // namespace rtrsnbd::fabric::soft
