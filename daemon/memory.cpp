// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>

namespace rtrsnbd::daemon {

namespace {

constexpr size_t page_bytes = 4096;
constexpr size_t huge_page_bytes = size_t{2} << 20;

std::string mebibytes(uint64_t bytes) {
  const uint64_t tenths = bytes / (1024 * 1024 / 10);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " MiB";
}

// Zeroed; begins at a huge page if it is large enough to hold one.
std::byte* map_pages(size_t bytes) {
  const size_t alignment = bytes >= huge_page_bytes ? huge_page_bytes : page_bytes;
  const size_t mapped = bytes + (alignment - page_bytes);
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t aligned = (begin + alignment - 1) & ~(alignment - 1);
  if (aligned > begin) munmap(memory, aligned - begin);
  const uintptr_t end = begin + mapped;
  const uintptr_t used_end = aligned + bytes;
  if (end > used_end) munmap(reinterpret_cast<void*>(used_end), end - used_end);
  auto* const chunks = reinterpret_cast<std::byte*>(aligned);
  madvise(chunks, bytes, MADV_HUGEPAGE);  // advice: fewer page table entries, nothing depends on it
  madvise(chunks, bytes, MADV_DONTDUMP);  // client data has no place in a core file
  return chunks;
}

class Chunks final : public rtrs::ChunkMemory {
 public:
  Chunks(std::byte* memory, size_t bytes, size_t reserved, MemoryBudget& budget, Reactor& reactor)
      : memory_(memory), bytes_(bytes), reserved_(reserved), budget_(budget), reactor_(reactor) {}
  ~Chunks() override {
    if (index_ >= 0) reactor_.ring().remove_buffer(index_);
    munmap(memory_, reserved_);
    budget_.release(reserved_);
  }
  [[nodiscard]] std::span<std::byte> bytes() override { return {memory_, bytes_}; }
  [[nodiscard]] int registered_index() const override { return index_; }
  int register_with_ring() {
    int error = 0;
    index_ = reactor_.ring().add_buffer(memory_, bytes_, error);
    return index_ >= 0 ? 0 : error;
  }

 private:
  std::byte* const memory_;
  const size_t bytes_;
  const size_t reserved_;
  MemoryBudget& budget_;
  Reactor& reactor_;
  int index_ = -1;
};

std::string why_unregistered(int error, size_t bytes) {
  std::string text =
      "chunk memory is not registered with io_uring (" + std::string(std::strerror(error)) + ")";
  if (error == ENOMEM || error == EPERM) {
    rlimit limit{};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    text += ": a session needs " + mebibytes(bytes) + " of locked memory";
    if (limit.rlim_cur != RLIM_INFINITY)
      text += " and the limit for all sessions is " + mebibytes(limit.rlim_cur);
    text += "; raise it with LimitMEMLOCK= of the unit or ulimit -l";
  }
  return text + ". Serving without; direct IO costs a little more CPU";
}

}  // namespace

bool MemoryBudget::reserve(uint64_t bytes) {
  uint64_t used = used_.load(std::memory_order_relaxed);
  do {
    if (bytes > bytes_max_ || used > bytes_max_ - bytes) return false;
  } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  return true;
}

std::unique_ptr<rtrs::ChunkMemory> ChunkAllocator::allocate(size_t bytes, std::string& reason) {
  const size_t reserved = (bytes + page_bytes - 1) / page_bytes * page_bytes;
  if (!budget_.reserve(reserved)) {
    reason = "memory limit: the session needs " + mebibytes(reserved) + ", " +
             mebibytes(budget_.used()) + " are in use and 'max-memory' is " +
             mebibytes(budget_.bytes_max());
    return nullptr;
  }
  std::byte* const memory = map_pages(reserved);
  if (memory == nullptr) {
    budget_.release(reserved);
    reason = "no memory: the system refuses " + mebibytes(reserved) + ": " + std::strerror(errno);
    return nullptr;
  }
  auto chunks = std::make_unique<Chunks>(memory, bytes, reserved, budget_, reactor_);
  if (use_registered_ && budget_.registering()) {
    const int error = chunks->register_with_ring();
    // Said once for all sessions; the limit will not move by itself.
    if (error != 0 && budget_.give_up_registering())
      log_(LogLevel::notice, why_unregistered(error, bytes));
  }
  return chunks;
}

}  // namespace rtrsnbd::daemon
