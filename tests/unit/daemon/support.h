// SPDX-License-Identifier: BSD-3-Clause
// Places to store things in, and a reactor to drive requests with, for the tests of daemon/.
#pragma once

#include <fcntl.h>
#include <linux/loop.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "daemon/backing.h"
#include "daemon/memory.h"
#include "daemon/reactor.h"
#include "daemon/store_device.h"

namespace rtrsnbd::daemon::test {

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  [[nodiscard]] int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::string& parent) {
    path_ = parent + "/rtrsd-test-XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) path_.clear();
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline bool make_file(const std::string& path, uint64_t size) {
  const Fd fd(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  return fd && ftruncate(fd.get(), static_cast<off_t>(size)) == 0;
}

// A tmpfs of its own that no directory shows; gone when the object is. Empty without the right to
// mount.
class PrivateTmpfs {
 public:
  explicit PrivateTmpfs(const std::string& size) {
    const Fd context(fsopen("tmpfs", FSOPEN_CLOEXEC));
    if (!context) return;
    if (fsconfig(context.get(), FSCONFIG_SET_STRING, "size", size.c_str(), 0) != 0) return;
    if (fsconfig(context.get(), FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) != 0) return;
    root_ = Fd(fsmount(context.get(), FSMOUNT_CLOEXEC, 0));
  }
  explicit operator bool() const { return static_cast<bool>(root_); }
  [[nodiscard]] std::string operator/(const std::string& name) const {
    return "/proc/self/fd/" + std::to_string(root_.get()) + "/" + name;
  }

 private:
  Fd root_;
};

// A loop device over a file; the kernel lets it go with the last user. Empty without the right to
// make one.
class LoopDevice {
 public:
  LoopDevice(const std::string& file, uint32_t block_size) {
    const Fd backing(open(file.c_str(), O_RDWR | O_CLOEXEC));
    const Fd control(open("/dev/loop-control", O_RDWR | O_CLOEXEC));
    if (!backing || !control) return;
    for (int attempt = 0; attempt < 16; ++attempt) {
      const int number = ioctl(control.get(), LOOP_CTL_GET_FREE);
      if (number < 0) return;
      path_ = "/dev/loop" + std::to_string(number);
      Fd device(open(path_.c_str(), O_RDWR | O_CLOEXEC));
      if (!device) return;
      loop_config configuration{};
      configuration.fd = static_cast<__u32>(backing.get());
      configuration.block_size = block_size;
      configuration.info.lo_flags = LO_FLAGS_AUTOCLEAR;
      if (ioctl(device.get(), LOOP_CONFIGURE, &configuration) == 0) {
        device_ = std::move(device);
        return;
      }
      if (errno != EBUSY) return;  // somebody else took it meanwhile
    }
  }
  explicit operator bool() const { return static_cast<bool>(device_); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
  Fd device_;
};

// Collects log lines, from any thread.
class LogLines {
 public:
  LogSink sink() {
    return [this](LogLevel level, std::string_view line) {
      const std::lock_guard lock(mutex_);
      lines_.emplace_back(level, line);
    };
  }
  [[nodiscard]] int count(LogLevel level, const std::string& part = "") const {
    const std::lock_guard lock(mutex_);
    int found = 0;
    for (const auto& [its_level, line] : lines_) {
      if (its_level == level && line.find(part) != std::string::npos) ++found;
    }
    return found;
  }
  [[nodiscard]] std::string text() const {
    const std::lock_guard lock(mutex_);
    std::string all;
    for (const auto& [level, line] : lines_) all += line + "\n";
    return all;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::pair<LogLevel, std::string>> lines_;
};

class Request final : public rnbd::BlockRequest {
 public:
  void complete(int its_error) override {
    ++completions;
    error = its_error;
    if (on_complete) on_complete();
  }
  int completions = 0;
  int error = -1;
  std::function<void()> on_complete;
};

// One reactor, run by the test's own thread while requests are in flight.
class StoreRig {
 public:
  explicit StoreRig(KernelLevel level = KernelLevel::newest, size_t chunk_bytes = size_t{4} << 20)
      : reactor({.entries = 64, .completion_entries = 256, .level = level}),
        files(reactor),
        budget(uint64_t{1} << 30),
        allocator(reactor, budget, true, log.sink()) {
    std::string reason;
    chunks = allocator.allocate(chunk_bytes, reason);
  }

  // Submits all of them on the reactor's thread and waits until all are complete.
  void run(StoreDevice& device, const std::vector<Request*>& requests) {
    size_t left = requests.size();
    reactor.post([&] {
      for (Request* request : requests) {
        request->on_complete = [&] {
          if (--left == 0) reactor.stop();
        };
        device.submit(*request);
      }
    });
    reactor.run();
    for (Request* request : requests) request->on_complete = nullptr;
  }
  int run(StoreDevice& device, Request& request) {
    run(device, std::vector<Request*>{&request});
    return request.error;
  }
  int run(StoreDevice& device, wire::RnbdOp op, uint64_t offset, uint64_t length,
          bool fua = false) {
    Request request;
    request.op = op;
    request.offset = offset;
    request.length = length;
    request.fua = fua;
    request.data = chunks->bytes().data();
    request.registered_index = chunks->registered_index();
    return run(device, request);
  }
  [[nodiscard]] std::byte* memory() { return chunks->bytes().data(); }

  LogLines log;
  Reactor reactor;
  RingFiles files;
  MemoryBudget budget;
  ChunkAllocator allocator;
  std::unique_ptr<rtrs::ChunkMemory> chunks;
};

inline config::Volume volume_at(const std::string& path, const std::string& name = "v") {
  config::Volume volume;
  volume.name = name;
  volume.path = path;
  return volume;
}

}  // namespace rtrsnbd::daemon::test
