// SPDX-License-Identifier: BSD-3-Clause
// What the system forbids is named, with the setting and the remedy. Each test runs in a child,
// which gives up rights the test program needs.
#include <doctest/doctest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>

#include "tests/unit/daemon/support.h"

using namespace rtrsnbd;
using namespace rtrsnbd::daemon;
using namespace rtrsnbd::daemon::test;

namespace {

// What `body` returns, run in a child.
std::string in_child(const std::function<std::string()>& body) {
  std::array<int, 2> fds{};
  REQUIRE(pipe(fds.data()) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const std::string text = body();
    const bool written =
        write(fds[1], text.data(), text.size()) == static_cast<ssize_t>(text.size());
    _exit(written ? 0 : 1);
  }
  close(fds[1]);
  std::string text;
  std::array<char, 4096> bytes{};
  for (ssize_t count = 0; (count = read(fds[0], bytes.data(), bytes.size())) > 0;) {
    text.append(bytes.data(), static_cast<size_t>(count));
  }
  close(fds[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  return text;
}

bool forbid_io_uring_setup(int error) {
  std::array<sock_filter, 4> program = {
      sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      sock_filter BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)),
      sock_filter BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

std::string ring_refusal(int error) {
  return in_child([error]() -> std::string {
    if (!forbid_io_uring_setup(error)) return "no seccomp";
    try {
      const Ring ring({});
      return "made a ring";
    } catch (const SetUpError& refused) {
      return refused.what();
    }
  });
}

constexpr size_t session_bytes = size_t{2} << 20;
constexpr uid_t nobody_else = 64321;  // locked memory is counted per user: one that runs nothing

// Opens three sessions' worth of memory as an unprivileged user with a limit of locked memory.
std::string sessions_with_memlock(rlim_t limit) {
  return in_child([limit]() -> std::string {
    const rlimit locked{limit, limit};
    if (setrlimit(RLIMIT_MEMLOCK, &locked) != 0 || setgid(nobody_else) != 0 ||
        setuid(nobody_else) != 0) {
      return "no rights";
    }
    try {
      LogLines log;
      Reactor reactor;
      MemoryBudget budget(uint64_t{1} << 30);
      ChunkAllocator allocator(reactor, budget, true, log.sink());
      std::string reason;
      std::vector<std::unique_ptr<rtrs::ChunkMemory>> sessions;
      std::string text;
      for (int i = 0; i < 3; ++i) {
        sessions.push_back(allocator.allocate(session_bytes, reason));
        if (!sessions.back()) return "refused: " + reason;
        text += sessions.back()->registered_index() >= 0 ? "registered " : "plain ";
      }
      return text + std::to_string(log.count(LogLevel::notice)) + ": " + log.text() +
             reactor.ring().missing();
    } catch (const SetUpError& error) {
      return error.what();
    }
  });
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("io-uring-forbidden-by-seccomp-is-a-bare-errno") {
  const std::string forbidden = ring_refusal(EPERM);
  CAPTURE(forbidden);
  // Where the sysctl forbids it as well, that comes first.
  CHECK((contains(forbidden, "seccomp") || contains(forbidden, "kernel.io_uring_disabled")));
  CHECK((contains(forbidden, "allow io_uring_setup") || contains(forbidden, "set it to 0")));
  const std::string hidden = ring_refusal(ENOSYS);
  CHECK(contains(hidden, "5.15"));
  CHECK(contains(hidden, "seccomp"));
  CHECK(contains(ring_refusal(ENOMEM), "LimitMEMLOCK="));
  CHECK(contains(ring_refusal(ENOMEM), "locked memory is limited to"));
  CHECK(contains(ring_refusal(EMFILE), "LimitNOFILE="));
}

TEST_CASE("a-limit-of-locked-memory-ends-sessions-or-is-not-told") {
  if (geteuid() != 0) {
    MESSAGE("skipped: needs root to become somebody else");
    return;
  }
  const std::string none = sessions_with_memlock(64 << 10);
  CAPTURE(none);
  CHECK(contains(none, "plain plain plain 1: "));
  CHECK(contains(
      none, "a session needs 2.0 MiB of locked memory and the limit for all sessions is 0.0 MiB"));
  CHECK(contains(none, "LimitMEMLOCK="));
  CHECK(contains(none, "small queues, as locked memory is limited to 64 KiB"));
  const std::string two = sessions_with_memlock(5 << 20);
  CAPTURE(two);
  CHECK(contains(two, "registered registered plain 1: "));
  CHECK(contains(two, "is 5.0 MiB"));
  CHECK(contains(sessions_with_memlock(4096), "is limited to 4 KiB"));
}
