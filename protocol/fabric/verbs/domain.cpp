// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/verbs/domain.h"

#include <cassert>

namespace rtrsnbd::fabric::verbs {

namespace {

class VerbsRegion final : public Region {
 public:
  VerbsRegion(std::shared_ptr<ProtectionDomain> domain, std::byte* memory, size_t length,
              Access access)
      : domain_(std::move(domain)),
        mr_(domain_->register_memory(memory, length,
                                     access == Access::remote_write
                                         ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE
                                         : IBV_ACCESS_LOCAL_WRITE)),
        lkey_(mr_->lkey),
        rkey_(mr_->rkey),
        address_(reinterpret_cast<uintptr_t>(mr_->addr)) {}

  [[nodiscard]] uint32_t lkey() const override { return lkey_; }
  [[nodiscard]] uint32_t rkey() const override { return rkey_; }
  [[nodiscard]] uint64_t remote_address() const override { return address_; }
  // The device has forgotten the key when this returns.
  bool invalidate() override {
    mr_.reset();
    return true;
  }
  uint32_t renew() override {
    assert(false && "capabilities say no");
    return rkey_;
  }
  void rebind(std::byte*, size_t) override { assert(false && "capabilities say no"); }

 private:
  const std::shared_ptr<ProtectionDomain> domain_;
  Owned<ibv_mr> mr_;
  const uint32_t lkey_, rkey_;
  const uint64_t address_;
};

class VerbsLocalMemory final : public LocalMemory {
 public:
  VerbsLocalMemory(std::shared_ptr<ProtectionDomain> domain, std::byte* memory, size_t length)
      : domain_(std::move(domain)),
        mr_(domain_->register_memory(memory, length, IBV_ACCESS_LOCAL_WRITE)) {}
  [[nodiscard]] uint32_t lkey() const override { return mr_->lkey; }

 private:
  const std::shared_ptr<ProtectionDomain> domain_;
  const Owned<ibv_mr> mr_;
};

}  // namespace

ibv_pd* ProtectionDomain::bind(ibv_context* device) {
  const std::lock_guard lock(mutex_);
  if (!pd_)
    pd_ = owned(ibv_alloc_pd(device), "no protection domain left on the RDMA device");
  else if (pd_->context != device)
    fail("connections of one path come in by different RDMA devices", EXDEV);
  return pd_.get();
}

Owned<ibv_mr> ProtectionDomain::register_memory(std::byte* memory, size_t length, int access) {
  const std::lock_guard lock(mutex_);
  if (!pd_) fail("memory cannot be registered before there is a connection", ENOTCONN);
  ibv_mr* const mr = ibv_reg_mr(pd_.get(), memory, length, access);
  if (mr == nullptr)
    fail("registering " + std::to_string(length) +
         " bytes with the RDMA device (is the limit of locked memory, ulimit -l, too small?)");
  return Owned<ibv_mr>(mr);
}

std::unique_ptr<Region> VerbsDomain::register_region(std::byte* memory, size_t length,
                                                     Access access) {
  return std::make_unique<VerbsRegion>(shared_, memory, length, access);
}

std::unique_ptr<LocalMemory> VerbsDomain::register_local(std::byte* memory, size_t length) {
  return std::make_unique<VerbsLocalMemory>(shared_, memory, length);
}

}  // namespace rtrsnbd::fabric::verbs
