#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""rtrsd as a process: exit codes, signals, what it tells the service manager, and how it stops.

Usage: process_test.py RTRSD PLUGIN
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

RTRSD = PLUGIN = None
SLOW = 20  # seconds, more than anything here takes on a busy machine


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Notifications:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, directory):
        self.path = os.path.join(directory, "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(SLOW)
        self.seen = ""

    def wait_for(self, text):
        while text not in self.seen:
            self.seen += self.socket.recv(4096).decode() + "\n"

    def close(self):
        self.socket.close()


class ProcessTest(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="rtrsd-test-", dir="/var/tmp")
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.notifications = Notifications(self.directory)
        self.addCleanup(self.notifications.close)
        self.port = free_port()

    def path(self, name):
        return os.path.join(self.directory, name)

    def file(self, name, size):
        with open(self.path(name), "wb") as image:
            image.truncate(size)
        return self.path(name)

    def write_config(self, volumes, extra=""):
        """volumes: (name, path, further lines) each."""
        text = f"listen: tcp:127.0.0.1:{self.port}\nreactors: 2\n{extra}volumes:\n"
        for name, path, *more in volumes:
            text += f"  - name: {name}\n    path: {path}\n"
            text += "".join(f"    {line}\n" for line in more)
        with open(self.path("rtrsd.yaml"), "w", encoding="utf-8") as config:
            config.write(text)
        return self.path("rtrsd.yaml")

    def start(self, *arguments):
        log = open(self.path("log"), "w", encoding="utf-8")  # pylint: disable=consider-using-with
        self.addCleanup(log.close)
        environment = dict(os.environ, NOTIFY_SOCKET=self.notifications.path)
        environment.pop("JOURNAL_STREAM", None)
        daemon = subprocess.Popen(  # pylint: disable=consider-using-with
            [RTRSD, *arguments], stdout=subprocess.DEVNULL, stderr=log, env=environment)

        def end():
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
        self.addCleanup(end)
        return daemon

    def log(self):
        with open(self.path("log"), encoding="utf-8") as log:
            return log.read()

    def serve(self, volumes, extra=""):
        daemon = self.start("-c", self.write_config(volumes, extra))
        self.notifications.wait_for("READY=1")
        return daemon

    def fails(self, status, *arguments):
        """Runs rtrsd until it ends by itself."""
        daemon = self.start(*arguments)
        self.assertEqual(daemon.wait(SLOW), status, self.log())
        return self.log()

    def test_version_and_help_end_with_another_status_than_0(self):
        for option in ("-V", "--version", "-h", "--help"):
            done = subprocess.run([RTRSD, option], capture_output=True, text=True, check=False, timeout=SLOW)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertIn("rtrsd", done.stdout)

    def test_wrong_command_line_starts_something(self):
        text = self.fails(64, "--verbos")
        self.assertIn("'--verbos'", text)
        self.assertIn("--help", text)

    def test_wrong_configuration_starts_something(self):
        config = self.write_config([("v", self.file("v", 65536), "pth: x")])
        self.assertIn("rtrsd.yaml:", self.fails(78, "-c", config))
        self.assertIn("no-such-file", self.fails(78, "-c", self.path("no-such-file")))
        config = self.write_config([("v", self.file("v", 65536))], "max-memory: 1MiB\n")
        self.assertIn("max-memory", self.fails(78, "-c", config))

    def test_volume_that_cannot_be_opened_is_left_out_silently(self):
        config = self.write_config([("good", self.file("good", 65536)),
                                    ("odd", self.file("odd", 65537)),
                                    ("missing", self.path("missing"))])
        text = self.fails(66, "-c", config)
        self.assertIn("volume odd: ", text)
        self.assertIn("65537 bytes", text)
        self.assertIn("volume missing: ", text)
        done = subprocess.run([RTRSD, "--check-config", "-c", config], capture_output=True, text=True, check=False,
                              timeout=SLOW)
        self.assertEqual(done.returncode, 66)
        self.assertIn("rtrsd.yaml:6: volume odd: ", done.stderr)
        self.assertIn("rtrsd.yaml:8: volume missing: ", done.stderr)
        self.assertNotIn("good", done.stderr)

    def test_one_file_in_two_volumes_passes_the_check(self):
        image = self.file("image", 65536)
        os.link(image, self.path("hard"))
        config = self.write_config([("one", image), ("two", self.path("hard"))])
        self.assertIn("already served as volume one", self.fails(66, "-c", config))
        done = subprocess.run([RTRSD, "--check-config", "-c", config], capture_output=True, text=True, check=False,
                              timeout=SLOW)
        self.assertEqual(done.returncode, 66)
        self.assertIn("already served as volume one", done.stderr)

    def test_second_daemon_takes_the_volume_or_the_port(self):
        volumes = [("v", self.file("v", 65536))]
        self.serve(volumes)
        config = self.path("rtrsd.yaml")
        self.assertIn("another process", self.fails(66, "-c", config))
        os.rename(config, self.path("other.yaml"))
        config = self.write_config([("w", self.file("w", 65536))])
        self.assertIn("another rtrsd, has the port", self.fails(69, "-c", config))

    def test_address_of_nobody_is_listened_on(self):
        config = self.write_config([("v", self.file("v", 65536))])
        with open(config, encoding="utf-8") as given:
            text = given.read().replace("127.0.0.1", "192.0.2.1")
        with open(config, "w", encoding="utf-8") as changed:
            changed.write(text)
        self.assertIn("no interface of this host", self.fails(69, "-c", config))

    def test_sighup_ends_it(self):
        daemon = self.serve([("v", self.file("v", 65536))])
        daemon.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + SLOW
        while "SIGHUP" not in self.log() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertIn("not available yet", self.log())
        self.assertIsNone(daemon.poll())
        daemon.terminate()
        self.assertEqual(daemon.wait(SLOW), 0)

    def test_stop_without_clients_takes_long_or_is_not_told(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            self.notifications.seen = ""
            daemon = self.serve([("v", self.path("v"), "size: 1MiB")])
            self.assertIn("STATUS=serving 1 volume", self.notifications.seen)
            begin = time.monotonic()
            daemon.send_signal(number)
            self.assertEqual(daemon.wait(SLOW), 0, self.log())
            self.assertLess(time.monotonic() - begin, 5)
            self.notifications.wait_for("STOPPING=1")
            self.assertIn("EXTEND_TIMEOUT_USEC=", self.notifications.seen)

    def test_hundred_idle_volumes_take_memory_or_cpu(self):
        volumes = [(f"v{i}", self.path(f"v{i}"), "size: 1GiB") for i in range(100)]
        daemon = self.serve(volumes)
        with open(f"/proc/{daemon.pid}/status", encoding="utf-8") as status:
            resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        with open(f"/proc/{daemon.pid}/maps", encoding="utf-8") as maps:
            sanitized = "libasan" in (text := maps.read()) or "libtsan" in text
        if not sanitized:
            self.assertLess(resident, 64 * 1024)

        def ticks():
            with open(f"/proc/{daemon.pid}/stat", encoding="utf-8") as stat:
                fields = stat.read().rsplit(")", 1)[1].split()
            return int(fields[11]) + int(fields[12])
        before = ticks()
        time.sleep(3)
        self.assertLess(ticks() - before, 0.03 * os.sysconf("SC_CLK_TCK") + 2)
        self.assertNotIn("more like it", self.log())
        daemon.terminate()
        self.assertEqual(daemon.wait(SLOW), 0)

    @staticmethod
    def unmount(where):
        # The last file is closed a moment after its process has gone.
        for _ in range(100):
            if subprocess.run(["umount", where], check=False, capture_output=True).returncode == 0:
                return
            time.sleep(0.1)

    def nbdkit(self, volume):
        sock = self.path(volume + ".sock")
        server = subprocess.Popen(  # pylint: disable=consider-using-with
            ["nbdkit", "-f", "--exit-with-parent", "-U", sock, PLUGIN, f"server=tcp:127.0.0.1:{self.port}",
             f"volume={volume}"], stderr=subprocess.DEVNULL)

        def end():
            server.kill()
            server.wait()
        self.addCleanup(end)
        deadline = time.monotonic() + SLOW
        while not os.path.exists(sock) and time.monotonic() < deadline:
            time.sleep(0.02)
        return f"nbd+unix:///?socket={sock}"

    def test_volume_that_hangs_holds_up_others_or_the_stop(self):
        for tool in ("nbdkit", "qemu-io", "mkfs.ext4", "mount", "fsfreeze"):
            if shutil.which(tool) is None:
                self.skipTest(f"{tool} is missing")
        linked = subprocess.run(["ldd", PLUGIN], check=False, capture_output=True, text=True).stdout
        if "libasan" in linked or "libtsan" in linked:
            self.skipTest("nbdkit cannot load a sanitizer's build; the end-to-end tests can make it")
        image, where = self.file("fs", 64 << 20), self.path("mnt")
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        os.mkdir(where)
        if subprocess.run(["mount", "-o", "loop", image, where], check=False, capture_output=True).returncode != 0:
            self.skipTest("no right to mount a loop device")
        self.addCleanup(self.unmount, where)
        # A filesystem that is frozen is a disk that hangs, for those who write to it.
        stuck = os.path.join(where, "v")
        with open(stuck, "wb") as volume:
            volume.truncate(16 << 20)
        daemon = self.serve([("stuck", stuck), ("good", self.path("good"), "size: 16MiB")],
                            "drain-timeout: 4s\n")
        stuck_uri, good_uri = self.nbdkit("stuck"), self.nbdkit("good")
        subprocess.run(["fsfreeze", "-f", where], check=True)
        thawed = []

        def thaw():
            if not thawed:
                subprocess.run(["fsfreeze", "-u", where], check=False)
                thawed.append(True)
        self.addCleanup(thaw)
        writes = [word for block in range(16) for word in ("-c", f"aio_write {block * 64}k 4k")]
        client = subprocess.Popen(  # pylint: disable=consider-using-with
            ["qemu-io", "-f", "raw", stuck_uri, *writes, "-c", "aio_flush"], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        self.addCleanup(client.wait)
        self.addCleanup(client.kill)
        time.sleep(1)
        begin = time.monotonic()
        subprocess.run(["qemu-io", "-f", "raw", good_uri, "-c", "write -P 7 0 1M", "-c", "read -P 7 0 1M",
                        "-c", "flush", "-c", "discard 0 64k", "-c", "write -z 64k 64k"],
                       check=True, capture_output=True, timeout=SLOW)
        self.assertLess(time.monotonic() - begin, 10)
        daemon.terminate()
        # Frozen as it is, the process cannot go before its last call has come back; so thaw when it has
        # said what there is to say.
        self.notifications.wait_for("STATUS=stopped before its requests ended: volume stuck (")
        thaw()
        self.assertEqual(daemon.wait(SLOW), 75, self.log())
        self.assertIn("drain-timeout is over, leaving at once; not ended: volume stuck (", self.log())
        self.assertNotIn("volume good (", self.log())


if __name__ == "__main__":
    RTRSD, PLUGIN = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1], verbosity=2)
