// SPDX-License-Identifier: BSD-3-Clause
#include "plugin/device.h"

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <vector>

namespace rtrsnbd::plugin {

namespace {

// Requests one thread keeps in flight for one large transfer.
constexpr uint32_t pieces_in_flight_max = 32;

int as_io_error(int error) {
  return error == rtrs::path_lost ? EIO : error;
}

}  // namespace

// --- BlockLocks
// -----------------------------------------------------------------------------------------

BlockLocks::BlockLocks() {
  pthread_rwlockattr_t attributes;
  pthread_rwlockattr_init(&attributes);
  // A stream of whole-block writes must not keep a read-modify-write waiting for ever.
  pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
  for (auto& stripe : stripes_) pthread_rwlock_init(&stripe, &attributes);
  pthread_rwlockattr_destroy(&attributes);
}

BlockLocks::~BlockLocks() {
  for (auto& stripe : stripes_) pthread_rwlock_destroy(&stripe);
}

BlockLocks::Guard::Guard(BlockLocks& locks, uint64_t offset, uint64_t length, bool exclusive)
    : locks_(locks) {
  if (length == 0) return;
  const uint64_t first = offset / stripe_bytes;
  const uint64_t last = (offset + length - 1) / stripe_bytes;
  if (last - first + 1 >= stripe_count) {
    mask_ = (uint64_t{1} << stripe_count) - 1;
  } else {
    for (uint64_t stripe = first; stripe <= last; ++stripe)
      mask_ |= uint64_t{1} << (stripe % stripe_count);
  }
  for (size_t index = 0; index < stripe_count; ++index) {  // always in this order: no deadlock
    if ((mask_ & (uint64_t{1} << index)) == 0) continue;
    exclusive ? pthread_rwlock_wrlock(&locks_.stripes_[index])
              : pthread_rwlock_rdlock(&locks_.stripes_[index]);
  }
}

BlockLocks::Guard::~Guard() {
  for (uint64_t rest = mask_; rest != 0; rest &= rest - 1) {
    pthread_rwlock_unlock(&locks_.stripes_[static_cast<size_t>(__builtin_ctzll(rest))]);
  }
}

// --- open, close
// ----------------------------------------------------------------------------------------

tl::expected<std::unique_ptr<Device>, std::pair<int, std::string>> Device::open(
    std::shared_ptr<Session> session, const std::string& volume, wire::AccessMode access) {
  const auto prefix = "server " + session->server() + ": volume " + printable(volume) + ": ";
  const auto refuse = [&](int error, std::string_view text) {
    return tl::unexpected(std::pair(error, prefix + std::string(text)));
  };
  wire::Open request;
  if (!wire::make_open(volume, access, request))
    return refuse(EINVAL, "a volume name has 1 to 254 bytes and no NUL");

  std::unique_ptr<Device> device(new Device(std::move(session), volume));
  wire::OpenResponse response;
  Operation operation;
  operation.is_read = true;
  operation.user = wire::bytes_of(request);
  operation.read_data = reinterpret_cast<std::byte*>(&response);
  operation.data_length = sizeof response;
  const int error = device->session_->run(0, operation);
  if (error != 0) {
    const auto lost = device->session_->failure();
    device->session_.reset();  // nothing to close
    switch (error) {
      case rtrs::path_lost:
        return refuse(EIO, "session lost: " + lost);
      case ENOENT:
        return refuse(error,
                      "the server has no such volume, or does not allow this client to see it");
      case EACCES:
        return refuse(error, "the server does not allow this client to open it");
      case EROFS:
        return refuse(error, "it is read-only at the server: use access=ro or nbdkit -r");
      case EPERM:
        return refuse(
            error,
            access == wire::AccessMode::read_only
                ? "the server does not permit it"
                : "another client has it open for writing (access=rw allows one, migration two), "
                  "or it may only be read: try access=ro");
      default: {
        const char* const text = strerrordesc_np(error);
        return refuse(error,
                      text != nullptr ? std::string(text) : "errno " + std::to_string(error));
      }
    }
  }
  const auto parsed = wire::parse_open_response(wire::bytes_of(response));
  if (!parsed) {
    device->device_id_ = response.device_id;
    return refuse(EIO, "the server describes an impossible device");
  }
  device->device_id_ = parsed->device_id;
  device->properties_ = rnbd::properties_of(*parsed);
  device->properties_.read_only = access == wire::AccessMode::read_only;
  if (device->properties_.logical_block_size > device->session_->geometry().max_io_size) {
    return refuse(
        EIO,
        "its logical block is larger than the session's largest request; raise max-io-size at the "
        "server");
  }
  return device;
}

Device::~Device() {
  if (!session_ || !session_->usable()) return;
  wire::Close request;
  request.device_id = device_id_;
  Operation operation;
  operation.user = wire::bytes_of(request);
  session_->run(0, operation);
}

// --- whole blocks
// ---------------------------------------------------------------------------------------

// One READ or WRITE of whole blocks, cut into pieces the session can carry. Many pieces travel at
// once, as far as there are permits; a thread never waits for a permit while it has a piece to wait
// for.
int Device::transfer(uint32_t lane, wire::RnbdOp op, std::byte* read_data,
                     const std::byte* write_data, uint64_t length, uint64_t offset,
                     rnbd::IoFlags flags) {
  // Pieces are multiples of the block; a peer may offer an odd maximum.
  const uint32_t piece_max = session_->geometry().max_io_size / properties_.logical_block_size *
                             properties_.logical_block_size;
  const auto prepare = [&](Operation& operation, wire::Io& io, uint64_t done, uint32_t size) {
    io = rnbd::make_io(device_id_, op, offset + done, size, flags);
    operation.is_read = rnbd::travels_as_read(op);
    operation.user = wire::bytes_of(io);
    operation.read_data = read_data != nullptr ? read_data + done : nullptr;
    operation.write_data = write_data != nullptr ? write_data + done : nullptr;
    operation.data_length = size;
  };
  if (length <= piece_max) {
    Operation operation;
    wire::Io io;
    prepare(operation, io, 0, static_cast<uint32_t>(length));
    return as_io_error(session_->run(lane, operation));
  }

  std::array<Operation, pieces_in_flight_max> operations;
  std::array<wire::Io, pieces_in_flight_max> messages;
  uint32_t started = 0;
  uint32_t finished = 0;
  int error = 0;
  uint64_t done = 0;
  while (done < length && error == 0) {
    if (started - finished < pieces_in_flight_max) {
      auto& operation = operations[started % pieces_in_flight_max];
      const auto size = static_cast<uint32_t>(std::min<uint64_t>(piece_max, length - done));
      prepare(operation, messages[started % pieces_in_flight_max], done, size);
      if (session_->start(lane, operation, started == finished)) {
        ++started;
        done += size;
        continue;
      }
    }
    error = session_->wait(operations[finished++ % pieces_in_flight_max]);
  }
  // The last one first: when it is done the others mostly are, too, and are taken without another
  // sleep.
  while (started != finished) {
    const int result = session_->wait(operations[--started % pieces_in_flight_max]);
    if (error == 0) error = result;
  }
  return as_io_error(error);
}

int Device::special(uint32_t lane, wire::RnbdOp op, uint64_t length, uint64_t offset,
                    uint64_t length_max, rnbd::IoFlags flags) {
  const uint64_t block = properties_.logical_block_size;
  const uint64_t piece_max =
      std::max(block, std::min(length_max, rnbd::special_length_max) / block * block);
  while (length != 0) {
    const auto size = static_cast<uint32_t>(std::min(length, piece_max));
    const wire::Io io = rnbd::make_io(device_id_, op, offset, size, flags);
    Operation operation;
    operation.user = wire::bytes_of(io);
    if (const int error = session_->run(lane, operation); error != 0) return as_io_error(error);
    offset += size;
    length -= size;
  }
  return 0;
}

int Device::flush(uint32_t lane) {
  if (!properties_.write_cache) return 0;
  const wire::Io io = rnbd::make_io(device_id_, wire::RnbdOp::flush, 0, 0, {});
  Operation operation;
  operation.is_read = true;
  operation.user = wire::bytes_of(io);
  return as_io_error(session_->run(lane, operation));
}

// --- any alignment
// --------------------------------------------------------------------------------------

int Device::read(uint32_t lane, std::byte* data, uint32_t length, uint64_t offset) {
  const uint32_t block = properties_.logical_block_size;
  if (((offset | length) & (block - 1)) == 0) {
    return length == 0 ? 0 : transfer(lane, wire::RnbdOp::read, data, nullptr, length, offset, {});
  }
  if (length == 0) return 0;
  const uint64_t begin = offset / block * block;
  const uint64_t end = (offset + length + block - 1) / block * block;
  std::vector<std::byte> bounce(end - begin);
  const int error =
      transfer(lane, wire::RnbdOp::read, bounce.data(), nullptr, bounce.size(), begin, {});
  if (error == 0) std::memcpy(data, bounce.data() + (offset - begin), length);
  return error;
}

int Device::modify_block(uint32_t lane, const std::byte* data, uint32_t length, uint64_t offset,
                         bool fua) {
  const uint32_t block = properties_.logical_block_size;
  const uint64_t begin = offset / block * block;
  assert(offset + length <= begin + block);
  std::vector<std::byte> bounce(block);
  const BlockLocks::Guard guard(locks_, begin, block, true);
  if (const int error =
          transfer(lane, wire::RnbdOp::read, bounce.data(), nullptr, block, begin, {});
      error != 0) {
    return error;
  }
  std::byte* const target = bounce.data() + (offset - begin);
  data != nullptr ? std::memcpy(target, data, length) : std::memset(target, 0, length);
  return transfer(lane, wire::RnbdOp::write, nullptr, bounce.data(), block, begin,
                  {.fua = fua, .no_unmap = false});
}

int Device::write(uint32_t lane, const std::byte* data, uint32_t length, uint64_t offset,
                  bool fua) {
  const uint32_t block = properties_.logical_block_size;
  const rnbd::IoFlags flags{.fua = fua && properties_.write_cache, .no_unmap = false};
  if (((offset | length) & (block - 1)) != 0) {
    if (const auto head = static_cast<uint32_t>(offset % block); head != 0) {
      const uint32_t size = std::min(length, block - head);
      if (const int error = modify_block(lane, data, size, offset, flags.fua); error != 0)
        return error;
      data += size;
      length -= size;
      offset += size;
    }
    if (const uint32_t tail = length % block; tail != 0) {
      length -= tail;
      if (const int error = modify_block(lane, data + length, tail, offset + length, flags.fua);
          error != 0) {
        return error;
      }
    }
  }
  if (length == 0) return 0;
  const BlockLocks::Guard guard(locks_, offset, length, false);
  return transfer(lane, wire::RnbdOp::write, nullptr, data, length, offset, flags);
}

int Device::trim(uint32_t lane, uint64_t length, uint64_t offset, bool fua) {
  // Advice: blocks that are not wholly inside the range keep their contents.
  const uint64_t block = properties_.logical_block_size;
  const uint64_t begin = (offset + block - 1) / block * block;
  const uint64_t end = (offset + length) / block * block;
  if (begin < end) {
    const BlockLocks::Guard guard(locks_, begin, end - begin, false);
    const int error =
        special(lane, wire::RnbdOp::discard, end - begin, begin, properties_.discard_bytes_max, {});
    if (error == EOPNOTSUPP) return 0;  // nothing was promised
    if (error != 0) return error;
  }
  // Not every server makes FUA on a discard durable; a flush is.
  return fua ? flush(lane) : 0;
}

int Device::zero(uint32_t lane, uint64_t length, uint64_t offset, bool may_trim, bool fua) {
  if (properties_.write_zeroes_bytes_max == 0) return EOPNOTSUPP;
  const uint64_t block = properties_.logical_block_size;
  const uint64_t head = std::min(length, (block - offset % block) % block);
  const uint64_t tail = (length - head) % block;
  const uint64_t middle = length - head - tail;
  // The middle first: if the server cannot do it, nothing has changed yet and the caller falls
  // back.
  if (middle != 0) {
    const BlockLocks::Guard guard(locks_, offset + head, middle, false);
    const int error =
        special(lane, wire::RnbdOp::write_zeroes, middle, offset + head,
                properties_.write_zeroes_bytes_max, {.fua = false, .no_unmap = !may_trim});
    if (error != 0) return error;
  }
  if (head != 0) {
    if (const int error = modify_block(lane, nullptr, static_cast<uint32_t>(head), offset, false);
        error != 0) {
      return error;
    }
  }
  if (tail != 0) {
    const int error =
        modify_block(lane, nullptr, static_cast<uint32_t>(tail), offset + length - tail, false);
    if (error != 0) return error;
  }
  return fua ? flush(lane) : 0;
}

}  // namespace rtrsnbd::plugin
