// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/verbs/listener.h"

#include <cassert>
#include <vector>

#include "protocol/fabric/verbs/domain.h"
#include "protocol/fabric/verbs/endpoint.h"

namespace rtrsnbd::fabric::verbs {

namespace {

class VerbsConnectRequest final : public ConnectRequest {
 public:
  VerbsConnectRequest(const Options& options, rdma_cm_id* id, std::vector<std::byte> private_data)
      : options_(options),
        id_(id),
        private_data_(std::move(private_data)),
        local_(local_address_of(*id)),
        peer_(peer_address_of(*id)) {}
  ~VerbsConnectRequest() override {
    if (id_) rdma_reject(id_.get(), nullptr, 0);
  }

  [[nodiscard]] std::span<const std::byte> private_data() const override { return private_data_; }
  [[nodiscard]] Address local_address() const override { return local_; }
  [[nodiscard]] Address peer_address() const override { return peer_; }
  [[nodiscard]] Capabilities capabilities() const override { return verbs::capabilities; }
  [[nodiscard]] std::unique_ptr<Domain> make_domain() const override {
    auto domain = std::make_unique<VerbsDomain>();
    domain->shared()->bind(id_->verbs);
    return domain;
  }
  std::unique_ptr<Endpoint> make_endpoint(Domain& domain, const QueueSizes& queues) override {
    assert(id_);
    auto* const ours = dynamic_cast<VerbsDomain*>(&domain);
    if (ours == nullptr) fail("connections of one path come in by different transports", EXDEV);
    return std::make_unique<VerbsEndpoint>(options_, *ours, id_, queues);
  }
  void reject(std::span<const std::byte> private_data) override {
    assert(id_);
    rdma_reject(id_.get(), private_data.data(), static_cast<uint8_t>(private_data.size()));
    id_.reset();
  }

 private:
  const Options options_;
  Owned<rdma_cm_id> id_;
  const std::vector<std::byte> private_data_;
  const Address local_, peer_;
};

}  // namespace

VerbsListener::VerbsListener(const Options& options, const Address& address)
    : options_(options), manager_(make_event_channel()) {
  rdma_cm_id* id = nullptr;
  if (rdma_create_id(manager_.get(), &id, nullptr, RDMA_PS_TCP) != 0) fail("RDMA identifier");
  id_.reset(id);
  // "Any address" is listened on once per family.
  int yes = 1;
  if (address.family() == AF_INET6)
    rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &yes, sizeof yes);
  rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &yes, sizeof yes);
  // librdmacm does not write to the address.
  if (rdma_bind_addr(id, const_cast<sockaddr*>(address.get())) != 0)
    fail("bind of " + address.text() + " (is it the address of an RDMA device?)");
  if (rdma_listen(id, backlog) != 0) fail("listen on " + address.text());
}

void VerbsListener::progress(TimePoint /*now*/, const OnRequest& on_request) {
  for (int i = 0; i < requests_per_turn; ++i) {
    rdma_cm_event* event = nullptr;
    if (rdma_get_cm_event(manager_.get(), &event) != 0) return;
    std::unique_ptr<ConnectRequest> request;
    // Other events are of requests that were dropped, or whose endpoint is being made; its own time
    // limits find those that have left meanwhile.
    if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
      const auto* const data = static_cast<const std::byte*>(event->param.conn.private_data);
      std::vector<std::byte> copy;
      if (data != nullptr) copy.assign(data, data + event->param.conn.private_data_len);
      request = std::make_unique<VerbsConnectRequest>(options_, event->id, std::move(copy));
    }
    rdma_ack_cm_event(event);
    if (request) on_request(std::move(request));
  }
}

}  // namespace rtrsnbd::fabric::verbs
