// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/soft/mpa.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace rtrsnbd::fabric::soft {

using namespace wire::iwarp;

std::span<std::byte> MpaReader::buffer() {
  if (state_ != State::reading) return {};
  return std::span(frame_).subspan(have_, need_ - have_);
}

void MpaReader::break_off(std::string_view why) {
  state_ = State::broken;
  why_ = why;
}

void MpaReader::received(size_t count) {
  assert(state_ == State::reading && count <= need_ - have_);
  have_ += count;
  if (have_ < need_) return;
  if (have_ == sizeof(MpaHeader)) {
    check_header();
    if (state_ != State::reading) return;
    need_ += wire::load<MpaHeader>(frame_.data()).private_data_length;
    if (have_ < need_) return;
  }
  if (terms_.enhanced) check_enhanced();
  if (state_ == State::reading) state_ = State::complete;
}

void MpaReader::check_header() {
  const auto header = wire::load<MpaHeader>(frame_.data());
  const bool request = kind_ == Kind::request;
  const std::string_view key = request ? mpa_request_key : mpa_reply_key;
  if (std::string_view(header.key.data(), header.key.size()) != key)
    return break_off("not an MPA frame");
  if (header.revision > 2) return break_off("unknown MPA revision");
  if (header.private_data_length > mpa_private_data_max) return break_off("too much private data");

  terms_.revision = header.revision;
  terms_.crc = (header.flags & mpa_flag_crc) != 0;
  terms_.enhanced = header.revision == 2 && (header.flags & mpa_flag_enhanced) != 0;
  rejected_ = (header.flags & mpa_flag_rejected) != 0;

  if (request) {
    if (header.revision == 0) return break_off("unknown MPA revision");
    if (rejected_) return break_off("a request with the reject flag");
    if ((header.flags & mpa_flag_markers) != 0) {
      // Refused before the private data is read: whatever it says, we have no markers to give.
      state_ = State::refused;
      why_ = "markers wanted";
      return;
    }
  } else {
    if (header.revision > sent_.revision) return break_off("MPA revision above ours");
    if ((header.flags & mpa_flag_markers) != 0) return break_off("markers wanted");
    if (sent_.enhanced && !terms_.enhanced) return break_off("reply without the enhanced set-up");
  }
  if (terms_.enhanced && header.private_data_length < sizeof(MpaEnhanced)) {
    if (!request) return break_off("enhanced set-up without its fields");
    state_ = State::refused;
    why_ = "enhanced set-up without its fields";
  }
}

void MpaReader::check_enhanced() {
  const auto enhanced = wire::load<MpaEnhanced>(frame_.data() + sizeof(MpaHeader));
  terms_.peer_to_peer = (enhanced.inbound & mpa_peer_to_peer) != 0;
  terms_.rtr_write = (enhanced.outbound & mpa_rtr_write) != 0;
}

std::span<const std::byte> MpaReader::private_data() const {
  if (state_ != State::complete) return {};
  const size_t start = sizeof(MpaHeader) + (terms_.enhanced ? sizeof(MpaEnhanced) : 0);
  return std::span(frame_).subspan(start, have_ - start);
}

namespace {

size_t make_frame(MpaFrame& frame, std::string_view key, uint8_t flags, uint8_t revision,
                  const MpaEnhanced* enhanced, std::span<const std::byte> private_data) {
  assert(private_data.size() <= private_data_max);
  MpaHeader header;
  std::copy(key.begin(), key.end(), header.key.begin());
  header.flags = flags;
  header.revision = revision;
  std::byte* to = frame.data() + sizeof header;
  if (enhanced != nullptr) {
    header.flags |= mpa_flag_enhanced;
    wire::store(to, *enhanced);
    to += sizeof *enhanced;
  }
  std::copy(private_data.begin(), private_data.end(), to);
  to += private_data.size();
  const auto total = static_cast<size_t>(to - frame.data());
  header.private_data_length = static_cast<uint16_t>(total - sizeof header);
  wire::store(frame.data(), header);
  return total;
}

size_t make_reply(MpaFrame& frame, const MpaTerms& request, uint8_t flags, bool grant,
                  std::span<const std::byte> private_data) {
  // We neither serve nor issue RDMA READs, so both depths are 0 whatever was asked for.
  MpaEnhanced enhanced;
  if (grant && request.peer_to_peer && request.rtr_write) {
    enhanced.inbound = mpa_peer_to_peer;
    enhanced.outbound = mpa_rtr_write;
  }
  return make_frame(frame, mpa_reply_key, flags, request.revision,
                    request.enhanced ? &enhanced : nullptr, private_data);
}

}  // namespace

size_t make_mpa_request(MpaFrame& frame, bool crc, std::span<const std::byte> private_data) {
  return make_frame(frame, mpa_request_key, crc ? mpa_flag_crc : uint8_t{0}, 1, nullptr,
                    private_data);
}

size_t make_mpa_accept(MpaFrame& frame, const MpaTerms& request, bool crc,
                       std::span<const std::byte> private_data) {
  return make_reply(frame, request, crc ? mpa_flag_crc : uint8_t{0}, true, private_data);
}

size_t make_mpa_reject(MpaFrame& frame, const MpaTerms& request,
                       std::span<const std::byte> private_data) {
  const auto flags = static_cast<uint8_t>(mpa_flag_rejected | (request.crc ? mpa_flag_crc : 0));
  return make_reply(frame, request, flags, false, private_data);
}

}  // namespace rtrsnbd::fabric::soft
