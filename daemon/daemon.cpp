// SPDX-License-Identifier: BSD-3-Clause
#include "daemon/daemon.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "daemon/access_rules.h"
#include "daemon/memory.h"
#include "daemon/server_reactor.h"
#include "daemon/volumes.h"
#include "protocol/fabric/soft/fabric.h"
#include "protocol/fabric/verbs/fabric.h"
#include "protocol/wire/rtrs.h"

namespace rtrsnbd::daemon {

namespace {

constexpr uint32_t reactors_max = 16;
// How long a stop may take before the log says what it waits for.
constexpr Duration drain_patience = std::chrono::seconds(2);

sigset_t handled_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&set, signal);
  return set;
}

uint32_t usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return static_cast<uint32_t>(std::max(1, CPU_COUNT(&set)));
}

// A session has one descriptor per connection: the soft limit, often 1024, is for programs that use
// select().
void raise_open_files_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

rtrs::ServerLimits limits_of(const config::Config& configuration) {
  rtrs::ServerLimits limits;
  limits.queue_depth = configuration.queue_depth;
  limits.max_io_size = static_cast<uint32_t>(configuration.max_io_size);
  limits.always_invalidate = configuration.always_invalidate;
  limits.heartbeat = {configuration.heartbeat_interval, configuration.heartbeat_missed_max};
  limits.sessions_max = configuration.sessions_max;
  return limits;
}

// Empty: fine.
std::string check_geometry(const config::Config& configuration) {
  const rtrs::ServerLimits limits = limits_of(configuration);
  if (limits.queue_depth == 0 || limits.queue_depth > wire::queue_depth_max ||
      !wire::geometry_fits(limits.queue_depth, limits.chunk_size())) {
    return "'queue-depth' " + std::to_string(limits.queue_depth) + " and 'max-io-size' " +
           std::to_string(limits.max_io_size) +
           " do not fit together: their product, each rounded up to a power of two, may not exceed "
           "256 MiB";
  }
  if (limits.session_bytes() > configuration.memory_max) {
    return "'max-memory' " + std::to_string(configuration.memory_max) +
           " is less than one session needs: " + std::to_string(limits.session_bytes()) +
           " bytes, from 'queue-depth' and 'max-io-size'";
  }
  return {};
}

