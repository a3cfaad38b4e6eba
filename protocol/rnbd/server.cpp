// SPDX-License-Identifier: BSD-3-Clause
// User messages in, block requests out. Everything a message says is checked here against the
// device it is for and against the data that came with it; what reaches BlockRequest can be
// trusted.
#include "protocol/rnbd/server.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace rtrsnbd::rnbd {

namespace {

using rtrs::ServerRequest;
using wire::AccessMode;
using wire::RnbdOp;
using wire::RnbdType;

class ServerSession;

struct Device {
  uint32_t id = 0;
  std::string name;
  AccessMode mode = AccessMode::read_only;
  std::unique_ptr<OpenDevice> open;
  uint32_t in_flight = 0;
  bool closing = false;  // the client closed it, or is gone; no request is taken any more
  std::vector<ServerRequest*> closers;  // CLOSE requests that wait for the last operation
};

// An operation between ServerSession::io and its completion. Kept for the next one afterwards.
class Operation final : public BlockRequest {
 public:
  explicit Operation(ServerSession& session) : session_(session) {}
  void complete(int error) override;

 private:
  friend class ServerSession;
  ServerSession& session_;
  Device* device_ = nullptr;
  ServerRequest* request_ = nullptr;
};

constexpr uint16_t max_segments = 128;  // as the kernel's server says; clients do not use it

uint32_t saturated(uint64_t value) {
  return static_cast<uint32_t>(std::min<uint64_t>(value, std::numeric_limits<uint32_t>::max()));
}

uint16_t saturated_block_size(uint32_t bytes) {
  constexpr uint32_t largest = 32768;  // the largest power of two that the field can hold
  return static_cast<uint16_t>(std::min(bytes, largest));
}

std::string_view to_string(AccessMode mode) {
  switch (mode) {
    case AccessMode::read_only:
      return "read-only";
    case AccessMode::read_write:
      return "read-write";
    case AccessMode::migration:
      return "for migration";
  }
  return "?";
}

class ServerSession final : public rtrs::UpperSession {
 public:
  ServerSession(const rtrs::SessionIdentity& identity, std::unique_ptr<Volumes> volumes,
                LogSink log)
      : label_("session '" + printable(identity.name) + "'"),
        max_io_size_(identity.max_io_size),
        volumes_(std::move(volumes)),
        log_(std::move(log)) {}

  ~ServerSession() override {
    for (const auto& device : devices_) assert(!device || device->in_flight == 0);
  }

  void on_request(ServerRequest& request) override {
    const auto type = wire::parse_rnbd_type(request.user());
    if (!type) return request.respond(type.error());
    switch (*type) {
      case RnbdType::io:
        return io(request);
      case RnbdType::session_info:
        return request.respond(session_info(request));
      case RnbdType::open:
        return request.respond(open(request));
      case RnbdType::close:
        return close(request);
      case RnbdType::session_info_response:
      case RnbdType::open_response:
        break;
    }
    request.respond(EINVAL);
  }

  void on_session_down() override {
    down_ = true;
    for (size_t id = 0; id < devices_.size(); ++id) {
      if (!devices_[id]) continue;
      devices_[id]->closing = true;
      close_if_quiet(*devices_[id]);
    }
  }

  void completed(Operation& operation, int error) {
    Device& device = *std::exchange(operation.device_, nullptr);
    ServerRequest& request = *std::exchange(operation.request_, nullptr);
    free_operations_.push_back(&operation);
    assert(device.in_flight != 0);
    --device.in_flight;
    if (down_) {
      // Nobody hears the answer, but whoever comes next must find the volume closed by then.
      close_if_quiet(device);
      return request.respond(error);
    }
    // The answer to a CLOSE comes after those of the operations before it.
    const uint32_t id = device.id;
    request.respond(error);
    if (devices_[id]) close_if_quiet(*devices_[id]);
  }

 private:
  // The answer of an administrative request lies where read data would. All of it is cleared, not
  // only the structure: the chunk holds what the client, or somebody's disk, left there.
  template <typename Response>
  static void put(ServerRequest& request, const Response& response) {
    const auto data = request.data();
    std::fill(data.begin(), data.end(), std::byte{0});
    wire::store(data.data(), response);
  }
  template <typename Response>
  static bool has_room_for(ServerRequest& request) {
    return request.is_read() && request.has_descriptor() &&
           request.data().size() >= sizeof(Response);
  }

