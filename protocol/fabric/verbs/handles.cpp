// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/verbs/handles.h"

#include <fcntl.h>
#include <netinet/in.h>

namespace rtrsnbd::fabric::verbs {

namespace {

Address address_of(const sockaddr* address) {
  if (address == nullptr) return {};
  switch (address->sa_family) {
    case AF_INET:
      return {address, sizeof(sockaddr_in)};
    case AF_INET6:
      return {address, sizeof(sockaddr_in6)};
    default:  // a native InfiniBand address, which we do not listen on
      return {};
  }
}

}  // namespace

Address local_address_of(rdma_cm_id& id) {
  return address_of(rdma_get_local_addr(&id));
}

Address peer_address_of(rdma_cm_id& id) {
  return address_of(rdma_get_peer_addr(&id));
}

void make_non_blocking(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) fail("fcntl");
}

Owned<rdma_event_channel> make_event_channel() {
  auto channel = owned(rdma_create_event_channel(), "no RDMA connection manager on this host");
  make_non_blocking(channel->fd);
  return channel;
}

}  // namespace rtrsnbd::fabric::verbs
