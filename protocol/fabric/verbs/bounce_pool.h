// SPDX-License-Identifier: BSD-3-Clause
// Registered memory in pieces of one size, for what a connection sends or receives beside the
// caller's registered memory: small copied payloads, keys, INFO messages. Grows, never shrinks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "protocol/fabric/verbs/domain.h"

namespace rtrsnbd::fabric::verbs {

// Not locked: its owner is.
class BouncePool {
 public:
  struct Piece {
    std::byte* data = nullptr;
    uint32_t lkey = 0;
  };

  BouncePool(std::shared_ptr<ProtectionDomain> domain, size_t piece_size)
      : domain_(std::move(domain)), piece_size_(piece_size) {}

  [[nodiscard]] size_t piece_size() const { return piece_size_; }

  Piece take() {  // throws std::system_error when no memory can be registered
    if (free_.empty()) grow();
    const Piece piece = free_.back();
    free_.pop_back();
    return piece;
  }
  void give_back(Piece piece) { free_.push_back(piece); }

 private:
  static constexpr size_t slab_size = 16 * 1024;

  void grow() {
    const size_t count = piece_size_ >= slab_size ? 1 : slab_size / piece_size_;
    free_.reserve(free_.size() + count);
    Slab slab;
    slab.memory = std::make_unique<std::byte[]>(count * piece_size_);
    slab.mr =
        domain_->register_memory(slab.memory.get(), count * piece_size_, IBV_ACCESS_LOCAL_WRITE);
    for (size_t i = 0; i < count; ++i)
      free_.push_back({slab.memory.get() + i * piece_size_, slab.mr->lkey});
    slabs_.push_back(std::move(slab));
  }

  struct Slab {
    std::unique_ptr<std::byte[]> memory;
    Owned<ibv_mr> mr;  // goes before the memory
  };
  const std::shared_ptr<ProtectionDomain> domain_;
  const size_t piece_size_;
  std::vector<Slab> slabs_;
  std::vector<Piece> free_;
};

}  // namespace rtrsnbd::fabric::verbs