  int session_info(ServerRequest& request) {
    const auto message = wire::parse_session_info(request.user());
    if (!message) return message.error();
    if (!has_room_for<wire::SessionInfo>(request)) return EINVAL;
    wire::SessionInfo response;
    response.type = static_cast<uint16_t>(RnbdType::session_info_response);
    response.version = std::min(message->version, wire::rnbd_version);
    put(request, response);
    return 0;
  }

  int open(ServerRequest& request) {
    wire::Open copy;
    const auto name = wire::parse_open(request.user(), copy);
    if (!name) return name.error();
    if (!has_room_for<wire::OpenResponse>(request)) return EINVAL;

    // A client that lost sight of its session for a moment opens its devices again and wants the
    // same ones.
    for (const auto& device : devices_) {
      if (!device || device->closing || device->name != *name) continue;
      put(request, open_response(*device));
      return 0;
    }
    if (copy.access_mode > static_cast<uint8_t>(AccessMode::migration)) return EINVAL;
    const auto mode = static_cast<AccessMode>(copy.access_mode);

    const auto free = std::find(devices_.begin(), devices_.end(), nullptr);
    if (free == devices_.end() && devices_.size() >= devices_per_session_max) {
      refused(*name, EMFILE,
              std::to_string(devices_.size()) + " devices are open; the limit is " +
                  std::to_string(devices_per_session_max));
      return EMFILE;
    }
    auto opened = volumes_->open(*name, mode);
    if (!opened) {
      refused(*name, opened.error().error, opened.error().reason);
      return opened.error().error;
    }
    auto device = std::make_unique<Device>();
    device->id = static_cast<uint32_t>(free - devices_.begin());
    device->name = *name;
    device->mode = mode;
    device->open = std::move(*opened);
    put(request, open_response(*device));
    log_(LogLevel::info, label_ + ": volume '" + printable(*name) + "' opened " +
                             std::string(to_string(mode)) + " as device " +
                             std::to_string(device->id));
    if (free == devices_.end())
      devices_.push_back(std::move(device));
    else
      *free = std::move(device);
    return 0;
  }

  [[nodiscard]] wire::OpenResponse open_response(const Device& device) const {
    const DeviceProperties& properties = device.open->properties();
    wire::OpenResponse response;
    response.device_id = device.id;
    response.sector_count = properties.size_bytes / wire::sector_size;
    response.max_hw_sectors = max_io_size_ / wire::sector_size;
    response.max_write_zeroes_sectors =
        saturated(properties.write_zeroes_bytes_max / wire::sector_size);
    response.max_discard_sectors = saturated(properties.discard_bytes_max / wire::sector_size);
    response.discard_granularity = properties.discard_granularity;
    response.discard_alignment = properties.discard_alignment;
    response.physical_block_size = saturated_block_size(properties.physical_block_size);
    response.logical_block_size = saturated_block_size(properties.logical_block_size);
    response.max_segments = max_segments;
    // FUA means something only where there is a cache to bypass, and newer clients insist on that.
    if (properties.write_cache) {
      response.cache_policy = wire::cache_policy_writeback;
      if (properties.fua) response.cache_policy |= wire::cache_policy_fua;
    }
    return response;
  }

  void close(ServerRequest& request) {
    const auto message = wire::parse_close(request.user());
    if (!message) return request.respond(message.error());
    if (request.is_read()) return request.respond(EINVAL);
    const uint32_t id = message->device_id;
    // An id that is unknown is closed, which is all the client wants.
    if (id >= devices_.size() || !devices_[id]) return request.respond(0);
    Device& device = *devices_[id];
    device.closing = true;
    device.closers.push_back(&request);
    close_if_quiet(device);
  }

  void close_if_quiet(Device& device) {
    if (!device.closing || device.in_flight != 0) return;
    // Out of the table first: answering may bring the next request.
    const std::unique_ptr<Device> closed = std::move(devices_[device.id]);
    closed->open.reset();
    log_(LogLevel::info, label_ + ": volume '" + printable(closed->name) + "' closed, was device " +
                             std::to_string(closed->id));
    for (ServerRequest* const closer : closed->closers) closer->respond(0);
  }

