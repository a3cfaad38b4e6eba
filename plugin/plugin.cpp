// SPDX-License-Identifier: BSD-3-Clause
// nbdkit's callbacks. Nothing throws across them. nbdkit's interface forces a few globals on us;
// they are all in `state`.

#define NBDKIT_API_VERSION 2
#include <nbdkit-plugin.h>

#include <atomic>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "plugin/device.h"
#include "plugin/errors.h"
#include "plugin/parameters.h"
#include "plugin/session.h"

using namespace rtrsnbd;
using namespace rtrsnbd::plugin;

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL

namespace {

// A volume and how many NBD connections use it. One session and one open per volume serve them all.
struct OpenVolume {
  std::unique_ptr<Device> device;
  uint32_t users = 0;
};

struct State {
  Parameters parameters;
  // Held while a session or volume is opened or closed, so that a CLOSE cannot overtake the next
  // OPEN of the same volume, which the server would answer with the same device.
  std::mutex mutex;
  std::shared_ptr<Session> session;
  std::map<std::string, std::shared_ptr<OpenVolume>> volumes;
  std::atomic<uint32_t> connections{0};  // NBD connections so far: spreads them over the lanes
};

State* state = nullptr;

struct Connection {
  std::shared_ptr<OpenVolume> volume;
  std::string name;
  bool writable = false;
  uint32_t lane = 1;
  std::atomic<bool> loss_reported{false};
  Device& device() { return *volume->device; }
};

Connection& connection_of(void* handle) {
  return *static_cast<Connection*>(handle);
}

void log_line(LogLevel level, std::string_view line) {
  const std::string text(line);
  if (level == LogLevel::error) {
    nbdkit_error("%s", text.c_str());
  } else {
    nbdkit_debug("%s", text.c_str());
  }
}

void load() {
  state = new State;
}

void unload() {
  delete state;
  state = nullptr;
}

int config(const char* key, const char* value) {
  const std::string error = set_parameter(state->parameters, key, value);
  if (error.empty()) return 0;
  nbdkit_error("%s", error.c_str());
  return -1;
}

int config_complete() {
  if (!state->parameters.server) {
    nbdkit_error("server= is missing: the storage host that runs rtrsd, as in server=HOST[:PORT]");
    return -1;
  }
  return 0;
}

void dump_plugin() {
  std::string names;
  for (const auto& key : keys()) names += (names.empty() ? "" : " ") + std::string(key.name);
  printf("rtrs_keys=%s\nrtrs_transports=tcp\nrtrs_protocol=2.0\n", names.c_str());
}

// The devices go before the session; both need their threads, so this is not left to unload().
void cleanup() {
  const std::lock_guard lock(state->mutex);
  state->volumes.clear();
  state->session.reset();
}

void* open(int readonly) {
  try {
    auto& parameters = state->parameters;
    const char* const export_name = nbdkit_export_name();
    std::string name = parameters.volume;
    if (name.empty() && export_name != nullptr) name = export_name;
    if (name.empty()) {
      nbdkit_error(
          "no volume: give volume=NAME, or let the client ask for an export by the volume's name");
      nbdkit_set_error(EINVAL);
      return nullptr;
    }
    const auto mode = readonly != 0 ? wire::AccessMode::read_only
                                    : parameters.access.value_or(wire::AccessMode::read_write);

    auto connection = std::make_unique<Connection>();
    connection->name = name;
    connection->writable = mode != wire::AccessMode::read_only;

    const std::lock_guard lock(state->mutex);
    if (state->session && !state->session->usable()) {
      // Connections that still use the lost session keep it, and their errors; new ones start
      // afresh.
      state->volumes.clear();
      state->session.reset();
    }
    if (!state->session) {
      auto session = Session::connect(parameters, log_line);
      if (!session) {
        nbdkit_error("%s", session.error().c_str());
        nbdkit_set_error(EIO);
        return nullptr;
      }
      state->session = *session;
    }
    auto& volume = state->volumes[name];
    if (!volume) {
      auto device = Device::open(state->session, name, mode);
      if (!device) {
        state->volumes.erase(name);
        nbdkit_error("%s", device.error().second.c_str());
        nbdkit_set_error(nbd_error(device.error().first));
        return nullptr;
      }
      volume = std::make_shared<OpenVolume>();
      volume->device = std::move(*device);
    }
    ++volume->users;
    connection->volume = volume;
    connection->lane = state->connections.fetch_add(1) % state->session->lane_count() + 1;
    return connection.release();
  } catch (const std::exception& error) {
    nbdkit_error("%s", error.what());
    nbdkit_set_error(ENOMEM);
    return nullptr;
  }
}

void close(void* handle) {
  const std::unique_ptr<Connection> connection(&connection_of(handle));
  const std::lock_guard lock(state->mutex);
  if (--connection->volume->users != 0) return;
  // Unless a fresh session has replaced it.
  const auto entry = state->volumes.find(connection->name);
  if (entry != state->volumes.end() && entry->second == connection->volume)
    state->volumes.erase(entry);
  connection->volume.reset();
}

// Only of a zero does nbdkit understand "not supported": it writes zeroes instead. Of others it
// would make "Invalid argument".
enum class Unsupported { falls_back, is_io_error };

// Runs an operation; its errno to nbdkit, with words where the transport is to blame.
template <typename Operation>
int perform(void* handle, Operation operation, Unsupported unsupported = Unsupported::is_io_error) {
  auto& connection = connection_of(handle);
  int error;
  try {
    error = operation(connection.device());
  } catch (const std::bad_alloc&) {
    error = ENOMEM;
  }
  if (error == 0) return 0;
  if (error == ENOTSUP && unsupported == Unsupported::is_io_error) error = EIO;
  auto& session = connection.device().session();
  if (!session.usable()) {
    if (!connection.loss_reported.exchange(
            true)) {  // once per NBD connection, not once per request
      nbdkit_error("server %s: volume %s: session lost: %s", session.server().c_str(),
                   printable(connection.name).c_str(), session.failure().c_str());
    }
  } else if (error != ENOTSUP) {
    nbdkit_debug("server %s: volume %s: errno %d", session.server().c_str(),
                 printable(connection.name).c_str(), error);
  }
  nbdkit_set_error(nbd_error(error));
  return -1;
}

int64_t get_size(void* handle) {
  return static_cast<int64_t>(connection_of(handle).device().properties().size_bytes);
}

int block_size(void* handle, uint32_t* minimum, uint32_t* preferred, uint32_t* maximum) {
  const auto& properties = connection_of(handle).device().properties();
  *minimum = properties.logical_block_size;
  *preferred = std::max<uint32_t>(properties.physical_block_size, 4096);
  *maximum = 0xffffffff;  // whatever nbdkit takes; larger requests than the session's are cut
  return 0;
}

int can_write(void* handle) {
  return connection_of(handle).writable ? 1 : 0;
}
int can_flush(void*) {
  return 1;
}

int can_fua(void* handle) {
  const auto& properties = connection_of(handle).device().properties();
  return properties.fua || !properties.write_cache ? NBDKIT_FUA_NATIVE : NBDKIT_FUA_EMULATE;
}

int can_trim(void* handle) {
  return connection_of(handle).device().properties().discard_bytes_max != 0 ? 1 : 0;
}
int can_zero(void* handle) {
  return connection_of(handle).device().properties().write_zeroes_bytes_max != 0 ? 1 : 0;
}
int can_fast_zero(void* handle) {
  return can_zero(handle);
}

// A flush makes everything durable that was answered before it on any connection of any client: the
// server flushes the volume.
int can_multi_conn(void*) {
  return 1;
}

int can_cache(void*) {
  return NBDKIT_CACHE_NONE;
}

int pread(void* handle, void* buffer, uint32_t count, uint64_t offset, uint32_t) {
  return perform(handle, [&](Device& device) {
    return device.read(connection_of(handle).lane, static_cast<std::byte*>(buffer), count, offset);
  });
}

int pwrite(void* handle, const void* buffer, uint32_t count, uint64_t offset, uint32_t flags) {
  return perform(handle, [&](Device& device) {
    return device.write(connection_of(handle).lane, static_cast<const std::byte*>(buffer), count,
                        offset, (flags & NBDKIT_FLAG_FUA) != 0);
  });
}

int flush(void* handle, uint32_t) {
  return perform(handle, [&](Device& device) { return device.flush(connection_of(handle).lane); });
}

int trim(void* handle, uint32_t count, uint64_t offset, uint32_t flags) {
  return perform(handle, [&](Device& device) {
    return device.trim(connection_of(handle).lane, count, offset, (flags & NBDKIT_FLAG_FUA) != 0);
  });
}

int zero(void* handle, uint32_t count, uint64_t offset, uint32_t flags) {
  const auto operation = [&](Device& device) {
    return device.zero(connection_of(handle).lane, count, offset,
                       (flags & NBDKIT_FLAG_MAY_TRIM) != 0, (flags & NBDKIT_FLAG_FUA) != 0);
  };
  return perform(handle, operation, Unsupported::falls_back);
}

nbdkit_plugin make_plugin() {
  static const std::string help = help_text();
  nbdkit_plugin plugin{};
  plugin.name = "rtrs";
  plugin.version = RTRS_NBD_VERSION;
  plugin.longname = "nbdkit RTRS plugin";
  plugin.description = "attach a volume of a storage host that runs rtrsd";
  plugin.magic_config_key = "server";
  plugin.config_help = help.c_str();
  plugin.load = load;
  plugin.unload = unload;
  plugin.dump_plugin = dump_plugin;
  plugin.config = config;
  plugin.config_complete = config_complete;
  plugin.cleanup = cleanup;
  plugin.open = open;
  plugin.close = close;
  plugin.get_size = get_size;
  plugin.block_size = block_size;
  plugin.can_write = can_write;
  plugin.can_flush = can_flush;
  plugin.can_fua = can_fua;
  plugin.can_trim = can_trim;
  plugin.can_zero = can_zero;
  plugin.can_fast_zero = can_fast_zero;
  plugin.can_multi_conn = can_multi_conn;
  plugin.can_cache = can_cache;
  plugin.pread = pread;
  plugin.pwrite = pwrite;
  plugin.flush = flush;
  plugin.trim = trim;
  plugin.zero = zero;
  plugin.errno_is_preserved = 0;
  return plugin;
}

nbdkit_plugin callbacks = make_plugin();

}  // namespace

NBDKIT_REGISTER_PLUGIN(callbacks)
