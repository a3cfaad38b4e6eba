// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/backing.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <new>
#include <thread>
#include <utility>

#include "protocol/wire/rnbd.h"
#include "protocol/wire/rtrs.h"

namespace rtrsnbd::daemon {

namespace {

constexpr size_t copy_bytes_max = size_t{1} << 20;
constexpr size_t zero_block_bytes = size_t{256} << 10;
constexpr uint32_t block_bytes_max = 4096;  // largest logical block served

constexpr std::chrono::milliseconds takeover_interval{20};

// Repeats attempt while it returns true.
template <typename Attempt>
void while_taken_over(std::chrono::milliseconds takeover_max, Attempt attempt) {
  const auto end = std::chrono::steady_clock::now() + takeover_max;
  while (attempt() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(takeover_interval);
  }
}

// Zeroes to write where nothing better works; aligned for every direct transfer.
alignas(4096) std::byte zero_block[zero_block_bytes];

std::string number(uint64_t value) {
  return std::to_string(value);
}
std::string error_text(int error) {
  return std::strerror(error);
}

bool unsupported(int error) {
  return error == EOPNOTSUPP || error == ENOSYS || error == ENOTTY;
}

uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}
uint64_t round_down(uint64_t value, uint64_t unit) {
  return value / unit * unit;
}

std::string parent_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string explain_open(const std::string& path, int error, bool read_only) {
  std::string text = "cannot open " + path + ": " + error_text(error);
  const std::string user = "uid " + number(geteuid());
  switch (error) {
    case EACCES:
      return text + "; " + user + " needs " + (read_only ? "read" : "read and write") +
             " access: check owner and mode of it and of the directories above (under systemd also "
             "ProtectHome=, ReadWritePaths= and DeviceAllow= of the unit)";
    case EPERM:
      return text + "; it is immutable, or the unit's DevicePolicy=/DeviceAllow= keeps " + user +
             " from it";
    case EROFS:
      return text +
             "; set 'read-only: true', or make the filesystem writable (under systemd: name the "
             "directory in ReadWritePaths= of the unit)";
    case EBUSY:
      return text +
             "; the device is mounted, part of another device (LVM, RAID, dm), or served by "
             "another rtrsd";
    case ENOENT:
      return text + "; check the path, or give 'size:' to have a regular file created";
    case ETXTBSY:
      return text + "; it is in use as swap space or as a program";
    default:
      return text;
  }
}

std::string rule_of_size(const std::string& path, uint64_t size, uint64_t block) {
  std::string text =
      path + " has " + number(size) + " bytes, which is no multiple of " + number(block) + "; ";
  if (block == wire::sector_size) {
    text +=
        "a client counts sectors of 512 bytes and could not reach the tail: extend it with "
        "'truncate -s %512 " +
        path + "'";
  } else {
    text +=
        "that is the logical block of the volume: set 'block-size: 512' if 512 divides it, or "
        "extend it with "
        "'truncate -s %" +
        number(block) + " " + path + "'";
  }
  return text;
}

bool memory_filesystem(int fd) {
  struct statfs filesystem {};
  if (fstatfs(fd, &filesystem) != 0) return false;
  const auto type = static_cast<uint64_t>(filesystem.f_type) & 0xffffffffU;
  return type == TMPFS_MAGIC || type == RAMFS_MAGIC;
}

// A number from the queue directory of a block device; of the whole disk if it is a partition.
uint64_t queue_attribute(dev_t device, const char* name) {
  const std::string directory =
      "/sys/dev/block/" + number(major(device)) + ":" + number(minor(device));
  for (const char* queue : {"/queue/", "/../queue/"}) {
    uint64_t value = 0;
    if (std::ifstream(directory + queue + name) >> value) return value;
  }
  return 0;
}

uint64_t device_attribute(dev_t device, const char* name) {
  uint64_t value = 0;
  std::ifstream("/sys/dev/block/" + number(major(device)) + ":" + number(minor(device)) + "/" +
                name) >>
      value;
  return value;
}

struct DirectAlignment {
  uint32_t memory = 0;
  uint32_t offset = 0;  // 0: direct transfers do not work
};

// fd is open with O_DIRECT. Asks the kernel, or where it cannot tell (before 6.1) tries a read.
DirectAlignment direct_alignment(int fd, uint64_t size) {
  struct statx status {};
  if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0) {
    return {status.stx_dio_mem_align, status.stx_dio_offset_align};
  }
  void* memory = nullptr;
  if (posix_memalign(&memory, block_bytes_max, block_bytes_max) != 0) return {};
  DirectAlignment found{};
  for (const uint32_t block : {512U, 4096U}) {
    if (size < block) continue;
    if (pread(fd, memory, block, 0) == static_cast<ssize_t>(block)) {
      found = {block, block};
      break;
    }
    if (errno != EINVAL) break;
  }
  free(memory);
  return found;
}

}  // namespace

