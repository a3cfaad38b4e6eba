// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/verbs/queue_pair.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>

namespace rtrsnbd::fabric::verbs {

namespace {

// The upper bits of a work request's id say what it is; the rest is the receive's id or index, or
// for sends how many of them complete with this one.
constexpr uint64_t tag_shift = 62;
constexpr uint64_t tag_empty_receive = 0;
constexpr uint64_t tag_receive = 1;
constexpr uint64_t tag_send = 2;
constexpr uint64_t tagged(uint64_t tag, uint64_t value) {
  return tag << tag_shift | value;
}
constexpr uint64_t value_of(uint64_t id) {
  return id & ((uint64_t{1} << tag_shift) - 1);
}

constexpr size_t receive_small = 16;  // RKEY_RSP has 8 bytes
constexpr size_t receive_medium = 512;

// An answer's key, or a request's header, travel inside the work request where the device can.
constexpr uint32_t inline_wanted = 64;

ibv_wr_opcode opcode_of(SendKind kind) {
  switch (kind) {
    case SendKind::send:
      return IBV_WR_SEND;
    case SendKind::send_immediate:
      return IBV_WR_SEND_WITH_IMM;
    case SendKind::send_invalidate:
      return IBV_WR_SEND_WITH_INV;
    case SendKind::write:
      return IBV_WR_RDMA_WRITE;
    case SendKind::write_immediate:
      return IBV_WR_RDMA_WRITE_WITH_IMM;
  }
  return IBV_WR_SEND;
}

std::string device_of(const rdma_cm_id& id) {
  return "RDMA device " + std::string(ibv_get_device_name(id.verbs->device));
}

}  // namespace

QueuePair::QueuePair(rdma_cm_id& id, std::shared_ptr<ProtectionDomain> domain,
                     const QueueSizes& sizes)
    : domain_(std::move(domain)), id_(id), copies_(domain_, inline_max) {
  ibv_pd* const pd = domain_->bind(id.verbs);
  ibv_device_attr limits{};
  if (const int error = ibv_query_device(id.verbs, &limits); error != 0)
    verbs::fail(device_of(id) + " does not tell its limits", error);
  if (limits.max_sge < static_cast<int>(segments_max))
    verbs::fail(device_of(id) + " takes " + std::to_string(limits.max_sge) +
                    " pieces per message, needed are " + std::to_string(segments_max),
                EOPNOTSUPP);
  const auto work_requests_max = static_cast<uint32_t>(limits.max_qp_wr);
  if (sizes.receives > work_requests_max)
    verbs::fail(device_of(id) + " holds " + std::to_string(work_requests_max) +
                    " receives per connection, needed are " + std::to_string(sizes.receives) +
                    " (a smaller queue-depth needs fewer)",
                EINVAL);
  send_capacity_ = std::clamp(sizes.sends, 2U, work_requests_max);
  signal_interval_ = std::max(1U, send_capacity_ / 4);

  channel_ = owned(ibv_create_comp_channel(id.verbs), "completion channel");
  make_non_blocking(channel_->fd);
  // When a connection breaks, every posted request completes, the unsignalled ones, too.
  const uint32_t completions = send_capacity_ + sizes.receives;
  if (completions > static_cast<uint32_t>(limits.max_cqe))
    verbs::fail(device_of(id) + " holds " + std::to_string(limits.max_cqe) +
                    " completions per connection, needed are " + std::to_string(completions) +
                    " (a smaller queue-depth needs fewer)",
                EINVAL);
  cq_ = owned(ibv_create_cq(id.verbs, static_cast<int>(completions), nullptr, channel_.get(), 0),
              "completion queue");

  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = cq_.get();
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = send_capacity_;
  wanted.cap.max_recv_wr = sizes.receives;
  wanted.cap.max_send_sge = segments_max;
  wanted.cap.max_recv_sge = 1;
  wanted.cap.max_inline_data = inline_wanted;
  ibv_qp_init_attr attributes = wanted;
  int status = rdma_create_qp(&id, pd, &attributes);
  if (status != 0 && errno == EINVAL) {  // some devices inline nothing
    attributes = wanted;
    attributes.cap.max_inline_data = 0;
    status = rdma_create_qp(&id, pd, &attributes);
  }
  if (status != 0)
    verbs::fail(device_of(id) + " makes no further connection (it has " +
                std::to_string(limits.max_qp) + " in all)");
  inline_capacity_ = attributes.cap.max_inline_data;
}

QueuePair::~QueuePair() {
  rdma_destroy_qp(&id_);
  if (unacknowledged_events_ != 0) ibv_ack_cq_events(cq_.get(), unacknowledged_events_);
}

// --- Receives

BouncePool& QueuePair::pool_for(size_t length) {
  const size_t size = length <= receive_small ? receive_small : std::max(length, receive_medium);
  for (const auto& pool : receive_pools_)
    if (pool->piece_size() == size) return *pool;
  return *receive_pools_.emplace_back(std::make_unique<BouncePool>(domain_, size));
}

bool QueuePair::post_receive(uint64_t id, std::byte* buffer, size_t length) {
  if (length == 0) return post_empty_receives(id, 1);
  const std::lock_guard lock(mutex_);
  uint32_t index = static_cast<uint32_t>(receives_.size());
  if (free_receives_.empty()) {
    receives_.emplace_back();
  } else {
    index = free_receives_.back();
    free_receives_.pop_back();
  }
  BouncePool& pool = pool_for(length);
  receives_[index] = {id, buffer, length, &pool, pool.take()};
  ibv_sge segment{reinterpret_cast<uintptr_t>(receives_[index].piece.data),
                  static_cast<uint32_t>(length), receives_[index].piece.lkey};
  ibv_recv_wr request{};
  request.wr_id = tagged(tag_receive, index);
  request.sg_list = &segment;
  request.num_sge = 1;
  ibv_recv_wr* bad = nullptr;
  return ibv_post_recv(id_.qp, &request, &bad) == 0;
}

bool QueuePair::post_empty_receives(uint64_t id, uint32_t count) {
  assert(id == value_of(id));
  std::array<ibv_recv_wr, batch> requests;
  while (count != 0) {
    const uint32_t some = std::min(count, static_cast<uint32_t>(batch));
    for (uint32_t i = 0; i < some; ++i) {
      requests[i] = {};
      requests[i].wr_id = tagged(tag_empty_receive, id);
      requests[i].next = i + 1 < some ? &requests[i + 1] : nullptr;
    }
    ibv_recv_wr* bad = nullptr;
    if (ibv_post_recv(id_.qp, requests.data(), &bad) != 0) return false;
    count -= some;
  }
  return true;
}

// --- Sends

void QueuePair::post_send(const SendRequest& request) {
  assert(request.segments.size() <= segments_max);
  const std::lock_guard lock(mutex_);
  Pending& pending = pending_.emplace_back();
  pending.opcode = opcode_of(request.kind);
  pending.immediate = request.kind == SendKind::send_invalidate ? request.invalidate_rkey
                                                                : htonl(request.immediate);
  pending.rkey = request.rkey;
  pending.remote_address = request.remote_address;
  size_t length = 0;
  for (const Segment& segment : request.segments) length += segment.length;
  pending.length = static_cast<uint32_t>(length);
  pending_bytes_ += length;
  if (length == 0) return;

  if (request.copy) {
    assert(length <= inline_max);
    const bool embed = length <= embedded_max && length <= inline_capacity_;
    if (embed)
      pending.embedded_length = static_cast<uint8_t>(length);
    else
      pending.piece = copies_.take();
    std::byte* to = embed ? pending.embedded.data() : pending.piece.data;
    for (const Segment& segment : request.segments) {
      std::memcpy(to, segment.data, segment.length);
      to += segment.length;
    }
    if (!embed) {
      pending.segment_count = 1;
      pending.segments[0] = {reinterpret_cast<uintptr_t>(pending.piece.data), pending.length,
                             pending.piece.lkey};
    }
    return;
  }
  for (const Segment& segment : request.segments) {
    if (segment.length == 0) continue;
    assert(segment.local != nullptr);
    pending.segments[pending.segment_count++] = {reinterpret_cast<uintptr_t>(segment.data),
                                                 static_cast<uint32_t>(segment.length),
                                                 segment.local->lkey()};
  }
}

void QueuePair::post_marker() {
  const std::lock_guard lock(mutex_);
  Pending& pending = pending_.emplace_back();
  pending.opcode = IBV_WR_RDMA_WRITE;  // of no bytes: nothing is examined, and nobody told
  pending.marker = true;
  marked_ = true;
}

bool QueuePair::flush() {
  const std::lock_guard lock(mutex_);
  return flush_locked();
}

bool QueuePair::flush_locked() {
  std::array<ibv_send_wr, batch> requests;
  std::array<ibv_sge, batch> embedded;
  while (!pending_.empty() && in_flight_.size() < send_capacity_) {
    const size_t room = send_capacity_ - in_flight_.size();
    const size_t count = std::min({pending_.size(), room, size_t{batch}});
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; ++i) {
      Pending& pending = pending_[i];
      ibv_send_wr& request = requests[i];
      request = {};
      request.next = i + 1 < count ? &requests[i + 1] : nullptr;
      request.opcode = pending.opcode;
      request.imm_data = pending.immediate;  // a union with invalidate_rkey
      request.sg_list = pending.segments.data();
      request.num_sge = pending.segment_count;
      if (pending.embedded_length != 0) {
        embedded[i] = {reinterpret_cast<uintptr_t>(pending.embedded.data()),
                       pending.embedded_length, 0};
        request.sg_list = &embedded[i];
        request.num_sge = 1;
        request.send_flags |= IBV_SEND_INLINE;
      }
      request.wr.rdma.remote_addr = pending.remote_address;
      request.wr.rdma.rkey = pending.rkey;
      ++unsignalled_;
      request.wr_id = tagged(tag_send, 0);
      if (unsignalled_ >= signal_interval_ || pending.marker) {
        request.send_flags |= IBV_SEND_SIGNALED;
        request.wr_id = tagged(tag_send, unsignalled_);
        unsignalled_ = 0;
      }
      bytes += pending.length;
    }
    ibv_send_wr* bad = nullptr;
    const int error = ibv_post_send(id_.qp, requests.data(), &bad);
    send_calls.fetch_add(1, std::memory_order_relaxed);
    if (error != 0) return false;
    for (size_t i = 0; i < count; ++i) {
      in_flight_.push_back(pending_.front().piece);
      pending_.pop_front();
    }
    pending_bytes_ -= bytes;
    bytes_sent.fetch_add(bytes, std::memory_order_relaxed);
    messages_sent.fetch_add(count, std::memory_order_relaxed);
  }
  blocked_.store(!pending_.empty(), std::memory_order_relaxed);
  return true;
}

