// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/soft/receiver.h"

#include <algorithm>
#include <cassert>
#include <cinttypes>
#include <cstdio>
#include <cstring>

namespace rtrsnbd::fabric::soft {

using namespace wire::iwarp;

namespace {

// RFC 5040 and 5041 want the offending header back for what went wrong with a header's fields, but
// not where the header as such cannot be trusted.
bool carries_header(TerminateError error) {
  const uint8_t layer = error.layer_type;
  if (layer == 0x11 || layer == 0x12)
    return error != error::tagged_ddp_version && error != error::untagged_ddp_version;
  return layer == 0x01 || error == error::invalidate_unknown;
}

bool is_tagged(const std::byte* fpdu) {
  return (std::to_integer<uint8_t>(fpdu[2]) & ddp_tagged) != 0;
}
bool is_last(const std::byte* fpdu) {
  return (std::to_integer<uint8_t>(fpdu[2]) & ddp_last) != 0;
}
uint8_t opcode_of(const std::byte* fpdu) {
  return std::to_integer<uint8_t>(fpdu[3]) & rdmap_opcode_mask;
}

bool is(uint8_t opcode, Opcode expected) {
  return opcode == static_cast<uint8_t>(expected);
}
bool is_immediate_data(uint8_t opcode) {
  return is(opcode, Opcode::immediate_data) || is(opcode, Opcode::immediate_data_solicited);
}
bool is_invalidate(uint8_t opcode) {
  return is(opcode, Opcode::send_invalidate) || is(opcode, Opcode::send_solicited_invalidate);
}
bool takes_receive(uint8_t opcode) {
  return is(opcode, Opcode::send) || is(opcode, Opcode::send_solicited) || is_invalidate(opcode) ||
         is_immediate_data(opcode) || is(opcode, Opcode::send_immediate);
}

template <typename... Arguments>
std::string format(const char* pattern, Arguments... arguments) {
  char text[200];
  std::snprintf(text, sizeof text, pattern, arguments...);
  return text;
}

constexpr size_t length_known = 4;  // bytes after which length and kind of an FPDU can be read

}  // namespace

Receiver::Receiver(KeyTable& keys, DomainId domain, ReceiveQueue& receives, bool crc)
    : keys_(keys),
      domain_(domain),
      receives_(receives),
      crc_(crc),
      buffer_(std::make_unique_for_overwrite<std::byte[]>(buffer_size)) {}

bool Receiver::fail(TerminateError error, std::string detail, std::span<const std::byte> header) {
  status_ = Status::failed;
  failure_.error = error;
  failure_.header_size = 0;
  if (carries_header(error)) {
    std::copy(header.begin(), header.end(), failure_.header.begin());
    failure_.header_size = header.size();
  }
  detail_ = describe(error);
  if (!detail.empty()) detail_ += ": " + detail;
  return false;
}

std::span<const iovec> Receiver::begin() {
  if (status_ != Status::running) return {};
  assert(!direct_.placement);

  if (direct_.active) {
    assert(begin_ == end_);
    begin_ = end_ = 0;
    size_t count = 0;
    offered_ = 0;
    if (direct_.missing > 0) {
      // The key may have been revoked since the last piece.
      TerminateError error;
      direct_.placement =
          keys_.place(domain_, direct_.header.stag, direct_.offset, direct_.missing, error);
      if (!direct_.placement) {
        fail(error,
             format("key 0x%08x was revoked in the middle of a write", direct_.header.stag.get()),
             wire::bytes_of(direct_.header));
        return {};
      }
      vectors_[count++] = {direct_.placement.target(), direct_.missing};
      offered_ += direct_.missing;
    }
    vectors_[count++] = {direct_.trailer.data() + direct_.trailer_have,
                         direct_.trailer_size - direct_.trailer_have};
    vectors_[count++] = {buffer_.get(), room_};
    offered_ += direct_.trailer_size - direct_.trailer_have + room_;
    return {vectors_.data(), count};
  }

  const size_t have = end_ - begin_;
  const size_t rest = wanted_ > have ? wanted_ - have : 0;
  if (begin_ > 0 && (have <= room_min || end_ + std::max(rest, room_) > buffer_size)) {
    std::memmove(buffer_.get(), buffer_.get() + begin_, have);
    begin_ = 0;
    end_ = have;
  }
  offered_ = std::min(std::max(rest, room_), buffer_size - end_);
  assert(offered_ >= rest && offered_ > 0);
  vectors_[0] = {buffer_.get() + end_, offered_};
  return {vectors_.data(), 1};
}

Receiver::Status Receiver::end(size_t count, Sink& sink) {
  assert(count <= offered_);
  if (status_ != Status::running) return status_;
  large_seen_ = false;
  const bool filled = count == offered_;

  if (direct_.active) {
    count -= take_direct(count);
    direct_.placement.reset();
    if (status_ != Status::running) return status_;
  }
  end_ += count;
  if (!direct_.active)
    while (parse_one(sink) == Step::done) {
    }
  if (begin_ == end_) begin_ = end_ = 0;

  if (large_seen_)
    room_ = room_min;
  else if (filled)
    room_ = std::min(room_ * 2, room_max);
  return status_;
}

// Takes what came for the FPDU that is placed directly; returns how many bytes those were.
size_t Receiver::take_direct(size_t count) {
  const size_t placed = std::min(count, direct_.missing);
  if (crc_ && placed > 0) direct_.crc.update(direct_.placement.target(), placed);
  direct_.missing -= placed;
  direct_.offset += placed;
  const size_t trailer = std::min(count - placed, direct_.trailer_size - direct_.trailer_have);
  direct_.trailer_have += trailer;
  if (direct_.trailer_have == direct_.trailer_size)
    finish_direct(std::span(direct_.trailer).first(direct_.trailer_size));
  large_seen_ = true;
  return placed + trailer;
}

bool Receiver::finish_direct(std::span<const std::byte> trailer) {
  direct_.active = false;
  const size_t pad = trailer.size() - fpdu_crc_size;
  if (crc_) {
    direct_.crc.update(trailer.first(pad));
    if (direct_.crc.value() != load_crc(trailer.data() + pad)) return fail(error::crc, {}, {});
  }
  finish_tagged(wire::bytes_of(direct_.header).data());
  return true;
}

void Receiver::finish_tagged(const std::byte* fpdu) {
  ++fpdus_;
  tagged_unfinished_ = !is_last(fpdu);
  if (is_last(fpdu)) ++messages_;
}

Receiver::Step Receiver::parse_one(Sink& sink) {
  const size_t available = end_ - begin_;
  const std::byte* fpdu = buffer_.get() + begin_;
  wanted_ = length_known;
  if (available < length_known) return Step::starved;

  const size_t ulpdu = wire::load<wire::Be16>(fpdu);
  const size_t header_ulpdu =
      ulpdu >= tagged_ulpdu_min && is_tagged(fpdu) ? tagged_ulpdu_min : untagged_ulpdu_min;
  if (ulpdu < header_ulpdu) {
    fail(error::framing, format("FPDU of %zu bytes is too short for a header", ulpdu), {});
    return Step::over;
  }
  const size_t payload = ulpdu - header_ulpdu;
  const size_t header_size = header_ulpdu + fpdu_length_size;
  const size_t total = fpdu_size(ulpdu);
  wanted_ = total;
  if (payload >= large_payload) large_seen_ = true;

  if (available < total) {
    if (!is_tagged(fpdu) || payload < direct_min || available < header_size ||
        available - header_size >= payload)
      return Step::starved;
    return start_direct(fpdu, payload, available);
  }

  if (crc_ &&
      wire::crc32c({fpdu, total - fpdu_crc_size}) != load_crc(fpdu + total - fpdu_crc_size)) {
    fail(error::crc, {}, {});
    return Step::over;
  }
  if (!check_versions(fpdu)) return Step::over;
  wanted_ = length_known;
  if (is_tagged(fpdu)) {
    if (!place(fpdu, payload)) return Step::over;
    finish_tagged(fpdu);
    begin_ += total;
    return Step::done;
  }
  if (is(opcode_of(fpdu), Opcode::terminate)) {
    on_terminate(fpdu, payload);
    return Step::over;
  }
  if (!check_untagged(fpdu, payload)) return Step::over;
  ++fpdus_;
  begin_ += total;
  return deliver_untagged(fpdu, fpdu + header_size, payload, sink) ? Step::done : Step::over;
}

// What must hold before a byte of the header beyond the control fields is believed.
bool Receiver::check_versions(const std::byte* fpdu) {
  const bool tagged = is_tagged(fpdu);
  if ((std::to_integer<uint8_t>(fpdu[2]) & ddp_version_mask) != ddp_version)
    return fail(tagged ? error::tagged_ddp_version : error::untagged_ddp_version, {}, {});
  if ((std::to_integer<uint8_t>(fpdu[3]) & rdmap_version_mask) != rdmap_version)
    return fail(error::rdmap_version, {}, {});

  const uint8_t opcode = opcode_of(fpdu);
  const bool known =
      tagged ? is(opcode, Opcode::write) : takes_receive(opcode) || is(opcode, Opcode::terminate);
  if (!known)
    return fail(error::unexpected_opcode,
                std::string(opcode_name(opcode)) + (tagged ? ", tagged" : ", untagged"), {});
  // A Terminate may come between the segments of a message that its sender gave up.
  if (is(opcode, Opcode::terminate)) return true;
  if (untagged_.active && (tagged || opcode != untagged_.opcode))
    return fail(error::stream_catastrophic,
                std::string(opcode_name(opcode)) + " in the middle of a message", {});
  if (!tagged && tagged_unfinished_)
    return fail(error::stream_catastrophic,
                std::string(opcode_name(opcode)) + " in the middle of a write", {});
  return true;
}

bool Receiver::check_untagged(const std::byte* fpdu, size_t payload) {
  const auto header = wire::load<UntaggedHeader>(fpdu);
  const auto bytes = wire::bytes_of(header);
  const uint8_t opcode = opcode_of(fpdu);

  if (header.queue_number != send_queue_number)
    return fail(error::invalid_queue, format("queue %u", header.queue_number.get()), bytes);
  if (header.message_number != next_message_number_)
    return fail(
        error::message_number,
        format("message %u where %u was next", header.message_number.get(), next_message_number_),
        bytes);
  if (!untagged_.active) {
    // Whatever else is wrong with this message ends the connection, and the receive with it.
    const auto posted = receives_.take();
    if (!posted)
      return fail(error::no_receive, std::string(opcode_name(opcode)) + " without a posted receive",
                  bytes);
    untagged_.receive = *posted;
  }
  const size_t expected = untagged_.active ? untagged_.offset : 0;
  if (header.message_offset != expected)
    return fail(error::message_offset,
                format("offset %u where %zu was next", header.message_offset.get(), expected),
                bytes);
  if (is_immediate_data(opcode)) {
    if (payload != sizeof(ImmediatePayload) || !is_last(fpdu))
      return fail(
          error::operation_unspecified,
          format("Immediate Data of %zu bytes%s", payload, is_last(fpdu) ? "" : ", segmented"), {});
  } else if (payload > untagged_.receive.length - expected) {
    return fail(error::message_too_long,
                format("message of at least %zu bytes into a receive of %zu", expected + payload,
                       untagged_.receive.length),
                bytes);
  }
  // Keys are checked when they are named, so that nothing of a bad message is placed; and again
  // when the message is complete.
  if (!untagged_.active && is_invalidate(opcode))
    if (const auto refused = keys_.check_remote_invalidate(domain_, header.upper_layer))
      return fail(*refused, format("key 0x%08x", header.upper_layer.get()), bytes);
  return true;
}

bool Receiver::deliver_untagged(const std::byte* fpdu, const std::byte* payload, size_t length,
                                Sink& sink) {
  const auto header = wire::load<UntaggedHeader>(fpdu);
  const uint8_t opcode = opcode_of(fpdu);
  if (!untagged_.active) {
    untagged_.active = true;
    untagged_.opcode = opcode;
    untagged_.upper_layer = header.upper_layer;
    untagged_.offset = 0;
  }
  Completion completion;
  if (is_immediate_data(opcode)) {
    completion.has_immediate = true;
    completion.immediate = wire::load<ImmediatePayload>(payload).immediate;
  } else if (length > 0) {
    std::memcpy(untagged_.receive.buffer + untagged_.offset, payload, length);
    untagged_.offset += static_cast<uint32_t>(length);
  }
  if (!is_last(fpdu)) return true;

  untagged_.active = false;
  ++next_message_number_;
  ++messages_;
  completion.id = untagged_.receive.id;
  completion.byte_count = untagged_.offset;
  if (is(opcode, Opcode::send_immediate)) {
    completion.has_immediate = true;
    completion.immediate = untagged_.upper_layer;
  }
  if (is_invalidate(opcode)) {
    if (const auto refused = keys_.remote_invalidate(domain_, untagged_.upper_layer))
      return fail(*refused, format("key 0x%08x", untagged_.upper_layer), wire::bytes_of(header));
    completion.invalidated_rkey = untagged_.upper_layer;
  }
  if (sink.on_completion(completion)) return true;
  status_ = Status::stopped;
  return false;
}

// A whole tagged FPDU that lies in the buffer.
bool Receiver::place(const std::byte* fpdu, size_t payload) {
  if (payload == 0) return true;  // names no memory, so nothing of it is checked
  const auto header = wire::load<TaggedHeader>(fpdu);
  TerminateError error;
  const auto placement = keys_.place(domain_, header.stag, header.offset, payload, error);
  if (!placement)
    return fail(error,
                format("write of %zu bytes at 0x%" PRIx64 ", key 0x%08x", payload,
                       header.offset.get(), header.stag.get()),
                wire::bytes_of(header));
  std::memcpy(placement.target(), fpdu + sizeof header, payload);
  return true;
}

// A large tagged FPDU of which a part is still to come: what is there is placed, before its
// checksum is known; a bad one can spoil nothing but memory the peer may write anyway.
Receiver::Step Receiver::start_direct(const std::byte* fpdu, size_t payload, size_t available) {
  if (!check_versions(fpdu)) return Step::over;
  const auto header = wire::load<TaggedHeader>(fpdu);
  const size_t here = available - sizeof header;
  TerminateError error;
  const auto placement = keys_.place(domain_, header.stag, header.offset, payload, error);
  if (!placement) {
    fail(error,
         format("write of %zu bytes at 0x%" PRIx64 ", key 0x%08x", payload, header.offset.get(),
                header.stag.get()),
         wire::bytes_of(header));
    return Step::over;
  }
  std::memcpy(placement.target(), fpdu + sizeof header, here);

  direct_.active = true;
  direct_.header = header;
  direct_.offset = header.offset + here;
  direct_.missing = payload - here;
  direct_.trailer_have = 0;
  direct_.trailer_size = pad_size(payload) + fpdu_crc_size;
  direct_.crc = {};
  if (crc_) direct_.crc.update(fpdu, available);
  begin_ = end_ = 0;
  wanted_ = length_known;
  return Step::starved;
}

void Receiver::on_terminate(const std::byte* fpdu, size_t payload) {
  status_ = Status::terminated;
  detail_ = describe_terminate({fpdu + sizeof(UntaggedHeader), payload});
}

}  // namespace rtrsnbd::fabric::soft
