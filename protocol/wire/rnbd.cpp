// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/wire/rnbd.h"

#include <algorithm>
#include <cerrno>

namespace rtrsnbd::wire {

namespace {

constexpr size_t common_header_size = 4;  // type and padding

template <typename Message>
tl::expected<Message, int> parse(std::span<const std::byte> bytes, RnbdType type, int error) {
  if (bytes.size() < sizeof(Message)) return tl::unexpected(error);
  const auto message = load<Message>(bytes.data());
  if (message.type != static_cast<uint16_t>(type)) return tl::unexpected(error);
  return message;
}

}  // namespace

tl::expected<RnbdType, int> parse_rnbd_type(std::span<const std::byte> user) {
  if (user.size() < common_header_size) return tl::unexpected(EINVAL);
  const uint16_t type = load<Le16>(user.data());
  if (type > static_cast<uint16_t>(RnbdType::close)) return tl::unexpected(EINVAL);
  return static_cast<RnbdType>(type);
}

tl::expected<SessionInfo, int> parse_session_info(std::span<const std::byte> user) {
  return parse<SessionInfo>(user, RnbdType::session_info, EINVAL);
}

tl::expected<std::string_view, int> parse_open(std::span<const std::byte> user, Open& copy) {
  const auto open = parse<Open>(user, RnbdType::open, EINVAL);
  if (!open) return tl::unexpected(open.error());
  copy = *open;
  const auto end = std::find(copy.device_name.begin(), copy.device_name.end(), '\0');
  if (end == copy.device_name.end() || end == copy.device_name.begin())
    return tl::unexpected(EINVAL);
  return std::string_view(copy.device_name.data(),
                          static_cast<size_t>(end - copy.device_name.begin()));
}

tl::expected<Close, int> parse_close(std::span<const std::byte> user) {
  return parse<Close>(user, RnbdType::close, EINVAL);
}

tl::expected<Io, int> parse_io(std::span<const std::byte> user) {
  if (user.size() < io_length_min) return tl::unexpected(EINVAL);
  Io io;
  // Peers without the priority field send a shorter message; the field is then zero.
  std::memcpy(&io, user.data(), user.size() < sizeof(Io) ? io_length_min : sizeof(Io));
  if (io.type != static_cast<uint16_t>(RnbdType::io)) return tl::unexpected(EINVAL);
  return io;
}

tl::expected<OpenResponse, int> parse_open_response(std::span<const std::byte> bytes) {
  constexpr uint16_t block_size_max = 32768;
  constexpr uint64_t sectors_max = static_cast<uint64_t>(INT64_MAX) / sector_size;
  const auto response = parse<OpenResponse>(bytes, RnbdType::open_response, EPROTO);
  if (!response) return response;
  const uint16_t block_size = response->logical_block_size;
  if (block_size < sector_size || block_size > block_size_max || !std::has_single_bit(block_size))
    return tl::unexpected(EPROTO);
  if (response->sector_count > sectors_max) return tl::unexpected(EPROTO);
  return response;
}

tl::expected<SessionInfo, int> parse_session_info_response(std::span<const std::byte> bytes) {
  return parse<SessionInfo>(bytes, RnbdType::session_info_response, EPROTO);
}

bool make_open(std::string_view device_name, AccessMode mode, Open& open) {
  if (device_name.empty() || device_name.size() > device_name_max) return false;
  if (device_name.find('\0') != std::string_view::npos) return false;
  open = Open{};
  open.access_mode = static_cast<uint8_t>(mode);
  std::copy(device_name.begin(), device_name.end(), open.device_name.begin());
  return true;
}

}  // namespace rtrsnbd::wire