int client_errno(int error) {
  switch (error) {
    case EDQUOT:
    case EFBIG:
      return ENOSPC;
    // These speak of our call, not of the client's: its request was in order.
    case EINVAL:
    case EFAULT:
    case EBADF:
    case EAGAIN:
    case EINTR:
    case ECANCELED:
      return EIO;
    default:
      return error > 0 && static_cast<uint32_t>(error) <= wire::errno_on_wire_max ? error : EIO;
  }
}

Backing::Backing(std::string name, std::string path, LogSink log, SystemCalls& calls,
                 std::chrono::milliseconds takeover_max)
    : name_(std::move(name)),
      path_(std::move(path)),
      log_(std::move(log)),
      calls_(calls),
      takeover_max_(takeover_max),
      workers_("rtrsd/" + name_, workers_per_volume_max) {}

Backing::~Backing() {
  if (sync_fd_ >= 0 && sync_fd_ != fd_) close(sync_fd_);
  if (fd_ >= 0) close(fd_);
}

tl::expected<std::shared_ptr<Backing>, std::string> Backing::open(
    const config::Volume& volume, LogSink log, SystemCalls& calls,
    std::chrono::milliseconds takeover_max) {
  const std::shared_ptr<Backing> backing(
      new Backing(volume.name, volume.path, std::move(log), calls, takeover_max));
  std::string problem = backing->open_file(volume);
  if (problem.empty()) problem = backing->lock(volume.read_only);
  if (problem.empty()) {
    problem =
        backing->block_device_ ? backing->look_at_device(volume) : backing->look_at_file(volume);
  }
  if (problem.empty()) problem = backing->check_size(volume);
  if (!problem.empty()) return tl::unexpected(std::move(problem));
  backing->probe_capabilities();
  return backing;
}

std::optional<BackingIdentity> Backing::identify(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return std::nullopt;
  if (S_ISBLK(status.st_mode)) return BackingIdentity{true, status.st_rdev, 0};
  return BackingIdentity{false, status.st_dev, status.st_ino};
}

std::string already_served(const std::string& path, const std::string& other_name,
                           const std::string& other_path) {
  return path + " is already served as volume " + other_name +
         (path == other_path ? "" : " (" + other_path + ")") +
         "; one backing can be in several volumes only if all are 'read-only: true'";
}

std::string Backing::inspect(const config::Volume& volume) {
  struct stat status {};
  if (stat(volume.path.c_str(), &status) != 0) {
    if (errno == ENOENT && volume.size != 0) {
      const std::string directory = parent_of(volume.path);
      if (stat(directory.c_str(), &status) == 0) return {};
      return "cannot create " + volume.path + ": " + directory + ": " + error_text(errno);
    }
    return explain_open(volume.path, errno, volume.read_only);
  }
  if (S_ISBLK(status.st_mode)) return {};
  if (!S_ISREG(status.st_mode))
    return volume.path + " is neither a regular file nor a block device";
  const auto size = static_cast<uint64_t>(status.st_size);
  if (volume.size != 0 && volume.size != size) {
    return volume.path + " has " + number(size) + " bytes, but 'size:' says " + number(volume.size);
  }
  if (size == 0)
    return volume.path + " is empty; give it a size with 'truncate -s SIZE " + volume.path + "'";
  if (size % wire::sector_size != 0) return rule_of_size(volume.path, size, wire::sector_size);
  if (volume.block_size != 0 && size % volume.block_size != 0) {
    return rule_of_size(volume.path, size, volume.block_size);
  }
  return {};
}