size_t QueuePair::unsent_bytes() const {
  const std::lock_guard lock(mutex_);
  return pending_bytes_ + pending_.size() * embedded_max;
}

bool QueuePair::all_sent() const {
  const std::lock_guard lock(mutex_);
  return pending_.empty() && in_flight_.empty();
}

// Also for those before the signalled one: they complete in order.
void QueuePair::sent(uint32_t count) {
  const std::lock_guard lock(mutex_);
  for (; count != 0 && !in_flight_.empty(); --count) {
    if (in_flight_.front().data != nullptr) copies_.give_back(in_flight_.front());
    in_flight_.pop_front();
  }
  if (!flush_locked() && !failure_)
    failure_ = Failure{DisconnectReason::connection_lost, "the device takes no more sends"};
}

// --- Completions

uint32_t QueuePair::poll(Handler& handler) {
  std::array<ibv_wc, batch> entries;
  const int count = ibv_poll_cq(cq_.get(), batch, entries.data());
  if (count < 0 && !failure_)
    failure_ = Failure{DisconnectReason::connection_lost, "the completion queue cannot be read"};
  if (count <= 0) return 0;
  receive_calls.fetch_add(1, std::memory_order_relaxed);
  for (int i = 0; i < count && !failure_; ++i) {
    const ibv_wc& entry = entries[static_cast<size_t>(i)];
    if (entry.status != IBV_WC_SUCCESS)
      fail(std::span(entries).subspan(static_cast<size_t>(i), static_cast<size_t>(count - i)));
    else if (entry.wr_id >> tag_shift == tag_send)
      sent(static_cast<uint32_t>(value_of(entry.wr_id)));
    else
      received(entry, handler);
  }
  return static_cast<uint32_t>(count);
}

