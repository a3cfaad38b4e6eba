// SPDX-License-Identifier: BSD-3-Clause
#include "protocol/fabric/soft/endpoint.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>

namespace rtrsnbd::fabric::soft {

namespace {

bool would_block(int error) {
  return error == EAGAIN || error == EWOULDBLOCK;
}

std::string error_text(int error) {
  const char* const text = strerrordesc_np(error);  // no translation, and no lock of the locale
  return text != nullptr ? text : "errno " + std::to_string(error);
}

// This CRC policy, between these two ends.
bool wants_crc(Crc policy, const Address& local, const Address& peer) {
  switch (policy) {
    case Crc::on:
      return true;
    case Crc::off:
      return false;
    case Crc::automatic:
      break;
  }
  return !is_same_host(local, peer);
}

void set_blocking(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  if (flags >= 0) fcntl(fd, F_SETFL, flags & ~O_NONBLOCK);
}

constexpr std::chrono::milliseconds sleep_time(Wait wait) {
  return wait == Wait::yes ? sleep_max : std::chrono::milliseconds(0);
}

}  // namespace

SoftEndpoint::SoftEndpoint(const Options& options, SoftDomain& domain, const ConnectOptions& where,
                           std::span<const std::byte> private_data, TimePoint now)
    : options_(options),
      keys_(domain.keys()),
      domain_(domain.id()),
      phase_(Phase::connecting),
      private_data_(private_data.begin(), private_data.end()),
      limit_(now + options.connect_limit),
      peer_(where.target) {
  assert(private_data.size() <= private_data_max);
  socket_ = Socket(::socket(where.target.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_) throw std::system_error(errno, std::generic_category(), "socket");
  const int fd = socket_.get();
  prepare_connection(fd);
  visible_fd_ = fd;

  // What fails at once is reported by progress() like what fails later.
  if (where.source) {
    const int on = 1;
    setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
    if (::bind(fd, where.source->get(), where.source->length()) != 0) {
      connect_error_ = errno;
      closing_detail_ = "source address " + where.source->host_text() + ": ";
      return;
    }
  }
  if (::connect(fd, where.target.get(), where.target.length()) != 0 && errno != EINPROGRESS)
    connect_error_ = errno;
}

SoftEndpoint::SoftEndpoint(const Options& options, SoftDomain& domain, Socket socket,
                           const MpaTerms& request)
    : options_(options),
      keys_(domain.keys()),
      domain_(domain.id()),
      phase_(Phase::asked),
      request_terms_(request),
      held_(true),
      visible_fd_(socket.get()),
      socket_(std::move(socket)),
      local_(local_address_of(socket_.get())),
      peer_(peer_address_of(socket_.get())) {}

SoftEndpoint::~SoftEndpoint() = default;

// Posting.

void SoftEndpoint::post_receive(uint64_t id, std::byte* buffer, size_t length) {
  receives_.post(id, buffer, length);
}

void SoftEndpoint::post_empty_receives(uint64_t id, uint32_t count) {
  receives_.post_empty(id, count);
}

bool SoftEndpoint::post_send(const SendRequest& request) {
  const std::lock_guard lock(mutex_);
  if (!sendable_) return false;
  try {
    queue_->post(request);
  } catch (const std::bad_alloc&) {
    overflowed_ = true;  // half a message may be queued: the stream cannot go on
  }
  if (queue_->full()) overflowed_ = true;
  if (overflowed_) {
    give_up_sending();
    return false;
  }
  messages_sent_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

bool SoftEndpoint::wants_write() const {
  return write_blocked_.load(std::memory_order_relaxed) ||
         phase_.load(std::memory_order_relaxed) == Phase::connecting;
}

size_t SoftEndpoint::unsent_bytes() const {
  const std::lock_guard lock(mutex_);
  return queue_ ? static_cast<size_t>(queue_->posted_bytes() - queue_->sent_bytes()) : 0;
}

// The connection is lost: whoever sleeps on the socket wakes up. What the peer has sent so far can
// still be read.
void SoftEndpoint::give_up_sending() {
  sendable_ = false;
  send_over_ = true;
  if (overflowed_ || aborted_) stop_ = true;
  if (socket_) ::shutdown(socket_.get(), SHUT_RDWR);
  wake_send_waiters(UINT64_MAX);
}

void SoftEndpoint::wake_send_waiters(uint64_t sent_bytes) {
  while (!send_waiters_.empty() && send_waiters_.front()->target <= sent_bytes) {
    SendWaiter& waiter = *send_waiters_.front();
    send_waiters_.pop_front();
    waiter.woken = true;
    waiter.changed.notify_one();
  }
}

// The next one who waits goes on; it has the role of the sender before it wakes up, so that nobody
// comes in between.
void SoftEndpoint::pass_on_sending() {
  if (!send_waiters_.empty()) {
    SendWaiter& next = *send_waiters_.front();
    send_waiters_.pop_front();
    next.woken = next.sends = true;
    next.changed.notify_one();
    return;
  }
  sending_ = false;
  sender_left_.notify_all();
}

void SoftEndpoint::flush(Wait wait) {
  std::unique_lock lock(mutex_);
  flush_locked(lock, wait);
}

// One thread at a time is the sender. The others leave their work in the queue, which the sender
// looks at again before it leaves, so nothing stays behind; they wait for it only if they asked to.
void SoftEndpoint::flush_locked(std::unique_lock<std::mutex>& lock, Wait wait) {
  if (!queue_ || held_) return;
  const uint64_t target = queue_->posted_bytes();
  if (sending_) {
    if (wait == Wait::no) return;
    SendWaiter self;
    self.target = target;
    send_waiters_.push_back(
        &self);  // what was posted only grows: they are in the order of their targets
    self.changed.wait(lock, [&self] { return self.woken; });
    if (!self.sends) return;  // all is sent, or never will be
  } else {
    if (send_over_ || queue_->empty()) return;
    sending_ = true;
  }
  const int fd = socket_.get();
  std::array<iovec, vectors_per_call> vectors;
  while (!send_over_ && !queue_->empty()) {
    size_t bytes = 0;
    const size_t count = queue_->gather(vectors, bytes);
    lock.unlock();
    const ssize_t sent = send(fd, std::span(vectors).first(count), MSG_DONTWAIT);
    const int error = errno;
    lock.lock();
    send_calls_.fetch_add(1, std::memory_order_relaxed);
    if (sent >= 0) {
      queue_->sent(static_cast<size_t>(sent));
      bytes_sent_.fetch_add(static_cast<uint64_t>(sent), std::memory_order_relaxed);
      wake_send_waiters(queue_->sent_bytes());
      // Ours is sent: one of them goes on. Else the others' work could keep us here for ever.
      if (wait == Wait::yes && !send_waiters_.empty() && queue_->sent_bytes() >= target) break;
      if (static_cast<size_t>(sent) == bytes) continue;
    } else if (!would_block(error)) {
      send_error_ = error;
      give_up_sending();
      break;
    }
    // The socket is full.
    if (wait == Wait::no) break;
    lock.unlock();
    wait_for(fd, POLLOUT, sleep_max);
    lock.lock();
  }
  write_blocked_ = !send_over_ && !queue_->empty();
  pass_on_sending();
  shut_write_if_sent();
}

void SoftEndpoint::shut_write_if_sent() {
  if (!last_words_ || sending_ || write_shut_ || send_over_ || !queue_->empty()) return;
  write_shut_ = true;
  ::shutdown(socket_.get(), SHUT_WR);
}

void SoftEndpoint::release_hold() {
  std::unique_lock lock(mutex_);
  held_ = false;
  flush_locked(lock, Wait::no);
}

// Set-up.

void SoftEndpoint::establish(bool crc, bool initiator) {
  receiver_.emplace(*keys_, domain_, receives_, crc);
  reader_.reset();
  const std::lock_guard lock(mutex_);
  queue_.emplace(crc, options_.segment_payload);
  held_ = !initiator;
  sendable_ = !stop_;
  phase_ = Phase::established;
}

void SoftEndpoint::accept(std::span<const std::byte> private_data) {
  if (phase_ != Phase::asked) return;
  const bool crc = request_terms_.crc || wants_crc(options_.crc, local_address(), peer_address());
  MpaFrame frame;
  const size_t length = make_mpa_accept(frame, request_terms_, crc, private_data);
  establish(crc, false);
  iovec vector{frame.data(), length};
  // It is the first thing this socket sends, so there is room; if it fails the connection is gone,
  // which progress() will find out too.
  if (send(socket_.get(), {&vector, 1}, MSG_DONTWAIT) != static_cast<ssize_t>(length)) {
    const std::lock_guard lock(mutex_);
    send_error_ = ECONNRESET;
    give_up_sending();
  }
}

void SoftEndpoint::progress_connecting(Wait wait) {
  int error = connect_error_;
  if (error == 0) {
    if (wait_for(socket_.get(), POLLOUT, sleep_time(wait)) == 0) return;
    socklen_t length = sizeof error;
    if (getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  }
  if (stop_) return check_stop({});
  if (error == 0) return on_connected();
  finish(error == ECONNREFUSED ? DisconnectReason::refused : DisconnectReason::unreachable,
         closing_detail_ + error_text(error));
}

void SoftEndpoint::on_connected() {
  const int fd = socket_.get();
  set_blocking(fd);
  const Address local = local_address_of(fd);
  const Address peer = peer_address();
  {
    const std::lock_guard lock(mutex_);
    local_ = local;
  }
  request_terms_ = {};
  request_terms_.crc = wants_crc(options_.crc, local, peer);
  MpaFrame frame;
  iovec vector{frame.data(), make_mpa_request(frame, request_terms_.crc, private_data_)};
  if (send(fd, {&vector, 1}, MSG_DONTWAIT) != static_cast<ssize_t>(vector.iov_len))
    return finish(DisconnectReason::connection_lost, "connection request could not be sent");
  reader_.emplace(MpaReader::Kind::reply, request_terms_);
  phase_ = Phase::asking;
}

bool SoftEndpoint::progress_asking(Wait wait) {
  int flags = wait == Wait::yes ? 0 : MSG_DONTWAIT;
  while (reader_->state() == MpaReader::State::reading) {
    const auto buffer = reader_->buffer();
    const iovec vector{buffer.data(), buffer.size()};
    const ssize_t count = receive(socket_.get(), {&vector, 1}, flags);
    const int error = errno;
    receive_calls_.fetch_add(1, std::memory_order_relaxed);
    if (stop_) {
      check_stop({});
      return false;
    }
    if (count <= 0) {
      if (count < 0 && would_block(error)) return false;
      finish(DisconnectReason::connection_lost,
             count == 0 ? "closed by the peer during connection set-up"
                        : "during connection set-up: " + error_text(error));
      return false;
    }
    bytes_received_.fetch_add(static_cast<uint64_t>(count), std::memory_order_relaxed);
    reader_->received(static_cast<size_t>(count));
    flags = MSG_DONTWAIT;
  }
  on_reply();
  return phase_ != Phase::closed;
}

void SoftEndpoint::on_reply() {
  if (reader_->state() != MpaReader::State::complete)
    return finish(DisconnectReason::protocol_error,
                  std::string(reader_->why()) + " in answer to ours");
  const auto bytes = reader_->private_data();
  const std::vector<std::byte> private_data(bytes.begin(), bytes.end());
  if (reader_->rejected()) {
    close_socket();
    handler_->on_rejected(private_data);
    return;
  }
  establish(request_terms_.crc || reader_->terms().crc, true);
  handler_->on_established(private_data);
}

// The connection at work.

bool SoftEndpoint::on_completion(const Completion& completion) {
  // Whatever the handler answers may be sent now.
  if (held_) release_hold();
  handler_->on_completion(completion);
  return !stop_.load(std::memory_order_relaxed);
}

bool SoftEndpoint::progress_established(Wait wait, TimePoint now) {
  if (write_blocked_) {
    flush(Wait::no);
    if (write_blocked_ && wait == Wait::yes) {
      wait_for(socket_.get(), POLLIN | POLLOUT, sleep_max);
      flush(Wait::no);
      wait = Wait::no;
    }
  }
  int flags = wait == Wait::yes ? 0 : MSG_DONTWAIT;
  for (int i = 0; i < reads_per_turn; ++i) {
    const auto vectors = receiver_->begin();
    if (vectors.empty()) {
      on_protocol_error(now);
      return true;
    }
    size_t offered = 0;
    for (const iovec& vector : vectors) offered += vector.iov_len;
    const ssize_t result = receive(socket_.get(), vectors, flags);
    const int error = errno;
    const size_t count = result > 0 ? static_cast<size_t>(result) : 0;
    receive_calls_.fetch_add(1, std::memory_order_relaxed);
    bytes_received_.fetch_add(count, std::memory_order_relaxed);
    if (stop_) {
      receiver_->end(0, *this);
      check_stop(now);
      return phase_ != Phase::closed;
    }
    const auto status = receiver_->end(count, *this);
    if (result <= 0) {
      if (result < 0 && would_block(error)) return false;
      on_receive_end(result == 0 ? 0 : error);
      return false;
    }
    messages_received_.store(receiver_->messages(), std::memory_order_relaxed);
    if (held_ && receiver_->fpdus() > 0) release_hold();
    switch (status) {
      case Receiver::Status::running:
        break;
      case Receiver::Status::failed:
        on_protocol_error(now);
        return phase_ != Phase::closed;
      case Receiver::Status::terminated:
        finish(DisconnectReason::remote_error, receiver_->detail());
        return false;
      case Receiver::Status::stopped:
        check_stop(now);
        return phase_ != Phase::closed;
    }
    // A read that did not fill its room has emptied the socket.
    if (count < offered) return false;
    flags = MSG_DONTWAIT;
  }
  return true;
}

// End of stream, or an error of the socket.
void SoftEndpoint::on_receive_end(int error) {
  int send_error = 0;
  {
    const std::lock_guard lock(mutex_);
    send_error = send_error_;
  }
  if (error != 0) return finish(DisconnectReason::connection_lost, error_text(error));
  if (send_error != 0) return finish(DisconnectReason::connection_lost, error_text(send_error));
  if (receiver_->inside_fpdu() || receiver_->inside_message())
    return finish(DisconnectReason::connection_lost, "the stream ended in the middle of a message");
  finish(DisconnectReason::closed_by_peer, {});
}

void SoftEndpoint::on_protocol_error(TimePoint now) {
  const Receiver::Failure& failure = receiver_->failure();
  std::string detail = receiver_->detail();
  bool silent = false;
  {
    const std::lock_guard lock(mutex_);
    sendable_ = false;
    if (held_) {
      // No header of the initiator was seen yet: it may not even be ready to read a Terminate.
      silent = failure.error.layer_type == wire::iwarp::error::framing.layer_type;
      queue_->clear();
      held_ = false;
    }
    if (!silent) queue_->post_terminate(failure.error, failure.header_bytes());
  }
  if (silent) return finish(DisconnectReason::protocol_error, detail);
  begin_closing(DisconnectReason::protocol_error, std::move(detail), now);
}

// Closing.

void SoftEndpoint::disconnect(TimePoint now) {
  std::unique_lock lock(mutex_);
  if (disconnect_since_ || !socket_) return;
  disconnect_since_ = now;
  sendable_ = false;
  stop_ = true;
  if (!queue_) return;  // still in set-up: progress() or tick() closes
  if (held_) {
    queue_->clear();
    held_ = false;
  }
  last_words_ = true;
  flush_locked(lock, Wait::no);
  shut_write_if_sent();
}

void SoftEndpoint::abort() {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  give_up_sending();
}

// Acts on what another thread, or the handler, has decided.
void SoftEndpoint::check_stop(TimePoint now) {
  bool aborted = false;
  bool overflowed = false;
  TimePoint since = now;
  {
    const std::lock_guard lock(mutex_);
    aborted = aborted_;
    overflowed = overflowed_;
    if (disconnect_since_) since = *disconnect_since_;
  }
  if (phase_ == Phase::closed) return;
  if (aborted) return finish(DisconnectReason::closed_by_us, "aborted");
  if (overflowed)
    return finish(DisconnectReason::connection_lost, "too much is queued: the peer does not read");
  if (phase_ == Phase::established)
    begin_closing(DisconnectReason::closed_by_us, {}, since);
  else if (phase_ != Phase::closing)
    finish(DisconnectReason::closed_by_us, {});
}

void SoftEndpoint::begin_closing(DisconnectReason reason, std::string detail, TimePoint now) {
  closing_reason_ = reason;
  closing_detail_ = std::move(detail);
  closing_since_ = now;
  phase_ = Phase::closing;
  std::unique_lock lock(mutex_);
  sendable_ = false;
  last_words_ = true;
  flush_locked(lock, Wait::no);
  shut_write_if_sent();
}

// Nothing is delivered any more. The stream is read to its end, because closing a socket with
// unread bytes sends a reset, which may overtake our last words.
bool SoftEndpoint::progress_closing(Wait wait, TimePoint now) {
  bool unsent = false;
  {
    std::unique_lock lock(mutex_);
    flush_locked(lock, Wait::no);
    shut_write_if_sent();
    unsent = !send_over_ && !queue_->empty();
  }
  if (wait == Wait::yes)
    wait_for(socket_.get(), unsent ? POLLIN | POLLOUT : POLLIN,
             std::chrono::milliseconds(sleep_max));
  std::array<std::byte, 16 * 1024> discarded;
  for (int i = 0; i < reads_per_turn; ++i) {
    const iovec vector{discarded.data(), discarded.size()};
    const ssize_t count = receive(socket_.get(), {&vector, 1}, MSG_DONTWAIT);
    const int error = errno;
    if (stop_) {
      check_stop(now);
      if (phase_ == Phase::closed) return false;
    }
    if (count < 0 && would_block(error)) {
      check_limits(now);
      return false;
    }
    if (count <= 0) {
      finish(closing_reason_, closing_detail_);
      return false;
    }
    bytes_received_.fetch_add(static_cast<uint64_t>(count), std::memory_order_relaxed);
  }
  check_limits(now);
  return phase_ != Phase::closed;
}

void SoftEndpoint::close_socket() {
  std::unique_lock lock(mutex_);
  sendable_ = false;
  send_over_ = true;
  if (socket_) ::shutdown(socket_.get(), SHUT_RDWR);
  wake_send_waiters(UINT64_MAX);
  // The sender may still be reading the caller's memory.
  sender_left_.wait(lock, [this] { return !sending_; });
  if (queue_) queue_->clear();
  write_blocked_ = false;
  visible_fd_ = -1;
  socket_.close();
  phase_ = Phase::closed;
}

void SoftEndpoint::finish(DisconnectReason reason, std::string_view detail) {
  assert(phase_ != Phase::closed);
  const std::string text(detail);  // may be one of our own members, or of the receiver
  close_socket();
  handler_->on_disconnected(reason, text);
}

// Driving.

bool SoftEndpoint::progress(Wait wait, TimePoint now) {
  assert(handler_ != nullptr);
  if (stop_) check_stop(now);
  switch (phase_) {
    case Phase::connecting:
      progress_connecting(wait);
      return false;
    case Phase::asking:
      return progress_asking(wait);
    case Phase::asked: {
      // An initiator has nothing to say before our reply.
      std::byte byte;
      const iovec vector{&byte, 1};
      const ssize_t count =
          receive(socket_.get(), {&vector, 1}, (wait == Wait::yes ? 0 : MSG_DONTWAIT) | MSG_PEEK);
      if (stop_)
        check_stop(now);
      else if (count > 0)
        finish(DisconnectReason::protocol_error, "bytes after the connection request");
      else if (count == 0 || !would_block(errno))
        finish(DisconnectReason::connection_lost, "closed by the peer during connection set-up");
      return false;
    }
    case Phase::established:
      return progress_established(wait, now);
    case Phase::closing:
      return progress_closing(wait, now);
    case Phase::closed:
      return false;
  }
  return false;
}

void SoftEndpoint::tick(TimePoint now) {
  assert(handler_ != nullptr);
  if (stop_) check_stop(now);
  if (phase_ == Phase::connecting && connect_error_ != 0) return progress_connecting(Wait::no);
  if (phase_ == Phase::closing) {
    progress_closing(Wait::no, now);
    return;
  }
  check_limits(now);
}

void SoftEndpoint::check_limits(TimePoint now) {
  switch (phase_) {
    case Phase::connecting:
    case Phase::asking:
      if (now >= limit_)
        finish(DisconnectReason::unreachable, phase_ == Phase::connecting
                                                  ? "no answer to the TCP connection attempt"
                                                  : "no answer to the connection request");
      return;
    case Phase::asked:
      if (limit_ == TimePoint{})
        limit_ = now + options_.accept_limit;
      else if (now >= limit_)
        finish(DisconnectReason::closed_by_us, "the connection request was not answered in time");
      return;
    case Phase::established:
      if (!receiver_->inside_fpdu()) {
        mark_.reset();
      } else if (!mark_ || fpdus_at_mark_ != receiver_->fpdus()) {
        mark_ = now;
        fpdus_at_mark_ = receiver_->fpdus();
      } else if (now - *mark_ >= silence_max) {
        finish(DisconnectReason::connection_lost, "the peer stopped in the middle of a message");
      }
      return;
    case Phase::closing: {
      bool unsent = false;
      {
        const std::lock_guard lock(mutex_);
        unsent = !write_shut_ && !send_over_;
      }
      if (now - closing_since_ >= (unsent ? flush_limit : closing_limit))
        finish(closing_reason_, closing_detail_);
      return;
    }
    case Phase::closed:
      return;
  }
}

Address SoftEndpoint::local_address() const {
  const std::lock_guard lock(mutex_);
  return local_;
}

Address SoftEndpoint::peer_address() const {
  const std::lock_guard lock(mutex_);
  return peer_;
}

Endpoint::Counters SoftEndpoint::counters() const {
  Counters result;
  result.bytes_sent = bytes_sent_.load(std::memory_order_relaxed);
  result.bytes_received = bytes_received_.load(std::memory_order_relaxed);
  result.messages_sent = messages_sent_.load(std::memory_order_relaxed);
  result.messages_received = messages_received_.load(std::memory_order_relaxed);
  result.send_calls = send_calls_.load(std::memory_order_relaxed);
  result.receive_calls = receive_calls_.load(std::memory_order_relaxed);
  return result;
}

}  // namespace rtrsnbd::fabric::soft