std::string Backing::open_file(const config::Volume& volume) {
  struct stat status {};
  if (stat(path_.c_str(), &status) != 0) {
    if (errno == ENOENT && volume.size != 0 && !volume.read_only) return create_file(volume);
    return explain_open(path_, errno, volume.read_only);
  }
  block_device_ = S_ISBLK(status.st_mode);
  if (!block_device_ && !S_ISREG(status.st_mode))
    return path_ + " is neither a regular file nor a block device";
  // O_EXCL on a block device claims it: neither a mount nor another claim can have it at the same
  // time.
  const int mode = volume.read_only ? O_RDONLY : O_RDWR | (block_device_ ? O_EXCL : 0);
  while_taken_over(takeover_max_, [&] {
    fd_ = ::open(path_.c_str(), mode | O_CLOEXEC | O_NONBLOCK);
    return fd_ < 0 && errno == EBUSY;
  });
  if (fd_ < 0) return explain_open(path_, errno, volume.read_only);
  struct stat opened {};
  if (fstat(fd_, &opened) != 0) return explain_open(path_, errno, volume.read_only);
  if ((opened.st_mode & S_IFMT) != (status.st_mode & S_IFMT))
    return path_ + " was replaced while it was opened";
  // It kept a pipe that came in between from blocking us; io_uring would take it to mean "never
  // wait".
  fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) & ~O_NONBLOCK);
  return {};
}

std::string Backing::create_file(const config::Volume& volume) {
  const std::string directory = parent_of(path_);
  struct stat parent {};
  struct stat devices {};
  if (stat(directory.c_str(), &parent) != 0) {
    return "cannot create " + path_ + ": " + directory + ": " + error_text(errno);
  }
  if (stat("/dev", &devices) == 0 && parent.st_dev == devices.st_dev) {
    return path_ +
           " does not exist, and no regular file is created among the device nodes; check that the "
           "device "
           "is there";
  }
  const uint64_t block = std::max(volume.block_size, wire::sector_size);
  if (volume.size % block != 0) {
    return "'size: " + number(volume.size) + "' is no multiple of " + number(block) +
           ", the logical block";
  }
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd_ < 0) {
    const int error = errno;
    return "cannot create " + path_ + ": " + explain_open(path_, error, false);
  }
  // The size, and the name, have to survive a power cut before anything is stored under them.
  const int parent_fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  int error = 0;
  if (parent_fd < 0 || ftruncate(fd_, static_cast<off_t>(volume.size)) != 0 || fsync(fd_) != 0 ||
      fsync(parent_fd) != 0) {
    error = errno;
  }
  if (parent_fd >= 0) close(parent_fd);
  if (error != 0) {
    unlink(path_.c_str());
    return "cannot create " + path_ + " with " + number(volume.size) +
           " bytes: " + error_text(error);
  }
  log_(LogLevel::notice,
       "volume " + name_ + ": created " + path_ + " with " + number(volume.size) + " bytes");
  return {};
}

// Locks of open file descriptions: they end with the daemon however it ends, and they conflict with
// those of qemu as well.
std::string Backing::lock(bool read_only) {
  struct flock whole {};
  whole.l_type = static_cast<short>(read_only ? F_RDLCK : F_WRLCK);
  whole.l_whence = SEEK_SET;
  int error = 0;
  while_taken_over(takeover_max_, [&] {
    error = fcntl(fd_, F_OFD_SETLK, &whole) == 0 ? 0 : errno;
    return error == EAGAIN || error == EACCES;
  });
  if (error == 0) return {};
  if (error == EAGAIN || error == EACCES) {
    return path_ + " is in use: another process (another rtrsd, or qemu) holds a lock on it" +
           (read_only ? " for writing" : "");
  }
  return "cannot lock " + path_ + ": " + error_text(error) +
         "; the filesystem has to support fcntl locks";
}

std::string Backing::choose_transfer(const config::Volume& volume) {
  const auto say = [this](const std::string& why) {
    log_(LogLevel::notice, "volume " + name_ + ": goes through the page cache, " + why);
  };
  if (volume.direct == config::Direct::off) return {};
  const int flags = fcntl(fd_, F_GETFL);
  DirectAlignment alignment{};
  if (fcntl(fd_, F_SETFL, flags | O_DIRECT) == 0)
    alignment = direct_alignment(fd_, properties_.size_bytes);
  std::string why;
  const uint32_t block = std::max(alignment.offset, wire::sector_size);
  if (alignment.offset == 0 || alignment.memory > block_bytes_max ||
      alignment.offset > block_bytes_max) {
    why = "as " + path_ + " cannot do direct IO";
  } else if (volume.block_size != 0 && volume.block_size < block) {
    why = "as direct IO on " + path_ + " needs blocks of " + number(block) +
          " bytes and 'block-size:' is " + number(volume.block_size);
  } else if (properties_.size_bytes % block != 0) {
    why = "as direct IO on " + path_ + " needs blocks of " + number(block) +
          " bytes and its size, " + number(properties_.size_bytes) +
          " bytes, is no multiple of that";
  }
  if (why.empty()) {
    transfer_ = Transfer::direct;
    offset_alignment_ = alignment.offset;
    memory_alignment_ = std::max(alignment.memory, 1U);
    return {};
  }
  fcntl(fd_, F_SETFL, flags & ~O_DIRECT);
  if (volume.direct == config::Direct::on) {
    return "'direct: on' is not possible, " + why +
           "; set 'direct: auto' to go through the page cache";
  }
  say(why);
  return {};
}