fabric::soft::Crc crc_of(config::Crc crc) {
  switch (crc) {
    case config::Crc::automatic:
      return fabric::soft::Crc::automatic;
    case config::Crc::on:
      return fabric::soft::Crc::on;
    case config::Crc::off:
      return fabric::soft::Crc::off;
  }
  return fabric::soft::Crc::automatic;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

class Service {
 public:
  Service(const config::Config& configuration, Log& log, const Notifier& notifier)
      : configuration_(configuration),
        log_(log),
        sink_(log.sink()),
        notifier_(notifier),
        volumes_(sink_),
        budget_(configuration.memory_max) {}
  ~Service() {
    if (signals_ >= 0) close(signals_);
    if (ended_ >= 0) close(ended_);
  }
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  ExitCode run() {
    raise_open_files_limit();
    if (const std::string problem = check_geometry(configuration_); !problem.empty()) {
      log_.write(LogLevel::error, problem);
      return ExitCode::configuration;
    }
    const sigset_t set = handled_signals();
    signals_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    ended_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (signals_ < 0 || ended_ < 0) {
      log_.write(LogLevel::error,
                 std::string("cannot make descriptors for signals: ") + std::strerror(errno));
      return ExitCode::environment;
    }
    if (!open_volumes()) return ExitCode::volume;
    if (!make_reactors()) return ExitCode::environment;
    if (!listen()) return ExitCode::listen;
    start_threads();
    const std::string status = "serving " + std::to_string(volumes_.size()) +
                               (volumes_.size() == 1 ? " volume" : " volumes") + " on " +
                               joined(addresses_);
    log_.write(LogLevel::notice, status);
    notifier_.send("READY=1\nSTATUS=" + status);
    const bool asked = wait_for_stop();
    const ExitCode code = asked ? drain() : failure_.load();
    if (code == ExitCode::success) {
      for (std::thread& thread : threads_) thread.join();
      log_.write(LogLevel::notice, "stopped");
    } else {
      // Threads may be inside a system call that does not end; they are left to _exit().
      for (std::thread& thread : threads_) thread.detach();
      abandoned_ = true;
    }
    return code;
  }

  [[nodiscard]] bool abandoned() const { return abandoned_; }

 private:
  bool open_volumes() {
    bool good = true;
    for (const config::Volume& volume : configuration_.volumes) {
      const auto added = volumes_.add(volume);
      if (added) continue;
      log_.write(LogLevel::error, added.error());  // all of them, so that one attempt shows all
      good = false;
    }
    return good;
  }

  bool make_reactors() {
    const uint32_t count = configuration_.reactors != 0 ? configuration_.reactors
                                                        : std::min(usable_cpus(), reactors_max);
    fabric::soft::Options options;
    options.crc = crc_of(configuration_.crc);
    options.log = sink_;
    soft_ = fabric::soft::make_fabric(options);
    rdma_ = fabric::verbs::make_fabric();
    directory_ = std::make_unique<rtrs::Directory>(count, configuration_.sessions_max);
    shared_ = std::make_unique<Shared>(
        Shared{*directory_, limits_of(configuration_), budget_, volumes_, sink_});
    try {
      for (uint32_t index = 0; index < count; ++index) {
        reactors_.push_back(std::make_unique<ServerReactor>(*shared_, index, RingOptions{}));
      }
    } catch (const SetUpError& error) {
      log_.write(LogLevel::error, error.what());
      return false;
    }
    const std::string& missing = reactors_.front()->reactor().ring().missing();
    if (!missing.empty()) {
      log_.write(LogLevel::notice,
                 "io_uring of this system: " + missing + "; costs a little more CPU per request");
    }
    return true;
  }

  bool listen() {
    std::vector<std::unique_ptr<fabric::Listener>> listeners;
    for (const config::Listen& where : configuration_.listen) {
      const auto refuse = [&](const std::string& why) {
        log_.write(LogLevel::error, "cannot listen on " + where.text + ": " + why);
        return false;
      };
      const auto addresses = fabric::resolve({where.host, where.port}, true);
      if (!addresses) return refuse(addresses.error());
      fabric::Fabric& fabric = where.scheme == "rdma" ? *rdma_ : *soft_;
      bool any = false;
      std::string problem;
      for (const fabric::Address& address : *addresses) {
        try {
          listeners.push_back(fabric.listen(address));
          addresses_.push_back(where.scheme + ":" + listeners.back()->address().text());
          any = true;
        } catch (const std::system_error& error) {
          problem = error.what();
          const int number = error.code().value();
          // "Any address" names both families; one of them is enough where the other is switched
          // off, or where the first socket already takes both.
          const bool tolerable =
              addresses->size() > 1 &&
              (number == EAFNOSUPPORT || number == EADDRNOTAVAIL || (any && number == EADDRINUSE));
          if (!tolerable) {
            if (number == EADDRINUSE)
              problem += "; another process, maybe another rtrsd, has the port";
            if (number == EADDRNOTAVAIL) problem += "; no interface of this host has the address";
            if (number == EACCES) problem += "; ports below 1024 need CAP_NET_BIND_SERVICE";
            return refuse(problem);
          }
        }
      }
      if (!any) return refuse(problem);
    }
    std::vector<ServerReactor*> peers;
    for (const auto& reactor : reactors_) peers.push_back(reactor.get());
    reactors_.front()->listen(std::move(listeners), std::move(peers));
    return true;
  }

  void start_threads() {
    running_ = static_cast<uint32_t>(reactors_.size());
    for (size_t index = 0; index < reactors_.size(); ++index) {
      threads_.emplace_back([this, index] {
        pthread_setname_np(pthread_self(), ("rtrsd/" + std::to_string(index)).c_str());
        try {
          reactors_[index]->run();
        } catch (const SetUpError& error) {
          log_.write(LogLevel::error, error.what());
          failure_ = ExitCode::environment;
          crashed_ = true;
        } catch (const std::exception& error) {
          log_.write(LogLevel::error,
                     "reactor " + std::to_string(index) + " failed: " + error.what());
          crashed_ = true;
        }
        --running_;
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = write(ended_, &one, sizeof one);
      });
    }
  }

  // The next signal, or none when a reactor has ended or the time is over.
  std::optional<int> wait_for_signal(std::optional<TimePoint> until) {
    int timeout = -1;
    if (until) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*until - Clock::now()).count();
      timeout = static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
    }
    pollfd polled[] = {{signals_, POLLIN, 0}, {ended_, POLLIN, 0}};
    if (poll(polled, 2, timeout) <= 0) return std::nullopt;
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t taken = read(ended_, &count, sizeof count);
    signalfd_siginfo info{};
    if (read(signals_, &info, sizeof info) != static_cast<ssize_t>(sizeof info))
      return std::nullopt;
    return static_cast<int>(info.ssi_signo);
  }

  // False: a reactor has failed.
  bool wait_for_stop() {
    while (!crashed_) {
      const std::optional<int> signal = wait_for_signal(std::nullopt);
      if (!signal) continue;
      if (*signal == SIGHUP) {
        log_.write(
            LogLevel::notice,
            "SIGHUP: reloading the configuration is not available yet; restart rtrsd to apply it");
        continue;
      }
      log_.write(LogLevel::notice, std::string(*signal == SIGTERM ? "SIGTERM" : "SIGINT") +
                                       ": stopping; running requests have " +
                                       std::to_string(configuration_.drain_timeout.count()) +
                                       " ms to end");
      return true;
    }
    return false;
  }

  ExitCode drain() {
    const TimePoint begin = Clock::now();
    const TimePoint deadline = begin + configuration_.drain_timeout;
    const auto margin = std::chrono::duration_cast<std::chrono::microseconds>(
        configuration_.drain_timeout + std::chrono::seconds(10));
    notifier_.send("STOPPING=1\nSTATUS=stopping\nEXTEND_TIMEOUT_USEC=" +
                   std::to_string(margin.count()));
    for (const auto& reactor : reactors_) reactor->request_shut_down();
    TimePoint next_word = begin + drain_patience;
    std::string said;
    while (running_ > 0 && !crashed_) {
      const std::optional<int> signal = wait_for_signal(std::min(deadline, next_word));
      const TimePoint now = Clock::now();
      const bool again = signal && *signal != SIGHUP;
      if (again || now >= deadline) {
        if (running_ == 0) break;
        const std::string waits = what_it_waits_for();
        log_.write(LogLevel::error,
                   std::string(again ? "stopped by a second signal" : "drain-timeout is over") +
                       ", leaving at once; not ended: " + waits);
        notifier_.send("STATUS=stopped before its requests ended: " + waits);
        return ExitCode::drain_timeout;
      }
      if (now >= next_word) {
        next_word = now + drain_patience;
        const std::string waits = what_it_waits_for();
        notifier_.send("STATUS=stopping, waiting for " + waits);
        if (waits != said) log_.write(LogLevel::warning, "stopping, still waiting for " + waits);
        said = waits;
      }
    }
    return crashed_ ? failure_.load() : ExitCode::success;
  }

  std::string what_it_waits_for() const {
    const std::vector<std::string> busy = volumes_.busy();
    if (!busy.empty()) return (busy.size() == 1 ? "volume " : "volumes ") + joined(busy);
    return std::to_string(directory_->session_count()) + " sessions to close";
  }

  const config::Config& configuration_;
  Log& log_;
  const LogSink sink_;
  const Notifier& notifier_;
  int signals_ = -1;
  int ended_ = -1;
  bool abandoned_ = false;
  std::atomic<bool> crashed_{false};
  std::atomic<ExitCode> failure_{ExitCode::failure};  // the exit status of a crash
  std::atomic<uint32_t> running_{0};

  // Declared in the order of creation. Volumes come after the reactors, although they are made
  // first: their workers send messages to reactors and have to end before them.
  std::unique_ptr<fabric::Fabric> soft_;
  std::unique_ptr<fabric::Fabric> rdma_;
  std::unique_ptr<rtrs::Directory> directory_;
  std::unique_ptr<Shared> shared_;
  std::vector<std::unique_ptr<ServerReactor>> reactors_;
  VolumeRegistry volumes_;
  MemoryBudget budget_;
  std::vector<std::string> addresses_;
  std::vector<std::thread> threads_;
};

}  // namespace

