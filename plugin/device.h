// SPDX-License-Identifier: BSD-3-Clause
// A volume opened through a session: NBD-shaped operations of any size and alignment, turned into
// RNBD requests. All methods may be called by many threads at once and block until done. Errors are
// positive errnos as the server gave them, EIO where the session is lost.
//
// Alignment. The server takes whole logical blocks. A write or zero that begins or ends inside a
// block reads that block, changes it and writes it back while no other write of this process can
// touch the block (BlockLocks). Writers in other processes are not kept out; therefore the logical
// block is what is advertised as the minimum block size, and smaller requests are a courtesy to
// clients that ignore it.
#pragma once

#include <pthread.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tl/expected.hpp>
#include <utility>

#include "plugin/session.h"
#include "protocol/rnbd/block_device.h"
#include "protocol/rnbd/client.h"

namespace rtrsnbd::plugin {

// Whole-block writers share; a read-modify-write excludes them from the block it rewrites. Striped:
// two distant offsets may share a lock, which costs time and nothing else.
class BlockLocks {
 public:
  BlockLocks();
  ~BlockLocks();
  BlockLocks(const BlockLocks&) = delete;
  BlockLocks& operator=(const BlockLocks&) = delete;

  class Guard {
   public:
    Guard(BlockLocks& locks, uint64_t offset, uint64_t length, bool exclusive);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    BlockLocks& locks_;
    uint64_t mask_ = 0;  // stripes held
  };

 private:
  static constexpr uint64_t stripe_bytes = 1 << 20;  // a multiple of every block size
  static constexpr size_t stripe_count = 32;
  std::array<pthread_rwlock_t, stripe_count> stripes_;
};

class Device {
 public:
  // The error is an errno and a sentence that names server and volume.
  static tl::expected<std::unique_ptr<Device>, std::pair<int, std::string>> open(
      std::shared_ptr<Session> session, const std::string& volume, wire::AccessMode access);
  ~Device();  // sends CLOSE if the session is alive
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] const rnbd::DeviceProperties& properties() const { return properties_; }
  [[nodiscard]] Session& session() { return *session_; }
  [[nodiscard]] const std::string& volume() const { return volume_; }

  // lane: which IO connection to use. Ranges were checked against the size by the caller.
  int read(uint32_t lane, std::byte* data, uint32_t length, uint64_t offset);
  int write(uint32_t lane, const std::byte* data, uint32_t length, uint64_t offset, bool fua);
  int flush(uint32_t lane);
  int trim(uint32_t lane, uint64_t length, uint64_t offset, bool fua);
  // EOPNOTSUPP when the server cannot; the caller may then write zeros.
  int zero(uint32_t lane, uint64_t length, uint64_t offset, bool may_trim, bool fua);

 private:
  Device(std::shared_ptr<Session> session, std::string volume)
      : session_(std::move(session)), volume_(std::move(volume)) {}

  int transfer(uint32_t lane, wire::RnbdOp op, std::byte* read_data, const std::byte* write_data,
               uint64_t length, uint64_t offset, rnbd::IoFlags flags);
  int special(uint32_t lane, wire::RnbdOp op, uint64_t length, uint64_t offset, uint64_t length_max,
              rnbd::IoFlags flags);
  // Changes a part of one block. data null: zeros.
  int modify_block(uint32_t lane, const std::byte* data, uint32_t length, uint64_t offset,
                   bool fua);

  std::shared_ptr<Session> session_;
  const std::string volume_;
  rnbd::DeviceProperties properties_;
  uint32_t device_id_ = 0;
  BlockLocks locks_;
};

}  // namespace rtrsnbd::plugin
