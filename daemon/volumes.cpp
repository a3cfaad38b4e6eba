// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/volumes.h"

#include <cerrno>

namespace rtrsnbd::daemon {

namespace {

const char* mode_text(wire::AccessMode mode) {
  switch (mode) {
    case wire::AccessMode::read_only:
      return "ro";
    case wire::AccessMode::read_write:
      return "rw";
    case wire::AccessMode::migration:
      return "migration";
  }
  return "unknown mode";
}

}  // namespace

// A device that gives back its count when it is closed, and refuses to change what was opened for
// reading.
class VolumeRegistry::Opened final : public rnbd::OpenDevice {
 public:
  Opened(VolumeRegistry& registry, Volume& volume, wire::AccessMode mode, Reactor& reactor,
         RingFiles& files)
      : registry_(registry),
        volume_(volume),
        mode_(mode),
        device_(volume.backing, reactor, files) {}
  ~Opened() override {
    const std::lock_guard lock(registry_.mutex_);
    volume_.access.release(mode_);
    volume_.opened.erase(&device_);
  }
  [[nodiscard]] const rnbd::DeviceProperties& properties() const override {
    return device_.properties();
  }
  void submit(rnbd::BlockRequest& request) override {
    const bool harmless = request.op == wire::RnbdOp::read || request.op == wire::RnbdOp::flush;
    if (mode_ == wire::AccessMode::read_only && !harmless) {
      request.complete(
          EPERM);  // RNBD has checked this; what was granted is what is enforced, here too
      return;
    }
    device_.submit(request);
  }
  [[nodiscard]] const StoreDevice& device() const { return device_; }

 private:
  VolumeRegistry& registry_;
  Volume& volume_;
  const wire::AccessMode mode_;
  StoreDevice device_;
};

class VolumeRegistry::View final : public rnbd::Volumes {
 public:
  View(VolumeRegistry& registry, rtrs::SessionIdentity identity, Reactor& reactor, RingFiles& files)
      : registry_(registry), identity_(std::move(identity)), reactor_(reactor), files_(files) {}

  tl::expected<std::unique_ptr<rnbd::OpenDevice>, rnbd::OpenError> open(
      std::string_view name, wire::AccessMode mode) override {
    const std::string who =
        "session '" + printable(identity_.name) + "' from " + identity_.peer.text();
    const auto found = registry_.volumes_.find(name);
    // To a client, a volume it may not open and one that does not exist look the same.
    if (found == registry_.volumes_.end()) {
      return tl::unexpected(
          rnbd::OpenError{ENOENT, "there is no volume '" + printable(name) + "'"});
    }
    Volume& volume = found->second;
    if (!volume.rules.allow(identity_.peer, identity_.name)) {
      return tl::unexpected(
          rnbd::OpenError{ENOENT, "volume " + volume.name + ": 'allow:' has no rule for " + who});
    }
    if (mode != wire::AccessMode::read_only && volume.backing->properties().read_only) {
      return tl::unexpected(rnbd::OpenError{
          EROFS, "volume " + volume.name + ": is read-only, asked for " + mode_text(mode)});
    }
    if (mode != wire::AccessMode::read_only && volume.backing->failed()) {
      return tl::unexpected(rnbd::OpenError{
          EIO, "volume " + volume.name +
                   ": is FAILED since a flush failed, and can be opened for reading only until "
                   "rtrsd is restarted; asked for " +
                   mode_text(mode)});
    }
    {
      const std::lock_guard lock(registry_.mutex_);
      if (const int error = volume.access.acquire(mode); error != 0) {
        return tl::unexpected(rnbd::OpenError{
            error, "volume " + volume.name + ": " + std::to_string(volume.access.writers()) +
                       " have it open for writing already, asked for " + mode_text(mode)});
      }
    }
    auto opened = std::make_unique<Opened>(registry_, volume, mode, reactor_, files_);
    {
      const std::lock_guard lock(registry_.mutex_);
      volume.opened.insert(&opened->device());
    }
    return opened;
  }

 private:
  VolumeRegistry& registry_;
  const rtrs::SessionIdentity identity_;
  Reactor& reactor_;
  RingFiles& files_;
};

tl::expected<void, std::string> VolumeRegistry::add(const config::Volume& volume,
                                                    SystemCalls& calls) {
  const auto refuse = [&volume](const std::string& why) {
    return tl::unexpected("volume " + volume.name + ": " + why);
  };
  if (volumes_.contains(volume.name)) return refuse("the name is given twice");
  auto rules = AccessRules::make(volume.allow);
  if (!rules) return refuse("allow: " + rules.error());

  // Before the backing is locked, where the lock could only say that "somebody" has it.
  const auto identity = Backing::identify(volume.path);
  for (const auto& [name, other] : volumes_) {
    if (!identity || other.backing->identity() != *identity) continue;
    if (volume.read_only && other.backing->properties().read_only) continue;
    return refuse(already_served(volume.path, name, other.backing->path()));
  }
  auto backing = Backing::open(volume, log_, calls);
  if (!backing) return refuse(backing.error());
  log_(LogLevel::info, "volume " + volume.name + ": " + (*backing)->description());
  volumes_.emplace(volume.name,
                   Volume{volume.name, std::move(*backing), std::move(*rules), {}, {}});
  return {};
}

bool VolumeRegistry::any_through_ring() const {
  for (const auto& [name, volume] : volumes_) {
    if (volume.backing->transfer() != Transfer::memory) return true;
  }
  return false;
}

std::unique_ptr<rnbd::Volumes> VolumeRegistry::view(const rtrs::SessionIdentity& identity,
                                                    Reactor& reactor, RingFiles& files) {
  return std::make_unique<View>(*this, identity, reactor, files);
}

std::vector<std::string> VolumeRegistry::busy() const {
  std::vector<std::string> names;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, volume] : volumes_) {
    uint64_t requests = 0;
    for (const StoreDevice* device : volume.opened) requests += device->in_flight();
    if (requests > 0) names.push_back(name + " (" + std::to_string(requests) + " requests)");
  }
  return names;
}

}  // namespace rtrsnbd::daemon
