// SPDX-License-Identifier: BSD-3-Clause
// The receiving half of one iWARP connection without its socket: it says where the next bytes of
// the stream go, takes them, checks, places, and delivers completions. How the stream is cut into
// reads makes no difference to what is placed and delivered.
//
// Small FPDUs are read into a buffer, as many as come, and copied. For a large tagged one the reads
// go straight into the target memory, with the buffer behind it for what follows in the stream.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "protocol/fabric/fabric.h"
#include "protocol/fabric/soft/key_table.h"
#include "protocol/fabric/soft/receive_queue.h"
#include "protocol/wire/crc32c.h"
#include "protocol/wire/iwarp.h"

namespace rtrsnbd::fabric::soft {

class Receiver {
 public:
  class Sink {
   public:
    virtual ~Sink() = default;
    // False: deliver nothing more; the receiver is stopped.
    virtual bool on_completion(const Completion& completion) = 0;
  };

  enum class Status : uint8_t {
    running,
    failed,      // the peer broke a rule: failure() has the Terminate to send
    terminated,  // the peer sent a Terminate: detail() says what it complains of
    stopped,     // the sink had enough
  };

  struct Failure {
    wire::iwarp::TerminateError error;
    std::array<std::byte, sizeof(wire::iwarp::UntaggedHeader)> header{};
    size_t header_size = 0;  // 0: the Terminate carries none
    [[nodiscard]] std::span<const std::byte> header_bytes() const {
      return std::span(header).first(header_size);
    }
  };

  Receiver(KeyTable& keys, DomainId domain, ReceiveQueue& receives, bool crc);

  // Where the next bytes go; at most three vectors, one almost always. Between begin and end the
  // target memory is held (see Region::invalidate). Empty if the connection cannot go on: ask
  // status().
  std::span<const iovec> begin();
  // `count` bytes came, in the order of the vectors; 0 if none did.
  Status end(size_t count, Sink& sink);

  [[nodiscard]] Status status() const { return status_; }
  [[nodiscard]] const Failure& failure() const { return failure_; }
  [[nodiscard]] const std::string& detail() const { return detail_; }
  [[nodiscard]] bool inside_fpdu() const { return direct_.active || begin_ != end_; }
  [[nodiscard]] bool inside_message() const { return untagged_.active || tagged_unfinished_; }
  [[nodiscard]] uint64_t fpdus() const { return fpdus_; }        // whole and good ones
  [[nodiscard]] uint64_t messages() const { return messages_; }  // whole ones, Writes too

  // Room for the largest FPDU, so that any but the directly placed are looked at in one piece.
  static constexpr size_t buffer_size = 17 * 4096;
  static_assert(buffer_size >= wire::iwarp::fpdu_max);
  // Payloads from here on are placed directly as soon as a part of them is missing.
  static constexpr size_t direct_min = 8 * 1024;

 private:
  // A large stream is best read with little room in the buffer, so that most of it goes directly; a
  // stream of small messages with much room, so that one read takes many. The room follows what
  // comes.
  static constexpr size_t room_min = 512;
  static constexpr size_t room_first = 8 * 1024;
  static constexpr size_t room_max = 64 * 1024;
  static constexpr size_t large_payload = 16 * 1024;

  enum class Step : uint8_t { done, starved, over };

  Step parse_one(Sink& sink);
  bool check_versions(const std::byte* fpdu);
  bool check_untagged(const std::byte* fpdu, size_t payload);
  bool place(const std::byte* fpdu, size_t payload);
  bool deliver_untagged(const std::byte* fpdu, const std::byte* payload, size_t length, Sink& sink);
  Step start_direct(const std::byte* fpdu, size_t payload, size_t available);
  bool finish_direct(std::span<const std::byte> trailer);
  size_t take_direct(size_t count);
  void finish_tagged(const std::byte* fpdu);
  void on_terminate(const std::byte* fpdu, size_t payload);
  bool fail(wire::iwarp::TerminateError error, std::string detail,
            std::span<const std::byte> header);

  KeyTable& keys_;
  const DomainId domain_;
  ReceiveQueue& receives_;
  const bool crc_;

  Status status_ = Status::running;
  Failure failure_;
  std::string detail_;

  std::unique_ptr<std::byte[]> buffer_;
  size_t begin_ = 0;  // unparsed bytes of the buffer
  size_t end_ = 0;
  size_t room_ = room_first;
  size_t offered_ = 0;       // bytes of the last begin()
  bool large_seen_ = false;  // in this read
  size_t wanted_ = 0;        // bytes of the FPDU at begin_, as far as known

  // The FPDU whose payload is being placed directly.
  struct Direct {
    bool active = false;
    wire::iwarp::TaggedHeader header;
    uint64_t offset = 0;  // of the next byte
    size_t missing = 0;   // payload bytes
    size_t trailer_have = 0;
    size_t trailer_size = 0;
    std::array<std::byte, wire::iwarp::fpdu_trailer_max> trailer{};
    wire::Crc32c crc;
    KeyTable::Placement placement;  // held from begin() to end()
  };
  Direct direct_;

  bool tagged_unfinished_ = false;  // a Write whose last segment has not come

  // The message of the send queue that is being received.
  struct Untagged {
    bool active = false;
    uint8_t opcode = 0;
    uint32_t upper_layer = 0;
    uint32_t offset = 0;  // of the next segment
    Receive receive;
  };
  Untagged untagged_;
  uint32_t next_message_number_ = 1;

  uint64_t fpdus_ = 0;
  uint64_t messages_ = 0;
  std::array<iovec, 3> vectors_{};
};

}  // namespace rtrsnbd::fabric::soft