void QueuePair::received(const ibv_wc& entry, Handler& handler) {
  Completion completion;
  completion.has_immediate = (entry.wc_flags & IBV_WC_WITH_IMM) != 0;
  if (completion.has_immediate) completion.immediate = ntohl(entry.imm_data);
  if ((entry.wc_flags & IBV_WC_WITH_INV) != 0) completion.invalidated_rkey = entry.invalidated_rkey;
  const bool placed = entry.opcode == IBV_WC_RECV_RDMA_WITH_IMM;  // its bytes went elsewhere
  if (entry.wr_id >> tag_shift == tag_receive) {
    const std::lock_guard lock(mutex_);
    const auto index = static_cast<uint32_t>(value_of(entry.wr_id));
    Receive& receive = receives_[index];
    completion.id = receive.id;
    if (!placed) {
      completion.byte_count =
          static_cast<uint32_t>(std::min<size_t>(entry.byte_len, receive.length));
      std::memcpy(receive.buffer, receive.piece.data, completion.byte_count);
    }
    receive.pool->give_back(receive.piece);
    free_receives_.push_back(index);
  } else {
    completion.id = value_of(entry.wr_id);
  }
  messages_received.fetch_add(1, std::memory_order_relaxed);
  bytes_received.fetch_add(entry.byte_len, std::memory_order_relaxed);
  handler.on_completion(completion);
}

