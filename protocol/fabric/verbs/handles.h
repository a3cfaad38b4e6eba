// SPDX-License-Identifier: BSD-3-Clause
// Owners of what libibverbs and librdmacm hand out.
#pragma once

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "protocol/fabric/address.h"

namespace rtrsnbd::fabric::verbs {

struct Destroy {
  void operator()(ibv_pd* pd) const { ibv_dealloc_pd(pd); }
  void operator()(ibv_mr* mr) const { ibv_dereg_mr(mr); }
  void operator()(ibv_cq* cq) const { ibv_destroy_cq(cq); }
  void operator()(ibv_comp_channel* channel) const { ibv_destroy_comp_channel(channel); }
  // Blocks until every event of the id was acknowledged.
  void operator()(rdma_cm_id* id) const { rdma_destroy_id(id); }
  void operator()(rdma_event_channel* channel) const { rdma_destroy_event_channel(channel); }
};
template <typename Object>
using Owned = std::unique_ptr<Object, Destroy>;

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  [[nodiscard]] int get() const { return fd_; }

 private:
  int fd_ = -1;
};

[[noreturn]] inline void fail(const std::string& what, int error = errno) {
  throw std::system_error(error, std::generic_category(), what);
}

// Null (or an invalid descriptor) becomes an exception that says what failed.
template <typename Object>
Owned<Object> owned(Object* object, const char* what) {
  if (object == nullptr) fail(what);
  return Owned<Object>(object);
}

// Of an id that has one.
Address local_address_of(rdma_cm_id& id);
Address peer_address_of(rdma_cm_id& id);

// A channel whose descriptor does not block.
Owned<rdma_event_channel> make_event_channel();
void make_non_blocking(int fd);  // throws

}  // namespace rtrsnbd::fabric::verbs
