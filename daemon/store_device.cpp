// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/store_device.h"

#include <sys/uio.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>

namespace rtrsnbd::daemon {

using wire::RnbdOp;

namespace {

// A transfer the kernel keeps putting off is given up: it would have slept in the kernel instead.
constexpr uint32_t again_max = 64;
constexpr uint64_t ring_bytes_max = uint64_t{1} << 30;

bool modifies(RnbdOp op) {
  return op != RnbdOp::read && op != RnbdOp::flush;
}

const char* verb(RnbdOp op) {
  switch (op) {
    case RnbdOp::read:
      return "read";
    case RnbdOp::write:
      return "write";
    case RnbdOp::flush:
      return "flush";
    case RnbdOp::discard:
      return "discard";
    case RnbdOp::secure_erase:
      return "secure erase";
    case RnbdOp::write_zeroes:
      return "write zeroes";
  }
  return "unknown operation";
}

}  // namespace

int RingFiles::acquire(const Backing& backing) {
  if (backing.transfer() == Transfer::memory) return -1;  // does not go through the ring
  Use& use = uses_[&backing];
  if (use.count++ == 0) use.slot = reactor_.ring().add_file(backing.fd());
  return use.slot;
}

void RingFiles::release(const Backing& backing) {
  const auto found = uses_.find(&backing);
  if (found == uses_.end() || --found->second.count > 0) return;
  if (found->second.slot >= 0) reactor_.ring().remove_file(found->second.slot);
  uses_.erase(found);
}

// A request that does not end inside submit(). Its steps, some of which are left out:
//
//   preflush (worker)  ->  transfer (ring, until all is moved; or worker)  ->  done
//                      \-> range operation and the flush of FUA (worker)   ->
class StoreDevice::Task final : public Operation, public Job {
 public:
  explicit Task(StoreDevice& device) : device_(device) {}

  // tried_inline: submit_inline has had it and left it at `done`.
  void begin(rnbd::BlockRequest& request, bool tried_inline, uint64_t done) {
    request_ = &request;
    tried_inline_ = tried_inline;
    done_ = done;
    again_ = 0;
    result_ = 0;
    step_ = Step::transfer;
    if (request.preflush && request.op != RnbdOp::flush) {
      hand_to_worker(Step::preflush);
    } else {
      execute();
    }
  }

  // --- Operation: a transfer through the ring

  void prepare(io_uring_sqe& entry) override {
    const rnbd::BlockRequest& request = *request_;
    const bool write = request.op == RnbdOp::write;
    const auto length = device_.backing_->calls().ring_length(
        static_cast<uint32_t>(std::min(request.length - done_, ring_bytes_max)));
    const int file = device_.file_slot_ >= 0 ? device_.file_slot_ : device_.backing_->fd();
    std::byte* const data = request.data + done_;
    const uint64_t offset = request.offset + done_;
    const bool registered = request.registered_index >= 0;
    if (write) {
      registered
          ? io_uring_prep_write_fixed(&entry, file, data, length, offset, request.registered_index)
          : io_uring_prep_write(&entry, file, data, length, offset);
      if (request.fua) entry.rw_flags = RWF_DSYNC;
    } else {
      registered
          ? io_uring_prep_read_fixed(&entry, file, data, length, offset, request.registered_index)
          : io_uring_prep_read(&entry, file, data, length, offset);
    }
    if (device_.file_slot_ >= 0) entry.flags |= IOSQE_FIXED_FILE;
    if (again_ > 0) entry.flags |= IOSQE_ASYNC;  // it may sleep, on a thread of the kernel
  }

