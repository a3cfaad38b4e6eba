// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/wire/iwarp.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "protocol/wire/crc32c.h"
#include "tests/support/hex.h"

namespace rtrsnbd::wire::iwarp {

using test::hex;
using test::to_hex;

TEST_CASE("the MPA request of Linux's software iWARP reads field by field") {
  const auto frame =
      hex("4d504120494420526571204672616d651002003c00010001101112131415161718191a1b1c1d1e1f"
          "202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f4041424344454647");
  const auto header = load<MpaHeader>(frame.data());
  CHECK(std::string_view(header.key.data(), header.key.size()) == mpa_request_key);
  CHECK(header.flags == mpa_flag_enhanced);
  CHECK(header.revision == 2);
  CHECK(header.private_data_length == 60);
  const auto enhanced = load<MpaEnhanced>(frame.data() + sizeof header);
  CHECK((enhanced.inbound & mpa_read_depth_mask) == 1);
  CHECK((enhanced.outbound & mpa_read_depth_mask) == 1);
}

TEST_CASE("FPDU headers from captures read field by field") {
  SUBCASE("Send of the kernel") {
    const auto fpdu =
        hex("0022414300000000000000000000000100000000000055aa9dfb0420a12b8f0000000fa000000000");
    const auto header = load<UntaggedHeader>(fpdu.data());
    CHECK(fpdu_size(header.length) == fpdu.size());
    CHECK(header.ddp_control == (ddp_last | ddp_version));
    CHECK(header.rdmap_control == (rdmap_version | static_cast<uint8_t>(Opcode::send)));
    CHECK(header.queue_number == send_queue_number);
    CHECK(header.message_number == 1);
    CHECK(header.message_offset == 0);
    CHECK(load_crc(fpdu.data() + fpdu.size() - fpdu_crc_size) == 0);
  }
  SUBCASE("Read Request of the kernel") {
    const auto fpdu =
        hex("002e414100000000000000010000000100000000ea32bd0000005590fec3f96000000fa0a12b8f00"
            "000055aa9dfb042000000000");
    const auto header = load<UntaggedHeader>(fpdu.data());
    CHECK(fpdu_size(header.length) == fpdu.size());
    CHECK((header.rdmap_control & rdmap_opcode_mask) == static_cast<uint8_t>(Opcode::read_request));
    CHECK(header.queue_number == 1);
  }
  SUBCASE("segments of a Write of the kernel") {
    const auto first = load<TaggedHeader>(hex("05a281402838be00000055aa9dfaf430").data());
    const auto last = load<TaggedHeader>(hex("0486c1402838be00000055aa9dfaff58").data());
    CHECK(first.length - tagged_ulpdu_min == 1428);
    CHECK(first.ddp_control == (ddp_tagged | ddp_version));
    CHECK(last.ddp_control == (ddp_tagged | ddp_last | ddp_version));
    CHECK(first.stag == 0x2838be00);
    CHECK(first.offset == 0x55aa9dfaf430);
    CHECK(last.offset == first.offset + 2 * 1428);
    CHECK(last.length - tagged_ulpdu_min == 1144);
  }
}

TEST_CASE("the checksum of every FPDU made with one is good over all but itself") {
  for (const char* text :
       {"00224143000000000000000000000001000000000000000000000000000000000000000084609a12",
        "0016414700000000000000020000000100000000200600006540fb1b",
        "0026414700000000000000020000000100000000110003000008c14012345600000000000000000089db3c78",
        "0013c14000012a0700007f000000100068656c6c6f000000c5b54c0e",
        "0022814000012a0700007f0000002000000102030405060708090a0b0c0d0e0f101112130f3b9e42",
        "001ac14000012a0700007f00000020141415161718191a1b1c1d1e1f77f9c819",
        "001a414800000000000000000000000100000000000010200000000064ea2d14",
        "001b4143000000000000000000000002000000005254525320696e666f000000229bba80",
        "001241440003450100000000000000010000000058c2428a",
        "001a414c2000000500000000000000020000000004000500082a0100c64ff11e",
        "001a4148000000000000000000000003000000008000000000000000a3892c9a",
        "001a414900000000000000000000000400000000800000000000000005eb2626",
        "0013c14000012a0600007f000000100068656c6c6f0000009a69a851",
        "00264147000000000000000200000001000000001100c0000005c14000012a0600007f0000001000"
        "87b05ae8"}) {
    const auto fpdu = hex(text);
    CAPTURE(text);
    REQUIRE(fpdu_size(load<Be16>(fpdu.data())) == fpdu.size());
    const auto covered = std::span(fpdu).first(fpdu.size() - fpdu_crc_size);
    CHECK(crc32c(covered) == load_crc(fpdu.data() + covered.size()));
  }
}

TEST_CASE(
    "a Terminate carries the offending header where it should, and zeros in what is reserved") {
  std::byte payload[terminate_payload_max];
  const auto offending = hex("0013c14000012a0600007f0000001000");
  size_t length = make_terminate_payload(payload, error::invalid_stag, offending);
  CHECK(to_hex({payload, length}) == to_hex(hex("1100c0000005c14000012a0600007f0000001000")));

  length = make_terminate_payload(payload, error::unexpected_opcode, {});
  CHECK(to_hex({payload, length}) == "02 06 00 00");

  const auto untagged = hex("001a414800000000000000000000000500000000");
  length = make_terminate_payload(payload, error::message_number, untagged);
  CHECK(length == terminate_payload_max);
  CHECK(to_hex(std::span(payload).first(6)) == "12 03 c0 00 00 08");
  CHECK(to_hex(std::span(payload).subspan(6)) == to_hex(std::span(untagged).subspan(2)));
}

TEST_CASE("error codes have names, unknown ones their numbers") {
  CHECK(describe(error::invalid_stag) == "DDP tagged buffer: invalid STag (11/00)");
  CHECK(describe(error::crc) == "MPA: CRC (20/02)");
  CHECK(describe({0x02, 0x77}) == "RDMAP remote operation (02/77)");
  CHECK(describe({0x77, 0x01}) == "unknown error (77/01)");
}

TEST_CASE("a received Terminate is described, mirrored and cut-off ones too") {
  CHECK(describe_terminate(hex("1100c000")) == "DDP tagged buffer: invalid STag (11/00)");
  // As Linux's software iWARP sends "unexpected opcode".
  CHECK(describe_terminate(hex("20060000")) ==
        "MPA: insufficient inbound reads (20/06), or with mirrored control bits "
        "RDMAP remote operation: unexpected opcode (02/06)");
  CHECK(describe_terminate(hex("1100")) == "a Terminate without an error code");
  CHECK(describe_terminate({}) == "a Terminate without an error code");
}

TEST_CASE("sizes of FPDUs are whole words with pad and checksum") {
  for (size_t payload = 0; payload < 64; ++payload) {
    const size_t total = fpdu_size(tagged_ulpdu_min + payload);
    CHECK(total % 4 == 0);
    CHECK(total == sizeof(TaggedHeader) + payload + pad_size(payload) + fpdu_crc_size);
    CHECK(fpdu_size(untagged_ulpdu_min + payload) == total + 4);
  }
  CHECK(fpdu_max == 65544);
}

}  // namespace rtrsnbd::wire::iwarp
