// SPDX-License-Identifier: BSD-3-Clause
// The accepting end of the verbs fabric: connection requests as the connection manager reports
// them.
#pragma once

#include "protocol/fabric/fabric.h"
#include "protocol/fabric/verbs/fabric.h"
#include "protocol/fabric/verbs/handles.h"

namespace rtrsnbd::fabric::verbs {

class VerbsListener final : public Listener {
 public:
  VerbsListener(const Options& options, const Address& address);

  [[nodiscard]] int fd() const override { return manager_->fd; }
  void progress(TimePoint now, const OnRequest& on_request) override;
  [[nodiscard]] Address address() const override { return local_address_of(*id_); }

 private:
  static constexpr int backlog = 1024;
  static constexpr int requests_per_turn = 64;

  const Options options_;
  const Owned<rdma_event_channel> manager_;
  Owned<rdma_cm_id> id_;
};

}  // namespace rtrsnbd::fabric::verbs
