// SPDX-License-Identifier: BSD-3-Clause
// Readiness of a file descriptor, told by the ring: one multishot poll for input, and a single poll
// for output while somebody asks. On kernels without multishot polls the input poll is armed again
// each time.
//
// The kernel's poll refers to the object and to the open file, so letting go takes two steps:
// retire() cancels the polls, and the object frees itself when the last of them has ended.
#pragma once

#include <functional>
#include <memory>

#include "daemon/reactor.h"

namespace rtrsnbd::daemon {

class Watch final : public Lingering {
 public:
  struct Retire {
    void operator()(Watch* watch) const { watch->retire(); }
  };
  using Pointer = std::unique_ptr<Watch, Retire>;

  // on_ready is called on the reactor's thread when fd is readable, writable (if asked for), or in
  // error.
  static Pointer make(Reactor& reactor, int fd, std::function<void()> on_ready);
  ~Watch() override = default;

  // One call of on_ready when fd can be written to.
  void want_output();

  // The peer has said its last word. A poll tells of news only: when the end of the stream arrives
  // together with the last bytes, no second call comes for it, so whoever reads must then read up
  // to it.
  [[nodiscard]] bool hung_up() const { return hung_up_; }

 private:
  class Poll final : public Operation {
   public:
    Poll(Watch& watch, bool input) : watch_(watch), input_(input) {}
    void prepare(io_uring_sqe& entry) override;
    void complete(int result, uint32_t flags) override;
    bool in_flight = false;

   private:
    Watch& watch_;
    bool input_;
  };
  class Cancel final : public Operation {
   public:
    Cancel(Watch& watch, Poll& poll) : watch_(watch), poll_(poll) {}
    void prepare(io_uring_sqe& entry) override;
    void complete(int result, uint32_t flags) override;
    bool in_flight = false;

   private:
    Watch& watch_;
    Poll& poll_;
  };

  Watch(Reactor& reactor, int fd, std::function<void()> on_ready)
      : reactor_(reactor), fd_(fd), on_ready_(std::move(on_ready)) {}
  void arm(Poll& poll);
  void retire();
  void tell();
  void free_if_quiet();

  Reactor& reactor_;
  int fd_;
  std::function<void()> on_ready_;
  bool retired_ = false;
  bool telling_ = false;  // inside on_ready_, which may retire the watch
  bool multishot_ = true;
  bool hung_up_ = false;
  Poll input_{*this, true};
  Poll output_{*this, false};
  Cancel cancel_input_{*this, input_};
  Cancel cancel_output_{*this, output_};
};

}  // namespace rtrsnbd::daemon