std::string Backing::look_at_file(const config::Volume& volume) {
  struct stat status {};
  if (fstat(fd_, &status) != 0) return explain_open(path_, errno, volume.read_only);
  identity_ = {false, status.st_dev, status.st_ino};
  const auto size = static_cast<uint64_t>(status.st_size);
  if (volume.size != 0 && volume.size != size) {
    return path_ + " has " + number(size) + " bytes, but 'size:' says " + number(volume.size) +
           "; rtrsd neither grows nor shrinks a file that exists: correct 'size:', resize the file "
           "with truncate, or "
           "remove it if it holds nothing";
  }
  if (size == 0) return path_ + " is empty; give it a size with 'truncate -s SIZE " + path_ + "'";
  if (size % wire::sector_size != 0) return rule_of_size(path_, size, wire::sector_size);
  properties_.size_bytes = size;
  device_block_ = 1;
  if (memory_filesystem(fd_)) {
    transfer_ = Transfer::memory;
    if (volume.direct == config::Direct::on) {
      return "'direct: on' is not possible, as " + path_ +
             " is in memory (tmpfs); set 'direct: auto'";
    }
  } else {
    const std::string problem = choose_transfer(volume);
    if (!problem.empty()) return problem;
  }
  const uint32_t direct_block =
      transfer_ == Transfer::direct ? std::max(offset_alignment_, wire::sector_size) : 0;
  properties_.logical_block_size =
      volume.block_size != 0 ? volume.block_size : std::max(direct_block, wire::sector_size);
  const auto filesystem_block =
      std::clamp(static_cast<uint32_t>(status.st_blksize), wire::sector_size, block_bytes_max);
  properties_.physical_block_size = std::max(filesystem_block, properties_.logical_block_size);
  properties_.discard_granularity = properties_.physical_block_size;
  return {};
}

std::string Backing::look_at_device(const config::Volume& volume) {
  struct stat status {};
  uint64_t size = 0;
  int logical = 0;
  unsigned physical = 0;
  if (fstat(fd_, &status) != 0 || ioctl(fd_, BLKGETSIZE64, &size) != 0 ||
      ioctl(fd_, BLKSSZGET, &logical) != 0 || ioctl(fd_, BLKPBSZGET, &physical) != 0) {
    return "cannot read the geometry of " + path_ + ": " + error_text(errno);
  }
  identity_ = {true, status.st_rdev, 0};
  if (size == 0) return path_ + " has no medium (size 0)";
  if (volume.size != 0 && volume.size != size) {
    return path_ + " has " + number(size) + " bytes, but 'size:' says " + number(volume.size) +
           "; a block device is served whole: remove 'size:'";
  }
  properties_.size_bytes = size;
  device_block_ = static_cast<uint32_t>(logical);
  if (device_block_ > block_bytes_max) {
    return path_ + " has logical blocks of " + number(device_block_) + " bytes; at most " +
           number(block_bytes_max) + " are supported";
  }
  const std::string problem = choose_transfer(volume);
  if (!problem.empty()) return problem;
  properties_.logical_block_size =
      volume.block_size != 0 ? volume.block_size : std::max(device_block_, wire::sector_size);
  properties_.physical_block_size = std::clamp(physical, properties_.logical_block_size,
                                               std::max(properties_.logical_block_size, 32768U));
  properties_.discard_granularity = static_cast<uint32_t>(
      std::min<uint64_t>(queue_attribute(status.st_rdev, "discard_granularity"), 1U << 31));
  properties_.discard_alignment =
      static_cast<uint32_t>(device_attribute(status.st_rdev, "discard_alignment"));
  return {};
}

