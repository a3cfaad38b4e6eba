// SPDX-License-Identifier: BSD-3-Clause
// The file or block device under one volume: opened and locked once per daemon, shared by all
// reactors. Everything here may be called from any thread. Functions that may sleep say so; they
// belong on the volume's workers.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tl/expected.hpp>

#include "config/config.h"
#include "daemon/system_calls.h"
#include "daemon/workers.h"
#include "protocol/base/log.h"
#include "protocol/rnbd/block_device.h"

namespace rtrsnbd::daemon {

// How reads and writes get to the backing.
enum class Transfer : uint8_t {
  memory,    // tmpfs and its like: a plain call, which never waits for a disk
  buffered,  // page cache by the ring; reads first by a call that may not sleep
  direct,    // O_DIRECT by the ring
};

inline constexpr uint32_t workers_per_volume_max = 4;
// One command of the client: RNBD has 32 bits of length.
inline constexpr uint64_t range_bytes_max = uint64_t{1} << 32;
// Where zeroes have to be written out one by one, a command may not take for ever.
inline constexpr uint64_t slow_zeroes_bytes_max = uint64_t{16} << 20;

// A process that was killed is gone before the kernel has taken down its io_uring, which still
// holds the process's files, with their locks and claims. Its successor waits for that, and no
// longer.
inline constexpr std::chrono::milliseconds default_takeover_max{2000};

// The file system object behind an open file: a file reached by two names is one, and so is a
// device.
struct BackingIdentity {
  bool block_device = false;
  uint64_t device = 0;
  uint64_t inode = 0;
  friend bool operator==(const BackingIdentity&, const BackingIdentity&) = default;
};

class Backing {
 public:
  // Opens, creates (size: on a missing file), checks and locks. The error is what to tell the
  // operator: path, reason, remedy. May sleep.
  static tl::expected<std::shared_ptr<Backing>, std::string> open(
      const config::Volume& volume, LogSink log, SystemCalls& calls = kernel(),
      std::chrono::milliseconds takeover_max = default_takeover_max);
  // The checks that need neither lock nor creation, for --check-config. Empty: nothing found.
  static std::string inspect(const config::Volume& volume);

  // Of what is at path now; nothing if there is nothing.
  static std::optional<BackingIdentity> identify(const std::string& path);

  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] const BackingIdentity& identity() const { return identity_; }
  [[nodiscard]] const rnbd::DeviceProperties& properties() const { return properties_; }
  [[nodiscard]] Transfer transfer() const { return transfer_; }
  [[nodiscard]] int fd() const { return fd_; }
  // Of direct transfers, bytes.
  [[nodiscard]] uint32_t memory_alignment() const { return memory_alignment_; }
  [[nodiscard]] uint32_t offset_alignment() const { return offset_alignment_; }
  [[nodiscard]] std::string description() const;  // for the log: kind, size, block, way of transfer
  [[nodiscard]] SystemCalls& calls() { return calls_; }
  [[nodiscard]] WorkerPool& workers() { return workers_; }
  [[nodiscard]] const LogSink& log() const { return log_; }

  // An fdatasync failed: what was acknowledged before may be lost, so nothing more is promised
  // until an operator has looked and restarted the daemon.
  [[nodiscard]] bool failed() const { return failed_.load(std::memory_order_acquire); }
  void fail(const char* what, int error);

  // Cleared when the filesystem does not support it; learned on the way, so that it is tried once.
  std::atomic<bool> nowait_reads{true};

  // --- These sleep. Each returns 0 or a positive errno.

  // All writes completed before the call are durable. Calls that come while one is running share
  // the next one.
  int flush();
  int discard(uint64_t offset, uint64_t length);
  int write_zeroes(uint64_t offset, uint64_t length, bool no_unmap);
  // A transfer whose memory the backing cannot take directly, through an aligned copy.
  int transfer_by_copy(bool write, std::byte* data, uint64_t offset, uint64_t length, int flags);

  // One attempt after another until all is transferred. Starts `done` bytes in and advances it;
  // flags are those of preadv2/pwritev2. With RWF_NOWAIT it may return EAGAIN with part of the work
  // done.
  int transfer_now(bool write, std::byte* data, uint64_t offset, uint64_t length, uint64_t& done,
                   int flags);

 private:
  Backing(std::string name, std::string path, LogSink log, SystemCalls& calls,
          std::chrono::milliseconds takeover_max);

  std::string open_file(const config::Volume& volume);
  std::string create_file(const config::Volume& volume);
  std::string lock(bool read_only);
  std::string choose_transfer(const config::Volume& volume);
  std::string look_at_file(const config::Volume& volume);
  std::string look_at_device(const config::Volume& volume);
  std::string check_size(const config::Volume& volume);
  void probe_capabilities();
  int zero_by_writing(uint64_t offset, uint64_t length);
  int zero_device(uint64_t offset, uint64_t length, bool no_unmap);
  int zero_file(uint64_t offset, uint64_t length, bool no_unmap);

  const std::string name_;
  const std::string path_;
  LogSink log_;
  SystemCalls& calls_;
  const std::chrono::milliseconds takeover_max_;
  int fd_ = -1;
  int sync_fd_ = -1;  // an open file of its own: the kernel reports a lost write once per open file
  bool block_device_ = false;
  BackingIdentity identity_{};
  rnbd::DeviceProperties properties_{};
  Transfer transfer_ = Transfer::buffered;
  uint32_t device_block_ = 512;      // what the backing itself can address, bytes
  uint32_t offset_alignment_ = 512;  // direct only, bytes
  uint32_t memory_alignment_ = 1;    // direct only, bytes

  std::atomic<bool> failed_{false};
  std::atomic<bool> punch_holes_{true};
  std::atomic<bool> zero_ranges_{true};
  std::atomic<bool> zero_by_ioctl_{true};
  std::atomic<bool> discards_{true};

  std::mutex flush_mutex_;
  std::condition_variable flush_ended_;
  uint64_t flushes_started_ = 0;
  uint64_t flushes_finished_ = 0;
  bool flushing_ = false;

  WorkerPool workers_;  // last: its threads use all of the above
};

// The errno a client gets for one of ours: numbers that mean the same there, EIO for what only we
// understand.
int client_errno(int error);

// The refusal of a volume whose backing belongs to another one.
std::string already_served(const std::string& path, const std::string& other_name,
                           const std::string& other_path);

}  // namespace rtrsnbd::daemon