  void complete(int result, uint32_t) override {
    Backing& backing = *device_.backing_;
    const bool write = request_->op == RnbdOp::write;
    result = backing.calls().ring_result(write, result);
    if ((result == -EAGAIN || result == -EINTR) && ++again_ <= again_max) {
      device_.reactor_.start(*this);
      return;
    }
    if (result < 0) {
      // A write that was to be durable and was not: find out whether others are lost with it. In
      // the page cache they are; a direct write fails alone if the device can still flush.
      if (write && request_->fua) {
        if (backing.transfer() == Transfer::buffered) {
          backing.fail("durable write", -result);
        } else {
          result_ = -result;
          hand_to_worker(Step::check_flush);
          return;
        }
      }
      end(-result);
      return;
    }
    auto moved = static_cast<uint64_t>(result);
    if (backing.transfer() == Transfer::direct) moved -= moved % backing.offset_alignment();
    if (moved == 0) {
      end(EIO);  // the end of a file that somebody cut, or a device that takes nothing
      return;
    }
    done_ += moved;
    assert(done_ <= request_->length);
    if (done_ == request_->length) {
      end(0);
    } else {
      device_.reactor_.start(*this);
    }
  }

  // --- Job: what sleeps, on a worker

  void work() override {
    Backing& backing = *device_.backing_;
    const rnbd::BlockRequest& request = *request_;
    switch (step_) {
      case Step::preflush:
        result_ = backing.flush();
        return;
      case Step::check_flush:
        backing.flush();
        return;
      case Step::transfer:
        break;
    }
    switch (request.op) {
      case RnbdOp::flush:
        result_ = backing.flush();
        return;
      case RnbdOp::discard:
        result_ = backing.discard(request.offset, request.length);
        break;
      case RnbdOp::write_zeroes:
        result_ = backing.write_zeroes(request.offset, request.length, request.no_unmap);
        break;
      case RnbdOp::read:
      case RnbdOp::write:
        result_ = backing.transfer_by_copy(request.op == RnbdOp::write, request.data,
                                           request.offset, request.length, 0);
        break;
      case RnbdOp::secure_erase:
        result_ = EOPNOTSUPP;
        return;
    }
    if (result_ == 0 && request.fua && modifies(request.op)) result_ = backing.flush();
  }

  void run() override {
    if (step_ == Step::preflush && result_ == 0) {
      step_ = Step::transfer;
      execute();
    } else {
      end(result_);
    }
  }

 private:
  enum class Step : uint8_t { preflush, transfer, check_flush };

  void execute() {
    rnbd::BlockRequest& request = *request_;
    if (request.length == 0 && request.op != RnbdOp::flush) {
      end(0);
      return;
    }
    if (request.op != RnbdOp::read && request.op != RnbdOp::write) {
      hand_to_worker(Step::transfer);
      return;
    }
    if (!tried_inline_) {
      // The completion may end the device, so the task is given back before, and taken again if it
      // is needed.
      tried_inline_ = true;
      StoreDevice& device = device_;
      device.give_back(*this);
      if (device.submit_inline(request, done_)) return;
      device.free_tasks_.pop_back();
    }
    const auto address = reinterpret_cast<uintptr_t>(request.data);
    if (device_.backing_->transfer() == Transfer::direct &&
        address % device_.backing_->memory_alignment() != 0) {
      hand_to_worker(Step::transfer);  // does not happen with chunks, which are aligned to pages
      return;
    }
    device_.reactor_.start(*this);
  }

  void hand_to_worker(Step step) {
    step_ = step;
    if (!device_.backing_->workers().submit(*this, device_.reactor_)) end(ENOMEM);
  }

  void end(int error) {
    rnbd::BlockRequest& request = *request_;
    request_ = nullptr;
    StoreDevice& device = device_;
    device.give_back(*this);
    device.finish(request, error);
  }

