// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/verbs/fabric.h"

#include <cstring>

#include "protocol/fabric/verbs/domain.h"
#include "protocol/fabric/verbs/endpoint.h"
#include "protocol/fabric/verbs/handles.h"
#include "protocol/fabric/verbs/listener.h"

namespace rtrsnbd::fabric::verbs {

namespace {

class VerbsFabric final : public Fabric {
 public:
  explicit VerbsFabric(const Options& options) : options_(options) {}

  [[nodiscard]] Capabilities capabilities() const override { return verbs::capabilities; }
  std::unique_ptr<Domain> make_domain() override { return std::make_unique<VerbsDomain>(); }
  std::unique_ptr<Listener> listen(const Address& address) override {
    return std::make_unique<VerbsListener>(options_, address);
  }
  std::unique_ptr<Endpoint> connect(Domain& domain, const ConnectOptions& where,
                                    std::span<const std::byte> private_data,
                                    TimePoint now) override {
    return std::make_unique<VerbsEndpoint>(options_, dynamic_cast<VerbsDomain&>(domain), where,
                                           private_data, now);
  }

 private:
  const Options options_;
};

constexpr int probe_limit_ms = 2000;

}  // namespace

std::unique_ptr<Fabric> make_fabric(const Options& options) {
  return std::make_unique<VerbsFabric>(options);
}

std::optional<std::string> why_unreachable(const Address& target, const Address* source) {
  int count = 0;
  ibv_device** const devices = ibv_get_device_list(&count);
  if (devices != nullptr) ibv_free_device_list(devices);
  if (count == 0) return "this host has no RDMA device";
  // Without an event channel of its own, an id is synchronous.
  rdma_cm_id* raw = nullptr;
  if (rdma_create_id(nullptr, &raw, nullptr, RDMA_PS_TCP) != 0)
    return std::string("the RDMA connection manager does not answer: ") + std::strerror(errno);
  const Owned<rdma_cm_id> id(raw);
  // librdmacm does not write to the addresses.
  auto* const from = source != nullptr ? const_cast<sockaddr*>(source->get()) : nullptr;
  if (rdma_resolve_addr(raw, from, const_cast<sockaddr*>(target.get()), probe_limit_ms) != 0)
    return "no RDMA device of this host leads to " + target.host_text() + " (" +
           std::strerror(errno) + ")";
  return std::nullopt;
}

}  // namespace rtrsnbd::fabric::verbs
