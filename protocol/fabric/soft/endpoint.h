// SPDX-License-Identifier: BSD-3-Clause
// One connection of the soft fabric: the socket driver around MpaReader, Receiver and SendQueue.
//
// Who touches what. phase_, receiver_, reader_ and the limits belong to the receive role.
// Everything below mutex_ in the class is guarded by it; the socket is used without it by the
// receiver and by the one thread that has set sending_, and closed when neither does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "protocol/fabric/fabric.h"
#include "protocol/fabric/soft/domain.h"
#include "protocol/fabric/soft/fabric.h"
#include "protocol/fabric/soft/mpa.h"
#include "protocol/fabric/soft/receive_queue.h"
#include "protocol/fabric/soft/receiver.h"
#include "protocol/fabric/soft/send_queue.h"
#include "protocol/fabric/soft/socket.h"

namespace rtrsnbd::fabric::soft {

class SoftEndpoint final : public Endpoint, private Receiver::Sink {
 public:
  // Active: starts connecting.
  SoftEndpoint(const Options& options, SoftDomain& domain, const ConnectOptions& where,
               std::span<const std::byte> private_data, TimePoint now);
  // Passive: a connection whose request has been read.
  SoftEndpoint(const Options& options, SoftDomain& domain, Socket socket, const MpaTerms& request);
  ~SoftEndpoint() override;

  void set_handler(Handler* handler) override { handler_ = handler; }
  void accept(std::span<const std::byte> private_data) override;
  void post_receive(uint64_t id, std::byte* buffer, size_t length) override;
  void post_empty_receives(uint64_t id, uint32_t count) override;
  bool post_send(const SendRequest& request) override;
  void flush(Wait wait) override;
  [[nodiscard]] int fd() const override { return visible_fd_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool wants_write() const override;
  [[nodiscard]] size_t unsent_bytes() const override;
  bool progress(Wait wait, TimePoint now) override;
  void tick(TimePoint now) override;
  void disconnect(TimePoint now) override;
  void abort() override;
  [[nodiscard]] Address local_address() const override;
  [[nodiscard]] Address peer_address() const override;
  [[nodiscard]] Counters counters() const override;

 private:
  enum class Phase : uint8_t {
    connecting,  // active: TCP is under way
    asking,      // active: request sent, reply awaited
    asked,       // passive: accept() awaited
    established,
    closing,  // what is queued goes out, the rest of the stream is discarded
    closed,
  };

  // A thread whose bytes another one is sending. On its stack, and in the list until it is woken.
  struct SendWaiter {
    uint64_t target = 0;  // of sent_bytes
    bool woken = false;
    bool sends = false;  // it is the sender now
    std::condition_variable changed;
  };

  // flush sends by as many calls as it takes, this many vectors each.
  static constexpr size_t vectors_per_call = 256;
  // What one progress() reads at most before it lets others have their turn.
  static constexpr int reads_per_turn = 8;
  static constexpr std::chrono::seconds flush_limit{1};    // of an orderly close: what is queued
  static constexpr std::chrono::seconds closing_limit{2};  // and until the peer's end of stream

  bool on_completion(const Completion& completion) override;  // of Receiver::Sink

  void progress_connecting(Wait wait);
  bool progress_asking(Wait wait);
  bool progress_established(Wait wait, TimePoint now);
  bool progress_closing(Wait wait, TimePoint now);
  void check_limits(TimePoint now);
  void check_stop(TimePoint now);
  void on_connected();
  void on_reply();
  void establish(bool crc, bool initiator);
  void on_receive_end(int error);
  void on_protocol_error(TimePoint now);
  void begin_closing(DisconnectReason reason, std::string detail, TimePoint now);
  void finish(DisconnectReason reason, std::string_view detail);
  void close_socket();
  void release_hold();
  // These need mutex_.
  void flush_locked(std::unique_lock<std::mutex>& lock, Wait wait);
  void shut_write_if_sent();
  void give_up_sending();
  void wake_send_waiters(uint64_t sent_bytes);
  void pass_on_sending();

  const Options options_;
  const std::shared_ptr<KeyTable> keys_;
  const DomainId domain_;
  Handler* handler_ = nullptr;
  ReceiveQueue receives_;

  // Receive role.
  std::atomic<Phase> phase_;  // written by the receive role only
  std::optional<Receiver> receiver_;
  std::optional<MpaReader> reader_;
  std::vector<std::byte> private_data_;  // of the request to be sent
  MpaTerms request_terms_;               // of the request received or sent
  int connect_error_ = 0;                // of a connect() that failed at once
  TimePoint limit_{};                    // of the set-up phase
  DisconnectReason closing_reason_ = DisconnectReason::closed_by_us;
  std::string closing_detail_;
  TimePoint closing_since_{};
  uint64_t fpdus_at_mark_ = 0;  // a started FPDU must be whole within silence_max
  std::optional<TimePoint> mark_;

  // Written under mutex_, read without.
  std::atomic<bool> stop_{false};  // aborted, disconnected or overflowed: deliver nothing more
  std::atomic<bool> held_{false};  // a responder sends nothing before the initiator's first FPDU
  std::atomic<bool> write_blocked_{false};
  std::atomic<int> visible_fd_{-1};

  mutable std::mutex mutex_;
  Socket socket_;
  std::optional<SendQueue> queue_;
  bool sendable_ = false;   // posts are taken
  bool send_over_ = false;  // nothing more may be sent, nor the caller's memory be touched
  bool sending_ = false;    // one thread is in flush's loop
  std::condition_variable sender_left_;
  std::deque<SendWaiter*> send_waiters_;
  bool last_words_ = false;  // closing: what is queued is the last, then the write side is shut
  bool write_shut_ = false;
  bool aborted_ = false;
  std::optional<TimePoint> disconnect_since_;
  Address local_, peer_;
  int send_error_ = 0;
  bool overflowed_ = false;

  std::atomic<uint64_t> bytes_sent_{0}, bytes_received_{0}, messages_sent_{0},
      messages_received_{0}, send_calls_{0}, receive_calls_{0};
};

}  // namespace rtrsnbd::fabric::soft
