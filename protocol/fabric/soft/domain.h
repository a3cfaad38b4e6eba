// SPDX-License-Identifier: BSD-3-Clause
// Protection domains and regions of the soft fabric: thin owners of slots of the key table.
#pragma once

#include <memory>

#include "protocol/fabric/fabric.h"
#include "protocol/fabric/soft/key_table.h"

namespace rtrsnbd::fabric::soft {

inline constexpr Capabilities capabilities{.rebind = true, .fresh_rkey = true, .any_local = true};

class SoftDomain final : public Domain {
 public:
  explicit SoftDomain(std::shared_ptr<KeyTable> keys)
      : keys_(std::move(keys)), id_(keys_->next_domain()) {}

  std::unique_ptr<Region> register_region(std::byte* memory, size_t length, Access access) override;
  std::unique_ptr<LocalMemory> register_local(std::byte* memory, size_t length) override;

  [[nodiscard]] const std::shared_ptr<KeyTable>& keys() const { return keys_; }
  [[nodiscard]] DomainId id() const { return id_; }

 private:
  std::shared_ptr<KeyTable> keys_;
  DomainId id_;
};

}  // namespace rtrsnbd::fabric::soft
