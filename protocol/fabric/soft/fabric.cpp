// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/soft/fabric.h"

#include <cassert>

#include "protocol/fabric/soft/domain.h"
#include "protocol/fabric/soft/endpoint.h"
#include "protocol/fabric/soft/listener.h"

namespace rtrsnbd::fabric::soft {

namespace {

class SoftFabric final : public Fabric {
 public:
  explicit SoftFabric(const Options& options)
      : options_(options), keys_(std::make_shared<KeyTable>()) {
    assert(options.segment_payload >= segment_payload_min &&
           options.segment_payload <= segment_payload_max && options.segment_payload % 4 == 0);
    assert(options.pending_max > 0 && options.pending_per_source_max > 0);
  }

  [[nodiscard]] Capabilities capabilities() const override { return soft::capabilities; }

  std::unique_ptr<Domain> make_domain() override { return std::make_unique<SoftDomain>(keys_); }

  std::unique_ptr<Listener> listen(const Address& address) override {
    return std::make_unique<SoftListener>(options_, keys_, address);
  }

  std::unique_ptr<Endpoint> connect(Domain& domain, const ConnectOptions& where,
                                    std::span<const std::byte> private_data,
                                    TimePoint now) override {
    return std::make_unique<SoftEndpoint>(options_, dynamic_cast<SoftDomain&>(domain), where,
                                          private_data, now);
  }

 private:
  const Options options_;
  std::shared_ptr<KeyTable> keys_;
};

}  // namespace

std::unique_ptr<Fabric> make_fabric(const Options& options) {
  return std::make_unique<SoftFabric>(options);
}

}  // namespace rtrsnbd::fabric::soft