std::string Backing::check_size(const config::Volume& volume) {
  // direct: auto has already gone back to 512 where that helps; this is what remains.
  if (properties_.size_bytes % properties_.logical_block_size != 0) {
    return rule_of_size(path_, properties_.size_bytes, properties_.logical_block_size);
  }
  properties_.read_only = volume.read_only;
  if (transfer_ == Transfer::memory) {
    sync_fd_ = fd_;
    return {};
  }
  const std::string again = "/proc/self/fd/" + number(static_cast<uint64_t>(fd_));
  sync_fd_ = ::open(again.c_str(), (volume.read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC);
  if (sync_fd_ < 0)
    return "cannot open " + path_ + " a second time through /proc/self/fd: " + error_text(errno);
  return {};
}

void Backing::probe_capabilities() {
  properties_.write_cache = true;
  properties_.fua = true;
  properties_.discard_bytes_max = 0;
  properties_.write_zeroes_bytes_max = 0;
  if (properties_.read_only) return;
  const uint64_t block = properties_.logical_block_size;
  const uint64_t everything = range_bytes_max - block;
  bool fast_zeroes = false;
  if (block_device_) {
    const auto device = static_cast<dev_t>(identity_.device);
    if (queue_attribute(device, "discard_max_bytes") != 0)
      properties_.discard_bytes_max = everything;
    fast_zeroes = queue_attribute(device, "write_zeroes_max_bytes") != 0;
  } else {
    // A hole behind the end changes nothing that is stored, and tells whether holes can be made.
    const uint64_t behind = round_up(properties_.size_bytes, block_bytes_max);
    if (calls_.fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, behind,
                         block_bytes_max) == 0) {
      properties_.discard_bytes_max = everything;
      fast_zeroes = true;
    } else {
      punch_holes_ = false;
    }
  }
  if (properties_.discard_bytes_max == 0) {
    discards_ = false;
    properties_.discard_granularity = 0;
    properties_.discard_alignment = 0;
  }
  properties_.write_zeroes_bytes_max = fast_zeroes ? everything : slow_zeroes_bytes_max;
}

std::string Backing::description() const {
  const char* way = transfer_ == Transfer::memory   ? "in memory"
                    : transfer_ == Transfer::direct ? "direct IO"
                                                    : "page cache";
  return path_ + ", " + (block_device_ ? "block device" : "file") + " of " +
         number(properties_.size_bytes) + " bytes, blocks of " +
         number(properties_.logical_block_size) + ", " + way +
         (properties_.read_only ? ", read-only" : "") +
         (properties_.discard_bytes_max == 0 ? ", no discard" : "");
}

void Backing::fail(const char* what, int error) {
  if (failed_.exchange(true, std::memory_order_acq_rel)) return;
  log_(LogLevel::error,
       "volume " + name_ + ": FAILED: " + what + " of " + path_ + ": " + error_text(error) +
           "; writes that were acknowledged before may be lost. Writes and flushes get EIO until "
           "rtrsd is restarted: check the disk, then the data, first");
}

int Backing::flush() {
  if (transfer_ == Transfer::memory) return 0;
  std::unique_lock lock(flush_mutex_);
  // One that is running may have begun before our writes were completed: the next one counts.
  const uint64_t ticket = flushes_started_ + 1;
  while (flushes_finished_ < ticket) {
    if (failed()) return EIO;
    if (flushing_) {
      flush_ended_.wait(lock);
      continue;
    }
    flushing_ = true;
    const uint64_t mine = ++flushes_started_;
    lock.unlock();
    int error = 0;
    while (calls_.fdatasync(sync_fd_) != 0) {
      error = errno;
      if (error != EINTR) break;
      error = 0;
    }
    // Before anybody can see this flush as finished.
    if (error != 0) fail("fdatasync", error);
    lock.lock();
    flushing_ = false;
    flushes_finished_ = mine;
    flush_ended_.notify_all();
  }
  return failed() ? EIO : 0;
}

int Backing::discard(uint64_t offset, uint64_t length) {
  if (!discards_.load(std::memory_order_relaxed))
    return properties_.discard_bytes_max == 0 ? EOPNOTSUPP : 0;
  int result = 0;
  if (block_device_) {
    // Only whole blocks of the device can be given back; a discard may do less than it was asked
    // for.
    const uint64_t begin = round_up(offset, device_block_);
    const uint64_t end = round_down(offset + length, device_block_);
    if (begin >= end) return 0;
    result = calls_.ioctl_range(fd_, BLKDISCARD, {begin, end - begin});
  } else {
    result = calls_.fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length);
  }
  if (result == 0) return 0;
  const int error = errno;
  if (!unsupported(error)) return error;
  // It was advertised, so a filesystem relies on it not failing; doing nothing is a correct
  // discard.
  discards_.store(false, std::memory_order_relaxed);
  log_(LogLevel::warning, "volume " + name_ + ": " + path_ +
                              " does not support discard after all: " + error_text(error) +
                              "; discards do nothing from now on");
  return 0;
}