// When a connection breaks, everything that was posted completes as flushed, except for the request
// that broke it; which comes first depends on the device.
void QueuePair::fail(std::span<const ibv_wc> entries) {
  const ibv_wc* told = &entries.front();
  std::array<ibv_wc, batch> more;
  for (auto some = entries; !some.empty();) {
    const auto reason = std::find_if(some.begin(), some.end(), [](const ibv_wc& entry) {
      return entry.status != IBV_WC_SUCCESS && entry.status != IBV_WC_WR_FLUSH_ERR;
    });
    if (reason != some.end()) {
      told = &*reason;
      break;
    }
    const int count = ibv_poll_cq(cq_.get(), batch, more.data());
    if (count <= 0) break;
    some = std::span<const ibv_wc>(more).first(static_cast<size_t>(count));
    told = &some.front();
  }
  fail(*told);
}

void QueuePair::fail(const ibv_wc& entry) {
  const bool send = entry.wr_id >> tag_shift == tag_send;
  Failure failure{DisconnectReason::connection_lost, ibv_wc_status_str(entry.status)};
  switch (entry.status) {
    case IBV_WC_SUCCESS:
    case IBV_WC_WR_FLUSH_ERR:
      // The device gave up the connection, and tells the reason on another channel, if at all.
      failure.detail = "the device ended it";
      break;
    case IBV_WC_RETRY_EXC_ERR:
      failure.detail = "the peer does not answer";
      break;
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_OP_ERR:
      failure.reason = send ? DisconnectReason::remote_error : DisconnectReason::protocol_error;
      break;
    default:
      // Of a receive: what came did not fit.
      if (!send) failure.reason = DisconnectReason::protocol_error;
      break;
  }
  failure_ = std::move(failure);
}

bool QueuePair::arm() {
  return ibv_req_notify_cq(cq_.get(), 0) == 0;
}

// One at most is waiting: it was asked for once.
void QueuePair::take_event() {
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  if (ibv_get_cq_event(channel_.get(), &cq, &context) != 0) return;
  // Acknowledging takes a lock, and destroying the queue waits for it: now and then is enough.
  if (++unacknowledged_events_ < 64) return;
  ibv_ack_cq_events(cq_.get(), unacknowledged_events_);
  unacknowledged_events_ = 0;
}

}  // namespace rtrsnbd::fabric::verbs
