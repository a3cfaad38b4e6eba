# SPDX-License-Identifier: BSD-3-Clause
"""What the end-to-end tests stand on: captive daemons, nbdkit with our plugin, loop devices, tmpfs mounts,
and a runner for functions named test_*.

The build folder comes in the environment variable BUILD. Every process and mount belongs to a Stack, which
ends it however the test ends. A test that lacks something skips with the reason; a script whose tests were
all skipped ends with status 77.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.abspath(os.environ.get("BUILD", os.path.join(SOURCE, "build")))
RTRSD = os.path.join(BUILD, "daemon", "rtrsd")
PLUGIN = os.path.join(BUILD, "plugin", "nbdkit-rtrs-plugin.so")
SLOW = bool(os.environ.get("RTRS_TEST_SLOW"))  # the long variants
os.environ["PATH"] += ":/usr/sbin:/sbin"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def _sanitizer():
    """(name, runtime to preload) of the plugin's build; nbdkit itself is not instrumented."""
    try:
        text = subprocess.run(["ldd", PLUGIN], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None, []
    found = re.findall(r"(lib(a|t|ub)san\.so\.\d+) => (\S+)", text)
    name = {"a": "address", "t": "thread"}.get(found[0][1]) if found else None
    # ASan's runtime must come first; UBSan's own runtime needs no preload.
    return name, [path for _, kind, path in found if kind in "at"]


SANITIZER, SANITIZER_PRELOAD = _sanitizer()
PATIENCE = 4 if SANITIZER else 1  # factor for time limits
SANITIZER_REPORT = re.compile(r"ERROR: (Address|Thread|Leak|Undefined)\w*Sanitizer|WARNING: ThreadSanitizer|"
                              r"runtime error: ")


class Skip(Exception):
    pass


def requires(condition, reason):
    if not condition:
        raise Skip(reason)


def requires_tool(*names):
    for name in names:
        requires(shutil.which(name), "%s is not installed" % name)


def requires_root():
    requires(os.geteuid() == 0, "must be root")


def requires_nbd_module():
    try:
        import nbd
        return nbd
    except ImportError:
        raise Skip("Python's nbd module (python3-libnbd) is not there") from None


def environment(extra=None):
    env = dict(os.environ)
    env.setdefault("ASAN_OPTIONS", "detect_leaks=1:quarantine_size_mb=16:abort_on_error=0:exitcode=99")
    env.setdefault("UBSAN_OPTIONS", "print_stacktrace=1:halt_on_error=1:exitcode=99")
    env.setdefault("TSAN_OPTIONS", "halt_on_error=0:exitcode=99:second_deadlock_stack=1:report_thread_leaks=0")
    env.update(extra or {})
    return env


def run(*command, status=0, timeout=60, stdin=None, env=None, cwd=None):
    """Runs a command and checks its exit status (None: any). Returns stdout; .stderr in the exception."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment(env),
                          timeout=timeout * PATIENCE, input=stdin, cwd=cwd, errors="replace")
    if status is not None and done.returncode != status:
        raise AssertionError("%s ended with status %d instead of %s\n%s%s" % (
            " ".join(map(str, command)), done.returncode, status, done.stdout[-4000:], done.stderr[-4000:]))
    run.stderr, run.status = done.stderr, done.returncode
    return done.stdout


def equal(actual, expected, what="value"):
    if actual != expected:
        raise AssertionError("%s is %.400r instead of %.400r" % (what, actual, expected))


def true(condition, text):
    if not condition:
        raise AssertionError(text)


def contains(text, *parts):
    for part in parts:
        true(part.lower() in text.lower(), "%r does not appear in: %s" % (part, text[-1500:]))


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds * PATIENCE
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError("after %.0f s still not: %s" % (seconds * PATIENCE, what))
        time.sleep(0.02)


def free_port(host="127.0.0.1"):
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def listening(pid, port):
    """Whether the process has a listening socket on port, without disturbing it by connecting."""
    wanted = ":%04X" % port
    inodes = set()
    for table in ("/proc/%d/net/tcp" % pid, "/proc/%d/net/tcp6" % pid):
        with contextlib.suppress(OSError), open(table) as lines:
            for line in lines:
                fields = line.split()
                if fields[3] == "0A" and fields[1].endswith(wanted):
                    inodes.add("socket:[%s]" % fields[9])
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/%d/fd" % pid):
            with contextlib.suppress(OSError):
                if os.readlink("/proc/%d/fd/%s" % (pid, fd)) in inodes:
                    return True
    return False


def stat_of(pid):
    """rss bytes, fds, threads, CPU seconds of a process."""
    with open("/proc/%d/status" % pid) as status:
        fields = dict(line.rstrip("\n").split(":", 1) for line in status)
    with open("/proc/%d/stat" % pid) as stat:
        cpu = stat.read().rsplit(")", 1)[1].split()
    switches = int(fields["voluntary_ctxt_switches"]) + int(fields["nonvoluntary_ctxt_switches"])
    return {"rss": int(fields["VmRSS"].split()[0]) * 1024, "fds": len(os.listdir("/proc/%d/fd" % pid)),
            "threads": int(fields["Threads"]), "cpu": (int(cpu[11]) + int(cpu[12])) / os.sysconf("SC_CLK_TCK"),
            "switches": switches}


class Process:
    """A child in its own session whose output goes to a log file."""

    def __init__(self, command, log, env=None, preexec=None, close_stdio=False):
        self.command, self.log_path, self.expected_dead = command, log, False
        with open(log, "ab") as out:
            self.child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                          env=environment(env), preexec_fn=preexec, start_new_session=True)
        self.pid = self.child.pid

    def log(self):
        with open(self.log_path, errors="replace") as text:
            return text.read()

    def alive(self):
        return self.child.poll() is None

    def kill(self, number=signal.SIGKILL):
        self.expected_dead = True
        if self.alive():
            os.kill(self.pid, number)

    def wait(self, seconds):
        try:
            return self.child.wait(seconds * PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError("%s (pid %d) still runs after %.0f s; log:\n%s" % (
                os.path.basename(self.command[0]), self.pid, seconds * PATIENCE, self.log()[-3000:])) from None

    def terminate(self, seconds=40, status=0):
        """SIGTERM, and the exit status must be the expected one."""
        self.expected_dead = True
        if self.alive():
            os.kill(self.pid, signal.SIGTERM)
        code = self.wait(seconds)
        if code != status:
            raise AssertionError("%s ended with status %s instead of %s; log:\n%s" % (
                self.command[0], code, status, self.log()[-4000:]))

    def check_log(self):
        report = SANITIZER_REPORT.search(self.log())
        if report:
            raise AssertionError("sanitizer report of %s:\n%s" % (self.command[0], self.log()[-8000:]))

    def end(self):
        """Called by the Stack however the test went."""
        crashed = not self.alive() and not self.expected_dead and self.child.returncode not in (0, None)
        if self.alive():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)
                os.kill(self.pid, signal.SIGTERM)
            try:
                self.child.wait(20 * PATIENCE)
            except subprocess.TimeoutExpired:
                os.kill(self.pid, signal.SIGKILL)
                self.child.wait()
                raise AssertionError("%s did not end on SIGTERM; log:\n%s" % (self.command[0], self.log()[-3000:])) \
                    from None
        if crashed:
            raise AssertionError("%s ended with status %d during the test; log:\n%s" % (
                self.command[0], self.child.returncode, self.log()[-6000:]))
        self.check_log()


def volume(name, path, size=None, **keys):
    """One entry of `volumes:`."""
    lines = ["  - name: %s" % name, "    path: %s" % path]
    if size is not None:
        lines.append("    size: %s" % size)
    for key, value in keys.items():
        key = key.replace("_", "-")
        if isinstance(value, list):
            lines.append("    %s:" % key)
            for rule in value:
                lines += ["      - %s" % "\n        ".join("%s: %s" % pair for pair in rule.items())]
        else:
            lines.append("    %s: %s" % (key, value))
    return "\n".join(lines)


class Daemon(Process):
    def __init__(self, stack, volumes, port=None, wrap=(), env=None, preexec=None, wait=True, host="127.0.0.1",
                 **keys):
        """volumes: list of volume(...); keys: further top-level keys, with _ for -."""
        self.host = host
        directory = stack.directory()
        for attempt in range(5):
            self.port = port or free_port()
            self.config_path = os.path.join(directory, "rtrsd.yaml")
            lines = ["listen: tcp:%s:%d" % (host, self.port)]
            lines += ["%s: %s" % (key.replace("_", "-"), value) for key, value in keys.items()]
            with open(self.config_path, "w") as config:
                config.write("\n".join(lines + ["volumes:"] + list(volumes)) + "\n")
            super().__init__(list(wrap) + [RTRSD, "-c", self.config_path],
                             os.path.join(directory, "rtrsd-%d.log" % attempt), env, preexec)
            if not wait:
                break
            wait_until(lambda: not self.alive() or listening(self.pid, self.port), 15, "rtrsd listens")
            if self.alive():
                break
            if port is not None or "in use" not in self.log():
                raise AssertionError("rtrsd ended with status %d:\n%s" % (self.child.returncode, self.log()))
        self.directory = directory
        stack.add(self)

    @property
    def server(self):
        return "tcp:%s:%d" % (self.host, self.port)

    def says(self, *words):
        """The log, which is written a moment after the fact, comes to contain these words."""
        wait_until(lambda: all(word.lower() in self.log().lower() for word in words), 3,
                   "%s in the log: %s" % (words, self.log()[-1500:]))


class Nbdkit(Process):
    """nbdkit with our plugin, in the foreground on a Unix socket."""

    def __init__(self, stack, server, volume, filters=(), options=(), keys=(), filter_keys=(), env=None, wait=True,
                 **named):
        directory = stack.directory()
        self.socket = os.path.join(directory, "s")
        pid_file = os.path.join(directory, "pid")
        command = ["nbdkit", "-f", "-U", self.socket, "-P", pid_file] + list(options)
        command += ["--filter=" + name for name in filters] + [PLUGIN]
        if isinstance(server, Daemon):
            server = server.server
        command += plugin_keys(server, volume, **named) + list(keys) + list(filter_keys)
        super().__init__(command, os.path.join(directory, "nbdkit.log"), preload(env))
        if wait:
            wait_until(lambda: not self.alive() or os.path.exists(pid_file), 15, "nbdkit is ready")
            if not self.alive():
                raise AssertionError("nbdkit ended with status %d:\n%s" % (self.child.returncode, self.log()))
        stack.add(self)

    @property
    def uri(self):
        return "nbd+unix:///?socket=" + self.socket

    def export_uri(self, name):
        return "nbd+unix:///%s?socket=%s" % (name, self.socket)

    def end(self):
        # nbdkit waits for its clients, and a test that failed may have left some.
        if self.alive():
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, signal.SIGTERM)
            try:
                self.child.wait(3 * PATIENCE)
            except subprocess.TimeoutExpired:
                os.kill(self.pid, signal.SIGKILL)
                self.child.wait()
            self.expected_dead = True
        elif "raw_send_socket: Assertion" in self.log():
            # nbdkit 1.32 itself may stumble over a client that vanishes with requests in flight.
            self.expected_dead = True
        super().end()


def plugin_keys(server, volume, **named):
    keys = ["server=" + server] + (["volume=" + volume] if volume is not None else [])
    return keys + ["%s=%s" % (key.replace("_", "-"), value) for key, value in named.items()]


def preload(env=None):
    env = dict(env or {})
    if SANITIZER_PRELOAD:
        env["LD_PRELOAD"] = ":".join(SANITIZER_PRELOAD + [os.path.join(BUILD, "tests", "e2e", "libkeep-locales.so")])
        if SANITIZER == "address":
            # nbdkit, Python and the like leak on purpose at exit; leaks of ours are the daemon's and the units' matter.
            env.setdefault("ASAN_OPTIONS", "detect_leaks=0:quarantine_size_mb=16:exitcode=99")
    return env


def nbdkit_run(server, volume, script, options=(), filters=(), filter_keys=(), status=0, timeout=60, keys=(), **named):
    """nbdkit -U - ... --run SCRIPT. $uri is there for the script. Returns stdout; run.stderr has the rest."""
    if isinstance(server, Daemon):
        server = server.server
    command = ["nbdkit", "-U", "-"] + list(options) + ["--filter=" + name for name in filters] + [PLUGIN]
    command += plugin_keys(server, volume, **named) + list(keys) + list(filter_keys)
    # The clients of --run inherit nbdkit's environment; the runtime of a sanitizer must not get into them.
    return run(*command, "--run", "unset LD_PRELOAD; " + script, status=status, timeout=timeout, env=preload())


class Stack:
    """Owns what a test starts; ends it in reverse order and reports the first thing that went wrong."""

    def __init__(self, base):
        self.base, self.things, self.counter = base, [], 0

    def directory(self):
        self.counter += 1
        path = os.path.join(self.base, "%d" % self.counter)
        os.mkdir(path)
        return path

    def path(self, name):
        return os.path.join(self.base, name)

    def add(self, thing):
        self.things.append(thing)
        return thing

    def call(self, function, *arguments):
        """Calls function(*arguments) at the end."""
        class Call:
            @staticmethod
            def end():
                function(*arguments)
        self.things.append(Call)

    def end(self):
        first = None
        for thing in reversed(self.things):
            try:
                thing.end()
            except Exception as error:
                first = first or error
        return first

    # --- backings

    def tmpfs(self, size):
        requires_root()
        where = self.directory()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=%d" % size, "tmpfs", where]).returncode:
            raise Skip("tmpfs cannot be mounted here")
        self.call(lambda: subprocess.run(["umount", "-l", where], check=True))
        return where

    def loop(self, path, sector_size=512, options=()):
        requires_root()
        requires_tool("losetup")
        done = subprocess.run(["losetup", "--find", "--show", "--sector-size", str(sector_size)] + list(options)
                              + [path], capture_output=True, text=True)
        if done.returncode:
            raise Skip("no loop device: " + done.stderr.strip())
        device = done.stdout.strip()
        self.call(lambda: subprocess.run(["losetup", "-d", device], check=True))
        return device

    def file(self, name, size):
        path = self.path(name)
        with open(path, "wb") as handle:
            handle.truncate(size)
        return path


def nbd_connect(uri, strict=False, timeout=15):
    """A libnbd handle; without strict mode bad requests really go out."""
    nbd = requires_nbd_module()
    handle = nbd.NBD()
    if not strict:
        handle.set_strict_mode(0)
    handle.add_meta_context("base:allocation")
    handle.connect_uri(uri)
    return handle


def expect_nbd_error(function, *arguments, errno_names=None):
    """The errno name that an NBD call fails with."""
    nbd = requires_nbd_module()
    try:
        function(*arguments)
    except nbd.Error as error:
        if errno_names is not None and error.errno not in errno_names:
            raise AssertionError("%s instead of %s: %s" % (error.errno, errno_names, error.string)) from None
        return error.errno
    raise AssertionError("%s%r succeeded" % (getattr(function, "__name__", function), arguments[1:]))


def allocated(path):
    return os.stat(path).st_blocks * 512


def fio(uri, *options, timeout=180):
    requires_tool("fio")
    if "nbd" not in run("fio", "--enghelp"):
        raise Skip("fio has no nbd engine")
    with tempfile.TemporaryDirectory() as directory:  # for fio's verify state
        return run("fio", "--name=job", "--ioengine=nbd", "--uri=" + uri, "--group_reporting", *options,
                   timeout=timeout, cwd=directory)


class Background(threading.Thread):
    """A function on a thread whose exception comes out of finish()."""

    def __init__(self, function, *arguments):
        super().__init__(daemon=True)
        self.function, self.arguments, self.error, self.value = function, arguments, None, None
        self.start()

    def run(self):
        try:
            self.value = self.function(*self.arguments)
        except BaseException as error:
            self.error = error

    def finish(self, seconds=60):
        self.join(seconds * PATIENCE)
        if self.is_alive():
            raise AssertionError("%s still runs after %.0f s" % (self.function.__name__, seconds * PATIENCE))
        if self.error:
            raise self.error
        return self.value


def main(namespace):
    """Runs the functions test_* of a script, or those named on its command line. Each gets a Stack."""
    if not os.path.exists(RTRSD) or not os.path.exists(PLUGIN):
        print("SKIP: no build in %s" % BUILD)
        sys.exit(77)
    tests = [(name, value) for name, value in namespace.items() if name.startswith("test_") and callable(value)]
    if len(sys.argv) > 1:
        tests = [(name, value) for name, value in tests if name in sys.argv[1:] or name[5:] in sys.argv[1:]]
        if not tests:
            sys.exit("no such test")
    failures = skipped = 0
    for name, function in tests:
        base = tempfile.mkdtemp(prefix="rtrs-e2e-")
        stack, start = Stack(base), time.monotonic()
        result, detail = "ok", ""
        try:
            function(stack)
        except Skip as skip:
            result, detail, skipped = "skip", str(skip), skipped + 1
        except Exception:
            result, detail = "FAIL", traceback.format_exc()
            for thing in stack.things:
                if isinstance(thing, Process):
                    detail += "\nlog of %s:\n%s" % (os.path.basename(thing.command[0]), thing.log()[-1200:])
        error = stack.end()
        if error and result != "FAIL":
            result, detail = "FAIL", "at the end: %s" % error
        failures += result == "FAIL"
        shutil.rmtree(base, ignore_errors=True)
        print("%-4s %-60s %5.1f s%s" % (result, name[5:].replace("_", "-"), time.monotonic() - start,
                                        "  " + detail if detail else ""), flush=True)
    if failures:
        sys.exit(1)
    sys.exit(77 if skipped == len(tests) else 0)