void block_signals() {
  const sigset_t set = handled_signals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

std::vector<std::string> check(const config::Config& configuration, const std::string& file) {
  std::vector<std::string> problems;
  if (const std::string problem = check_geometry(configuration); !problem.empty()) {
    problems.push_back(file + ": " + problem);
  }
  for (size_t i = 0; i < configuration.volumes.size(); ++i) {
    const config::Volume& volume = configuration.volumes[i];
    const auto say = [&](const std::string& problem) {
      problems.push_back(file + ":" + std::to_string(volume.line) + ": volume " + volume.name +
                         ": " + problem);
    };
    if (const auto rules = AccessRules::make(volume.allow); !rules) say("allow: " + rules.error());
    if (const std::string problem = Backing::inspect(volume); !problem.empty()) say(problem);
    const auto identity = Backing::identify(volume.path);
    for (size_t other = 0; identity && other < i; ++other) {
      const config::Volume& earlier = configuration.volumes[other];
      if (Backing::identify(earlier.path) == identity && !(volume.read_only && earlier.read_only)) {
        say(already_served(volume.path, earlier.name, earlier.path));
      }
    }
  }
  return problems;
}

ExitCode serve(const config::Config& configuration, Log& log, const Notifier& notifier) {
  auto service = std::make_unique<Service>(configuration, log, notifier);
  const ExitCode code = service->run();
  if (service->abandoned()) [[maybe_unused]]
    Service* left = service.release();
  return code;
}

}  // namespace rtrsnbd::daemon
