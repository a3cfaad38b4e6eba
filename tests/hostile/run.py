#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""rtrsd under the hostile client, while good clients do verified IO.

For each mode of remote keys: a captive rtrsd, hostile.py on its volumes, and beside it a raw good client
and fio --verify through nbdkit and the plugin, both on volumes of their own. At the end the good clients
must have seen nothing, the daemon must be the same process without a sanitizer report, its memory,
descriptors and threads as before, and it must stop on SIGTERM with status 0.

    run.py                          # named cases and 8 s of mutations in each mode
    run.py --seconds 600 --seed 42  # ten minutes, both modes
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "e2e"))
import harness  # noqa: E402
from harness import MIB, Daemon, Nbdkit, Process, Stack, volume  # noqa: E402


def start_daemon(stack, mode):
    # The depth is no power of two, so that chunk ids beyond it can be expressed. Small limits are reached
    # quickly; the fast heartbeat makes silent peers die within 3 s.
    files = {name: stack.path(name + ".img") for name in ("evil", "evil4k", "evilro", "good", "fio", "forbidden")}
    return Daemon(stack, [
        volume("evil", files["evil"], "16MiB"),
        volume("evil4k", files["evil4k"], "16MiB", block_size=4096),
        volume("evilro", stack.file("evilro.img", 16 * MIB), read_only="true"),
        volume("good", files["good"], "16MiB"),
        volume("fio", files["fio"], "64MiB"),
        volume("forbidden", files["forbidden"], "1MiB", allow=[{"address": "192.0.2.0/24"}]),
    ], queue_depth=100, max_io_size="64KiB", max_sessions=48, heartbeat_interval="500ms",
        always_invalidate="true" if mode == "new-rkey" else "false")


def start_fio(stack, daemon):
    """fio --verify in a loop until it gets SIGTERM from stop_fio."""
    if not shutil.which("fio") or not shutil.which("nbdkit"):
        return None
    nbdkit = Nbdkit(stack, daemon, "fio", connections=2)
    directory = stack.directory()
    script = ("trap 'stop=1' TERM; cd %s; n=0; while [ -z \"$stop\" ]; do fio --name=j --ioengine=nbd '--uri=%s' --rw=randrw "
              "--bsrange=512-64k --bs_unaligned=0 --iodepth=8 --numjobs=1 --size=4m --verify=crc32c --verify_fatal=1 "
              "--output=fio.out --randseed=$n || { cat fio.out; exit 1; }; n=$((n+1)); done; echo \"fio: $n verified rounds\"; "
              "test $n -gt 0" % (directory, nbdkit.uri))
    return Process(["bash", "-c", script], os.path.join(directory, "fio.log"))


def stop_good(process, name):
    process.expected_dead = True
    if not process.alive():
        raise AssertionError("%s ended on its own with status %d:\n%s" % (name, process.child.returncode,
                                                                           process.log()[-3000:]))
    os.kill(process.pid, signal.SIGTERM)
    status = process.wait(90)
    print(process.log().strip().splitlines()[-1] if process.log().strip() else "%s: no output" % name)
    if status:
        raise AssertionError("%s ended with status %d:\n%s" % (name, status, process.log()[-3000:]))


def run_mode(stack, mode, arguments, seconds):
    daemon = start_daemon(stack, mode)
    good = stack.add(Process([sys.executable, os.path.join(HERE, "goodclient.py"), "--port", str(daemon.port),
                              "--volume", "good"], stack.path("good.log")))
    fio = start_fio(stack, daemon)
    if fio:
        stack.add(fio)
    time.sleep(0.5)
    command = [sys.executable, os.path.join(HERE, "hostile.py"), "--port", str(daemon.port), "--mode", mode,
               "--seconds", str(seconds), "--seed", str(arguments.seed), "--pid", str(daemon.pid),
               "--heartbeat-limit", "3.0"]
    if harness.SANITIZER:
        command += ["--rss-slack", "0"]
    if arguments.long:
        command.append("--long")
    elif mode == "new-rkey" and not arguments.mode:
        # What does not depend on the mode of keys was tried before.
        command += ["--quiet"] + ["--case=" + pattern for pattern in ("rtrs-*", "rnbd-*", "iwarp-1*", "leave-*")]
    for name in arguments.skip:
        command += ["--skip", name]
    print("=== %s" % mode, flush=True)
    status = subprocess.run(command).returncode
    if not daemon.alive():
        raise AssertionError("rtrsd ended with status %d:\n%s" % (daemon.child.returncode, daemon.log()[-8000:]))
    if fio:
        stop_good(fio, "fio")
    stop_good(good, "goodclient")
    daemon.terminate()
    daemon.check_log()
    lines = daemon.log().count("\n")
    print("rtrsd wrote %d log lines, %d KiB" % (lines, len(daemon.log()) // 1024))
    if status:
        # What the daemon said is half of the finding.
        print("the end of rtrsd's log:\n" + daemon.log()[-2000:])
        raise AssertionError("hostile.py found something, see above")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=16, help="of mutations, all modes together")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--mode", choices=("plain", "new-rkey"))
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--skip", action="append", default=[])
    arguments = parser.parse_args()
    if not os.path.exists(harness.RTRSD):
        print("SKIP: no rtrsd in %s" % harness.BUILD)
        return 77
    print("seed %d" % arguments.seed)
    modes = (arguments.mode,) if arguments.mode else ("plain", "new-rkey")
    failed = False
    for mode in modes:
        base = tempfile.mkdtemp(prefix="rtrs-hostile-")
        stack = Stack(base)
        try:
            run_mode(stack, mode, arguments, arguments.seconds / len(modes))
        except AssertionError as error:
            print("FAIL %s: %s" % (mode, error))
            failed = True
        error = stack.end()
        if error:
            print("FAIL %s, at the end: %s" % (mode, error))
            failed = True
        shutil.rmtree(base, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