  void io(ServerRequest& request) {
    const auto message = wire::parse_io(request.user());
    if (!message) return request.respond(message.error());
    const uint32_t id = message->device_id;
    if (id >= devices_.size() || !devices_[id] || devices_[id]->closing)
      return request.respond(ENOTCONN);
    Device& device = *devices_[id];
    if (const int error = check(device, request, *message)) return request.respond(error);

    if (free_operations_.empty()) {
      operations_.push_back(std::make_unique<Operation>(*this));
      free_operations_.reserve(operations_.size());
      free_operations_.push_back(operations_.back().get());
    }
    Operation& operation = *free_operations_.back();
    free_operations_.pop_back();

    const uint32_t flags = message->rw;
    operation.op = static_cast<RnbdOp>(flags & wire::rnbd_op_mask);
    const bool changes = operation.op != RnbdOp::read && operation.op != RnbdOp::flush;
    const bool carries_data = operation.op == RnbdOp::read || operation.op == RnbdOp::write;
    operation.fua = changes && (flags & wire::rnbd_flag_fua) != 0;
    operation.preflush = changes && (flags & wire::rnbd_flag_preflush) != 0;
    operation.no_unmap =
        operation.op == RnbdOp::write_zeroes && (flags & wire::rnbd_flag_nounmap) != 0;
    operation.offset = operation.op == RnbdOp::flush ? 0 : message->sector * wire::sector_size;
    operation.length = message->length;
    operation.data = carries_data ? request.data().data() : nullptr;
    operation.registered_index = carries_data ? request.registered_index() : -1;
    operation.device_ = &device;
    operation.request_ = &request;
    ++device.in_flight;
    device.open->submit(operation);
  }

  // 0, or what is wrong with an IO message.
  static int check(const Device& device, ServerRequest& request, const wire::Io& message) {
    const DeviceProperties& properties = device.open->properties();
    const uint64_t length = message.length;
    const uint64_t data_length = request.data().size();
    const bool read_only = device.mode == AccessMode::read_only || properties.read_only;
    const auto op = static_cast<RnbdOp>(message.rw & wire::rnbd_op_mask);

    switch (op) {
      case RnbdOp::read:
        if (!request.is_read() || !request.has_descriptor()) return EINVAL;
        if (data_length != length) return EINVAL;
        break;
      case RnbdOp::write:
        if (request.is_read() || data_length != length) return EINVAL;
        if (read_only) return EPERM;
        break;
      case RnbdOp::flush:
        // Kernel clients send it as a read without descriptor and with all ones for the sector.
        return data_length != 0 || length != 0 ? EINVAL : 0;
      case RnbdOp::discard:
      case RnbdOp::write_zeroes: {
        if (request.is_read() || data_length != 0) return EINVAL;
        if (read_only) return EPERM;
        const uint64_t most = op == RnbdOp::discard ? properties.discard_bytes_max
                                                    : properties.write_zeroes_bytes_max;
        if (most == 0) return EOPNOTSUPP;
        if (length > most) return EINVAL;
        break;
      }
      case RnbdOp::secure_erase:
      default:
        return EOPNOTSUPP;
    }

    if (length == 0) return EINVAL;
    const uint64_t size_sectors = properties.size_bytes / wire::sector_size;
    if (message.sector >= size_sectors) return EINVAL;
    const uint64_t offset = message.sector * wire::sector_size;  // cannot overflow: below the size
    if (length > properties.size_bytes - offset) return EINVAL;
    const uint64_t block_mask = properties.logical_block_size - uint64_t{1};
    if (((offset | length) & block_mask) != 0) return EINVAL;
    return 0;
  }

  void refused(std::string_view name, int error, const std::string& reason) {
    // Whoever tries names by the thousand gets his errno but not all of our log.
    constexpr uint32_t logged_max = 1000;
    if (++refusals_ > logged_max) return;
    log_(LogLevel::warning,
         label_ + ": open of volume '" + printable(name) + "' refused with errno " +
             std::to_string(error) + ": " + reason +
             (refusals_ == logged_max ? "; this session's further ones are not logged" : ""));
  }

  const std::string label_;
  const uint32_t max_io_size_;
  const std::unique_ptr<Volumes> volumes_;
  const LogSink log_;
  std::vector<std::unique_ptr<Device>> devices_;  // by id; null: free
  std::vector<std::unique_ptr<Operation>> operations_;
  std::vector<Operation*> free_operations_;
  uint32_t refusals_ = 0;
  bool down_ = false;
};

void Operation::complete(int error) {
  session_.completed(*this, error);
}

}  // namespace

std::unique_ptr<rtrs::UpperSession> make_server_session(const rtrs::SessionIdentity& identity,
                                                        std::unique_ptr<Volumes> volumes,
                                                        LogSink log) {
  return std::make_unique<ServerSession>(identity, std::move(volumes), std::move(log));
}

}  // namespace rtrsnbd::rnbd