int Backing::write_zeroes(uint64_t offset, uint64_t length, bool no_unmap) {
  if (!block_device_) return zero_file(offset, length, no_unmap);
  const uint64_t begin = round_up(offset, device_block_);
  const uint64_t end = round_down(offset + length, device_block_);
  if (begin >= end) return zero_by_writing(offset, length);
  int error = zero_device(begin, end - begin, no_unmap);
  if (error == 0 && offset < begin) error = zero_by_writing(offset, begin - offset);
  if (error == 0 && end < offset + length) error = zero_by_writing(end, offset + length - end);
  return error;
}

int Backing::zero_file(uint64_t offset, uint64_t length, bool no_unmap) {
  if (!no_unmap && punch_holes_.load(std::memory_order_relaxed)) {
    if (calls_.fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length) == 0)
      return 0;
    if (!unsupported(errno)) return errno;
    punch_holes_.store(false, std::memory_order_relaxed);
  }
  if (zero_ranges_.load(std::memory_order_relaxed)) {
    if (calls_.fallocate(fd_, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, offset, length) == 0)
      return 0;
    if (!unsupported(errno)) return errno;
    zero_ranges_.store(false, std::memory_order_relaxed);
  }
  return zero_by_writing(offset, length);
}

int Backing::zero_device(uint64_t offset, uint64_t length, bool no_unmap) {
  // On a block device a hole is a write-zeroes command that may deallocate, or nothing.
  if (!no_unmap && punch_holes_.load(std::memory_order_relaxed)) {
    if (calls_.fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, length) == 0)
      return 0;
    if (!unsupported(errno)) return errno;
    punch_holes_.store(false, std::memory_order_relaxed);
  }
  if (zero_by_ioctl_.load(std::memory_order_relaxed)) {
    if (calls_.ioctl_range(fd_, BLKZEROOUT, {offset, length}) == 0) return 0;
    if (!unsupported(errno)) return errno;
    zero_by_ioctl_.store(false, std::memory_order_relaxed);
  }
  return zero_by_writing(offset, length);
}

int Backing::zero_by_writing(uint64_t offset, uint64_t length) {
  while (length > 0) {
    const uint64_t piece = std::min<uint64_t>(length, zero_block_bytes);
    uint64_t done = 0;
    if (const int error = transfer_now(true, zero_block, offset, piece, done, 0); error != 0)
      return error;
    offset += piece;
    length -= piece;
  }
  return 0;
}

int Backing::transfer_now(bool write, std::byte* data, uint64_t offset, uint64_t length,
                          uint64_t& done, int flags) {
  while (done < length) {
    const iovec piece{data + done, length - done};
    const ssize_t count = write ? calls_.pwritev2(fd_, piece, offset + done, flags)
                                : calls_.preadv2(fd_, piece, offset + done, flags);
    if (count < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    const auto moved = static_cast<uint64_t>(count);
    // A direct transfer that stopped inside a block is repeated from the block's start.
    const uint64_t usable =
        transfer_ == Transfer::direct ? round_down(moved, offset_alignment_) : moved;
    if (usable == 0)
      return EIO;  // the end of a file that somebody cut, or a device that takes nothing
    done += usable;
  }
  return 0;
}

int Backing::transfer_by_copy(bool write, std::byte* data, uint64_t offset, uint64_t length,
                              int flags) {
  void* memory = nullptr;
  const size_t copy_bytes = std::min<size_t>(length, copy_bytes_max);
  if (posix_memalign(&memory, block_bytes_max, copy_bytes) != 0) return ENOMEM;
  auto* const copy = static_cast<std::byte*>(memory);
  int error = 0;
  for (uint64_t position = 0; position < length && error == 0;) {
    const uint64_t piece = std::min<uint64_t>(length - position, copy_bytes);
    uint64_t done = 0;
    if (write) std::memcpy(copy, data + position, piece);
    error = transfer_now(write, copy, offset + position, piece, done, flags);
    if (!write && error == 0) std::memcpy(data + position, copy, piece);
    position += piece;
  }
  free(memory);
  return error;
}

}  // namespace rtrsnbd::daemon