  StoreDevice& device_;
  rnbd::BlockRequest* request_ = nullptr;
  uint64_t done_ = 0;
  bool tried_inline_ = false;
  uint32_t again_ = 0;
  int result_ = 0;
  Step step_ = Step::transfer;
};

StoreDevice::StoreDevice(std::shared_ptr<Backing> backing, Reactor& reactor, RingFiles& files)
    : backing_(std::move(backing)),
      reactor_(reactor),
      files_(files),
      file_slot_(files.acquire(*backing_)) {}

StoreDevice::~StoreDevice() {
  assert(in_flight() == 0);
  files_.release(*backing_);
}

void StoreDevice::submit(rnbd::BlockRequest& request) {
  const rnbd::DeviceProperties& properties = backing_->properties();
  in_flight_.store(in_flight() + 1, std::memory_order_relaxed);
  // The caller has checked these; a mistake there must not reach the disk.
  const uint64_t block = properties.logical_block_size;
  if (request.op != RnbdOp::flush && (request.offset > properties.size_bytes ||
                                      request.length > properties.size_bytes - request.offset ||
                                      request.offset % block != 0 || request.length % block != 0)) {
    answer(request, EINVAL);
    return;
  }
  if (modifies(request.op) && properties.read_only) {
    answer(request, EPERM);
    return;
  }
  if (backing_->failed() && (request.op != RnbdOp::read || request.preflush)) {
    answer(request, EIO);
    return;
  }
  const bool memory = backing_->transfer() == Transfer::memory;
  if (request.op == RnbdOp::flush ? memory : request.length == 0 && !request.preflush) {
    finish(request, 0);
    return;
  }
  uint64_t done = 0;
  const bool transfers = request.op == RnbdOp::read || request.op == RnbdOp::write;
  const bool inline_first = transfers && (!request.preflush || memory);
  if (inline_first && submit_inline(request, done)) return;
  take_task().begin(request, inline_first, done);
}

// Reads and writes that need not sleep. False: not all is done yet, the rest has to go another way.
bool StoreDevice::submit_inline(rnbd::BlockRequest& request, uint64_t& done) {
  Backing& backing = *backing_;
  const bool write = request.op == RnbdOp::write;
  int flags = 0;
  switch (backing.transfer()) {
    case Transfer::memory:
      break;
    case Transfer::direct:
      return false;
    case Transfer::buffered:
      // Only reads: RWF_NOWAIT does not keep a write from sleeping on a frozen filesystem.
      if (write || !backing.nowait_reads.load(std::memory_order_relaxed)) return false;
      flags = RWF_NOWAIT;
      break;
  }
  const int error =
      backing.transfer_now(write, request.data, request.offset, request.length, done, flags);
  if (flags != 0 && error == EAGAIN) return false;
  if (flags != 0 && (error == EOPNOTSUPP || error == EINVAL)) {
    backing.nowait_reads.store(false, std::memory_order_relaxed);
    return false;
  }
  finish(request, error);
  return true;
}

// What the backing said, put into words for the log and into a number for the client.
void StoreDevice::finish(rnbd::BlockRequest& request, int error) {
  if (error != 0) {
    report(request, error);
    error = client_errno(error);
  }
  answer(request, error);
}

// The device may be gone when this returns.
void StoreDevice::answer(rnbd::BlockRequest& request, int error) {
  in_flight_.store(in_flight() - 1, std::memory_order_relaxed);
  request.complete(error);
}

void StoreDevice::report(const rnbd::BlockRequest& request, int error) const {
  // The latch has been logged when it closed; saying so for each request would only repeat it.
  if (backing_->failed()) return;
  backing_->log()(LogLevel::warning, "volume " + backing_->name() + ": " + verb(request.op) +
                                         " of " + std::to_string(request.length) + " bytes at " +
                                         std::to_string(request.offset) +
                                         " failed: " + std::strerror(error));
}

StoreDevice::Task& StoreDevice::take_task() {
  if (free_tasks_.empty()) {
    tasks_.push_back(std::make_unique<Task>(*this));
    free_tasks_.reserve(tasks_.size());  // giving back never allocates
    return *tasks_.back();
  }
  Task& task = *free_tasks_.back();
  free_tasks_.pop_back();
  return task;
}

}  // namespace rtrsnbd::daemon
