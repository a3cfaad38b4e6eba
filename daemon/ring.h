// SPDX-License-Identifier: BSD-3-Clause
// One io_uring and what the running kernel lets it do. Newer kernels save work per request; what is
// missing on an older one (5.15 is the oldest supported) is left out, and missing() says so in
// words.
#pragma once

#include <liburing.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace rtrsnbd::daemon {

// How much of io_uring to use at most. Anything but `newest` is for tests of the older kernels'
// paths.
enum class KernelLevel { v5_15, v5_19, v6_0, newest };

struct RingOptions {
  uint32_t entries = 512;              // submission queue; a power of two
  uint32_t completion_entries = 4096;  // a power of two
  uint32_t file_slots = 512;           // registered files: one per volume in use on this ring
  uint32_t buffer_slots = 1024;        // registered buffers: one per session
  KernelLevel level = KernelLevel::newest;
};

// Set-up failed for a reason outside of the program. what() is one sentence with cause and remedy.
class SetUpError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Ring {
 public:
  explicit Ring(const RingOptions& options);  // throws SetUpError
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // The calling thread becomes the one that submits. Once.
  void adopt();

  [[nodiscard]] io_uring* get() { return &ring_; }
  // What has to be done without here, for one line of the log; empty if nothing.
  [[nodiscard]] const std::string& missing() const { return missing_; }
  [[nodiscard]] bool deferred() const {
    return deferred_;
  }  // completions appear only inside io_uring_enter

  // A slot for IOSQE_FIXED_FILE, or -1 when there is none left or the kernel refuses.
  int add_file(int fd);
  void remove_file(int slot);

  // An index for READ_FIXED / WRITE_FIXED; -1: use the memory unregistered. error says why (an
  // errno).
  int add_buffer(std::byte* memory, size_t length, int& error);
  void remove_buffer(int index);

 private:
  int create(const RingOptions& options, uint32_t entries, uint32_t completion_entries);
  void make_tables(const RingOptions& options);

  io_uring ring_{};
  bool disabled_ = true;
  bool deferred_ = false;
  std::string missing_;
  std::vector<int> free_files_;
  std::vector<int> free_buffers_;
  int buffers_error_ = 0;  // why there is no table of buffers
};

}  // namespace rtrsnbd::daemon
