// SPDX-License-Identifier: BSD-3-Clause
// Protection domains, and memory registered in them.
#pragma once

#include <memory>
#include <mutex>

#include "protocol/fabric/fabric.h"
#include "protocol/fabric/verbs/handles.h"

namespace rtrsnbd::fabric::verbs {

inline constexpr Capabilities capabilities{
    .rebind = false, .fresh_rkey = false, .any_local = false};

// The protection domain itself, shared by all that is made in it, because it has to go last.
class ProtectionDomain {
 public:
  // Ties the domain to the device of its first connection. Throws std::system_error if it is tied
  // to another one.
  ibv_pd* bind(ibv_context* device);
  // Throws std::system_error if no connection has bound the domain yet, or the memory cannot be
  // registered (locked memory is limited: ulimit -l).
  [[nodiscard]] Owned<ibv_mr> register_memory(std::byte* memory, size_t length, int access);

 private:
  std::mutex mutex_;
  Owned<ibv_pd> pd_;
};

class VerbsDomain final : public Domain {
 public:
  std::unique_ptr<Region> register_region(std::byte* memory, size_t length, Access access) override;
  std::unique_ptr<LocalMemory> register_local(std::byte* memory, size_t length) override;

  [[nodiscard]] const std::shared_ptr<ProtectionDomain>& shared() const { return shared_; }

 private:
  const std::shared_ptr<ProtectionDomain> shared_ = std::make_shared<ProtectionDomain>();
};

}  // namespace rtrsnbd::fabric::verbs
