// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/watch.h"

#include <poll.h>

#include <cerrno>

namespace rtrsnbd::daemon {

void Watch::Poll::prepare(io_uring_sqe& entry) {
  if (!input_) {
    io_uring_prep_poll_add(&entry, watch_.fd_, POLLOUT);
  } else if (watch_.multishot_) {
    io_uring_prep_poll_multishot(&entry, watch_.fd_, POLLIN | POLLRDHUP);
  } else {
    io_uring_prep_poll_add(&entry, watch_.fd_, POLLIN | POLLRDHUP);
  }
}

void Watch::Poll::complete(int result, uint32_t flags) {
  const bool ended = (flags & IORING_CQE_F_MORE) == 0;
  if (ended) in_flight = false;
  if (watch_.retired_) {
    watch_.free_if_quiet();
    return;
  }
  if (result == -EINVAL && input_ && watch_.multishot_) {
    watch_.multishot_ = false;
    watch_.arm(*this);
    return;
  }
  if (result > 0 && (result & (POLLRDHUP | POLLHUP | POLLERR)) != 0) watch_.hung_up_ = true;
  // Armed before the handler runs: a byte that arrives while it reads is then reported again.
  if (ended && input_ && result != -EBADF) watch_.arm(*this);
  watch_.tell();
}

void Watch::Cancel::prepare(io_uring_sqe& entry) {
  io_uring_prep_poll_remove(&entry, reinterpret_cast<uintptr_t>(static_cast<Operation*>(&poll_)));
}

void Watch::Cancel::complete(int, uint32_t) {
  // Whether the poll was cancelled, is just being completed (EALREADY) or was over before (ENOENT):
  // its own completion ends the matter.
  in_flight = false;
  watch_.free_if_quiet();
}

Watch::Pointer Watch::make(Reactor& reactor, int fd, std::function<void()> on_ready) {
  Pointer watch(new Watch(reactor, fd, std::move(on_ready)));
  watch->arm(watch->input_);
  return watch;
}

void Watch::arm(Poll& poll) {
  if (poll.in_flight) return;
  poll.in_flight = true;
  reactor_.start(poll);
}

void Watch::want_output() {
  arm(output_);
}

void Watch::retire() {
  retired_ = true;
  reactor_.keep(std::unique_ptr<Lingering>(this));
  for (Cancel* cancel : {&cancel_input_, &cancel_output_}) {
    Poll& poll = cancel == &cancel_input_ ? input_ : output_;
    if (!poll.in_flight) continue;
    cancel->in_flight = true;
    reactor_.start(*cancel);
  }
  free_if_quiet();
}

void Watch::tell() {
  telling_ = true;
  on_ready_();
  telling_ = false;
  free_if_quiet();
}

void Watch::free_if_quiet() {
  if (!retired_ || telling_) return;
  if (input_.in_flight || output_.in_flight || cancel_input_.in_flight || cancel_output_.in_flight)
    return;
  reactor_.release(this);
}

}  // namespace rtrsnbd::daemon
