// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/wire/iwarp.h"

#include <cassert>
#include <cstdio>

namespace rtrsnbd::wire::iwarp {

namespace {

struct NamedCode {
  uint8_t code;
  const char* name;
};

// Names as the registry of RDDP error codes has them, shortened.
constexpr NamedCode remote_protection[] = {
    {0x00, "invalid STag"},  {0x01, "base or bounds"},
    {0x02, "access rights"}, {0x03, "STag of another stream"},
    {0x04, "offset wraps"},  {0x09, "STag cannot be invalidated"},
    {0xff, "unspecified"}};
constexpr NamedCode remote_operation[] = {{0x05, "RDMAP version"},
                                          {0x06, "unexpected opcode"},
                                          {0x07, "catastrophic, stream"},
                                          {0x08, "catastrophic, global"},
                                          {0x09, "STag cannot be invalidated"},
                                          {0xff, "unspecified"}};
constexpr NamedCode tagged_buffer[] = {{0x00, "invalid STag"},
                                       {0x01, "base or bounds"},
                                       {0x02, "STag of another stream"},
                                       {0x03, "offset wraps"},
                                       {0x04, "DDP version"}};
constexpr NamedCode untagged_buffer[] = {{0x01, "queue number"},     {0x02, "no buffer"},
                                         {0x03, "message number"},   {0x04, "message offset"},
                                         {0x05, "message too long"}, {0x06, "DDP version"}};
constexpr NamedCode mpa[] = {{0x01, "connection lost"},
                             {0x02, "CRC"},
                             {0x03, "framing"},
                             {0x04, "set-up frame"},
                             {0x05, "local catastrophic"},
                             {0x06, "insufficient inbound reads"},
                             {0x07, "no matching RTR"}};

struct NamedType {
  uint8_t layer_type;
  const char* name;
  std::span<const NamedCode> codes;
};

constexpr NamedType types[] = {
    {0x00, "RDMAP local", {}},
    {0x01, "RDMAP remote protection", remote_protection},
    {0x02, "RDMAP remote operation", remote_operation},
    {0x10, "DDP local", {}},
    {0x11, "DDP tagged buffer", tagged_buffer},
    {0x12, "DDP untagged buffer", untagged_buffer},
    {0x20, "MPA", mpa},
};

}  // namespace

size_t make_terminate_payload(std::byte* to, TerminateError error,
                              std::span<const std::byte> header) {
  assert(header.empty() || header.size() == sizeof(TaggedHeader) ||
         header.size() == sizeof(UntaggedHeader));
  TerminateControl control;
  control.layer_type = error.layer_type;
  control.code = error.code;
  if (!header.empty()) control.flags = terminate_has_length | terminate_has_ddp_header;
  store(to, control);
  if (header.empty()) return sizeof control;

  const auto ddp_header = header.subspan(fpdu_length_size);
  const size_t ulpdu = load<Be16>(header.data());
  // The length of the payload without headers, as Linux gives it.
  store(to + sizeof control, Be16(static_cast<uint16_t>(ulpdu - ddp_header.size())));
  std::memcpy(to + sizeof control + 2, ddp_header.data(), ddp_header.size());
  return sizeof control + 2 + ddp_header.size();
}

std::string describe(TerminateError error) {
  char numbers[16];
  std::snprintf(numbers, sizeof numbers, " (%02x/%02x)", error.layer_type, error.code);
  for (const NamedType& type : types) {
    if (type.layer_type != error.layer_type) continue;
    std::string text = type.name;
    for (const NamedCode& code : type.codes)
      if (code.code == error.code) text.append(": ").append(code.name);
    return text + numbers;
  }
  return std::string("unknown error") + numbers;
}

std::string describe_terminate(std::span<const std::byte> payload) {
  if (payload.size() < sizeof(TerminateControl)) return "a Terminate without an error code";
  const auto control = load<TerminateControl>(payload.data());
  const TerminateError error{control.layer_type, control.code};
  std::string text = describe(error);
  if ((control.flags & 0x07) != 0 || (control.flags & 0xe0) == 0) {
    const auto swapped = static_cast<uint8_t>((error.layer_type << 4) | (error.layer_type >> 4));
    if (swapped != error.layer_type)
      text += ", or with mirrored control bits " + describe({swapped, error.code});
  }
  return text;
}

std::string_view opcode_name(uint8_t opcode) {
  static constexpr std::string_view names[] = {"RDMA Write",
                                               "RDMA Read Request",
                                               "RDMA Read Response",
                                               "Send",
                                               "Send with Invalidate",
                                               "Send with SE",
                                               "Send with SE and Invalidate",
                                               "Terminate",
                                               "Immediate Data",
                                               "Immediate Data with SE",
                                               "Atomic Request",
                                               "Atomic Response",
                                               "Send with Immediate"};
  return opcode < std::size(names) ? names[opcode] : std::string_view("unassigned opcode");
}

}  // namespace rtrsnbd::wire::iwarp
