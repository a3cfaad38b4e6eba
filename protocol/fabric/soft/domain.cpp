// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/soft/domain.h"

namespace rtrsnbd::fabric::soft {

namespace {

class SoftRegion final : public Region {
 public:
  SoftRegion(std::shared_ptr<KeyTable> keys, uint32_t index)
      : keys_(std::move(keys)), index_(index) {}
  ~SoftRegion() override { keys_->release(index_); }

  [[nodiscard]] uint32_t rkey() const override { return keys_->key(index_); }
  [[nodiscard]] uint64_t remote_address() const override { return KeyTable::base_offset(index_); }
  bool invalidate() override { return keys_->invalidate(index_); }
  uint32_t renew() override { return keys_->renew(index_); }
  void rebind(std::byte* memory, size_t length) override { keys_->rebind(index_, memory, length); }

 private:
  std::shared_ptr<KeyTable> keys_;
  uint32_t index_;
};

class NoLocalMemory final : public LocalMemory {};

}  // namespace

std::unique_ptr<Region> SoftDomain::register_region(std::byte* memory, size_t length,
                                                    Access access) {
  const uint32_t index = keys_->allocate(id_, memory, length, access);
  return std::make_unique<SoftRegion>(keys_, index);
}

std::unique_ptr<LocalMemory> SoftDomain::register_local(std::byte* /*memory*/, size_t /*length*/) {
  return std::make_unique<NoLocalMemory>();
}

}  // namespace rtrsnbd::fabric::soft
