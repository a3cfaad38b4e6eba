// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/wire/rtrs.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "protocol/wire/rnbd.h"

namespace rtrsnbd::wire {

namespace {

constexpr uint16_t major_version(uint16_t version) {
  return version >> 8;
}

// The largest header our own client ever puts behind the data: an OPEN with its READ message.
constexpr uint32_t header_needed = sizeof(Open) + sizeof(ReadMessage) + sizeof(Descriptor);

}  // namespace

tl::expected<ConnectRequest, int> parse_connect_request(std::span<const std::byte> bytes) {
  // Transports pad private data with zeroes, so longer is not wrong.
  if (bytes.size() < sizeof(ConnectRequest)) return tl::unexpected(ECONNRESET);
  const auto request = load<ConnectRequest>(bytes.data());
  if (request.magic != rtrs_magic) return tl::unexpected(ECONNRESET);
  if (major_version(request.version) != major_version(rtrs_version))
    return tl::unexpected(ECONNRESET);
  if (request.cid_num > connections_per_path_max) return tl::unexpected(ECONNRESET);
  if (request.cid >= request.cid_num) return tl::unexpected(ECONNRESET);
  return request;
}

tl::expected<ConnectResponse, int> parse_connect_response(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(ConnectResponse)) return tl::unexpected(ECONNRESET);
  const auto response = load<ConnectResponse>(bytes.data());
  if (response.magic != rtrs_magic) return tl::unexpected(ECONNRESET);
  if (major_version(response.version) != major_version(rtrs_version))
    return tl::unexpected(ECONNRESET);
  return response;
}

bool geometry_acceptable(const ConnectResponse& response) {
  // Sizes are summed in 64 bits: two honest-looking halves must not wrap around to a small chunk.
  const uint64_t chunk_size = uint64_t{response.max_io_size} + response.max_hdr_size;
  return response.queue_depth != 0 && response.max_io_size >= sector_size &&
         response.max_hdr_size >= header_needed && geometry_fits(response.queue_depth, chunk_size);
}

bool session_name_allowed(std::string_view name) {
  constexpr size_t session_name_max = sizeof(InfoRequest::session_name) - 1;
  return !name.empty() && name.size() <= session_name_max &&
         std::none_of(name.begin(), name.end(),
                      [](char c) { return c == '/' || c == '.' || c == '\0'; });
}

tl::expected<std::string_view, int> parse_info_request(std::span<const std::byte> bytes,
                                                       InfoRequest& copy) {
  if (bytes.size() != sizeof(InfoRequest)) return tl::unexpected(EINVAL);
  copy = load<InfoRequest>(bytes.data());
  if (copy.type != static_cast<uint16_t>(RtrsType::info_request)) return tl::unexpected(EINVAL);
  const auto end = std::find(copy.session_name.begin(), copy.session_name.end(), '\0');
  if (end == copy.session_name.end()) return tl::unexpected(EINVAL);
  const std::string_view name(copy.session_name.data(),
                              static_cast<size_t>(end - copy.session_name.begin()));
  if (!session_name_allowed(name)) return tl::unexpected(EINVAL);
  return name;
}

bool make_info_request(std::string_view session_name, InfoRequest& request) {
  if (!session_name_allowed(session_name)) return false;
  request = InfoRequest{};
  std::copy(session_name.begin(), session_name.end(), request.session_name.begin());
  return true;
}

int parse_info_response(std::span<const std::byte> bytes, uint32_t chunk_size,
                        std::span<ChunkWindow> chunks) {
  if (bytes.size() < sizeof(InfoResponseHeader)) return EPROTO;
  if (bytes.size() > sizeof(InfoResponseHeader) + chunks.size() * sizeof(Descriptor)) return EPROTO;
  const auto header = load<InfoResponseHeader>(bytes.data());
  if (header.type != static_cast<uint16_t>(RtrsType::info_response)) return EPROTO;
  const uint32_t count = header.descriptor_count;
  if (bytes.size() < sizeof(InfoResponseHeader) + count * sizeof(Descriptor)) return EPROTO;
  if (count == 0 || chunks.size() % count != 0) return EPROTO;
  // Stronger than the kernel client, which looks at the count of descriptors instead of chunks.
  if (chunk_size == 0 || !geometry_fits(static_cast<uint32_t>(chunks.size()), chunk_size))
    return EPROTO;

  size_t chunk = 0;
  const std::byte* next = bytes.data() + sizeof(InfoResponseHeader);
  for (uint32_t i = 0; i < count; ++i, next += sizeof(Descriptor)) {
    const auto descriptor = load<Descriptor>(next);
    const uint32_t length = descriptor.length;
    if (length == 0 || length % chunk_size != 0) return EPROTO;
    if (descriptor.address > UINT64_MAX - length) return EPROTO;
    const uint32_t covered = length / chunk_size;
    if (covered > chunks.size() - chunk) return EPROTO;
    for (uint32_t j = 0; j < covered; ++j)
      chunks[chunk++] = {descriptor.address + uint64_t{j} * chunk_size, descriptor.key};
  }
  return chunk == chunks.size() ? 0 : EPROTO;
}

tl::expected<RkeyResponse, int> parse_rkey_response(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(RkeyResponse)) return tl::unexpected(EPROTO);
  const auto response = load<RkeyResponse>(bytes.data());
  if (response.type != static_cast<uint16_t>(RtrsType::rkey_response))
    return tl::unexpected(EPROTO);
  return response;
}

tl::expected<IoRequest, IoRequestError> parse_io_request(std::span<const std::byte> chunk,
                                                         uint32_t offset, uint32_t max_io_size) {
  constexpr auto refused = tl::unexpected(IoRequestError::protocol);
  if (offset >= chunk.size()) return refused;

  // The one look at the peer's memory: everything below works on this copy.
  std::array<std::byte, sizeof(ReadMessage) + sizeof(Descriptor)> copy{};
  const size_t there = std::min(copy.size(), chunk.size() - offset);
  std::memcpy(copy.data(), chunk.data() + offset, there);

  if (there < sizeof(WriteMessage)) return refused;
  const auto common = load<WriteMessage>(copy.data());
  if (common.user_length > offset) return refused;

  IoRequest request;
  request.user_length = common.user_length;
  request.data_length = offset - common.user_length;
  if (request.data_length > max_io_size) return refused;

  if (common.type == static_cast<uint16_t>(RtrsType::write)) {
    request.type = RtrsType::write;
    return request;
  }
  if (common.type != static_cast<uint16_t>(RtrsType::read)) return refused;

  request.type = RtrsType::read;
  if (there < sizeof(ReadMessage)) return refused;
  const auto read = load<ReadMessage>(copy.data());
  if (read.descriptor_count == 0)
    return request;  // nothing to invalidate either, whatever the flag says
  if (read.descriptor_count != 1 || there < copy.size()) return refused;
  request.has_descriptor = true;
  request.need_invalidation = (read.flags & read_flag_need_invalidation) != 0;
  request.descriptor = load<Descriptor>(copy.data() + sizeof(ReadMessage));
  // The length of our write into the peer: never more than what lies in front of its user message.
  if (request.data_length == 0 || request.descriptor.length != request.data_length) return refused;
  return request;
}

}  // namespace rtrsnbd::wire
