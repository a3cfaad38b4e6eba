#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""The hostile tests' own instruments: test vectors of the wire format, and the raw client against the
Python server, right and wrong, so that a failure against rtrsd is a finding about rtrsd."""

import os
import socket
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import rawclient  # noqa: E402
import rawserver  # noqa: E402
import wire  # noqa: E402

UUID_PATH, UUID_SESSION = bytes(range(0x10, 0x20)), bytes(range(0xA0, 0xB0))


def unhex(text):
    return bytes.fromhex("".join(text.split()))


class Vectors(unittest.TestCase):
    def test_crc32c(self):
        self.assertEqual(wire.crc32c(b"123456789"), 0xE3069283)
        self.assertEqual(wire.crc32c(bytes(32)), 0x8A9136AA)
        self.assertEqual(wire.crc32c(b"\xff" * 32), 0x62A8AB43)

    def test_fpdu_with_crc(self):
        cases = (
            (wire.tagged_ulpdu(0x12A07, 0x7F0000001000, b"hello"),
             "0013c14000012a0700007f000000100068656c6c6f000000c5b54c0e"),
            (wire.tagged_ulpdu(0x12A07, 0x7F0000002000, bytes(range(20)), last=False),
             "0022814000012a0700007f0000002000000102030405060708090a0b0c0d0e0f101112130f3b9e42"),
            (wire.untagged_ulpdu(wire.OP_IMMEDIATE, wire.immediate_payload(0x1020), 1),
             "001a414800000000000000000000000100000000000010200000000064ea2d14"),
            (wire.untagged_ulpdu(wire.OP_SEND, b"RTRS info", 2),
             "001b4143000000000000000000000002000000005254525320696e666f000000229bba80"),
            (wire.untagged_ulpdu(wire.OP_SEND_INVALIDATE, b"", 1, 0x34501),
             "001241440003450100000000000000010000000058c2428a"),
            (wire.untagged_ulpdu(wire.OP_SEND_IMMEDIATE, wire.rkey_response(5, 0x12A08), 2, 0x20000005),
             "001a414c2000000500000000000000020000000004000500082a0100c64ff11e"),
        )
        for ulpdu, expected in cases:
            self.assertEqual(wire.fpdu(ulpdu, crc=True), unhex(expected))

    def test_terminate_with_header_is_understood(self):
        frame = unhex("00264147000000000000000200000001000000001100c0000005c14000012a0600007f000000100087b05ae8")
        terminate = wire.Terminate(wire.Ulpdu(frame[2:40]))
        self.assertEqual((terminate.layer_type, terminate.code, terminate.segment_length), (0x11, 0, 5))

    def test_connect_request_and_response(self):
        self.assertEqual(
            wire.connect_request(UUID_PATH, UUID_SESSION, cid_num=5),
            unhex("0000bd1b0002000005000100101112131415161718191a1b1c1d1e1fa0a1a2a3a4a5a6a7a8a9aaabacadaeaf01") + bytes(11))
        accept = wire.connect_response(512, 126976, 4096, wire.NEW_RKEY)
        self.assertEqual(accept, unhex("bd1b00020000000200f001000010000002000000") + bytes(36))
        self.assertEqual(wire.ConnectResponse(accept, False).chunk_size, 131072)
        reject = unhex("bd1b000298ff") + bytes(50)
        self.assertEqual(wire.ConnectResponse(reject, True).error, 104)

    def test_rnbd_messages(self):
        self.assertEqual(wire.info_request("clt1-srv1"), b"\0\0clt1-srv1" + bytes(261))
        self.assertEqual(wire.io_message(0, wire.WRITE, 2048, 4096, wire.SYNC) + wire.write_message(32),
                         unhex("0400000000000000000800000000000001010000001000000000000000000000 02002000"))
        self.assertEqual(
            wire.io_message(0, wire.READ, 2048, 4096, wire.SYNC)
            + wire.read_message(32, [(0xFFFF88810ABCD000, 0x20711, 4096)], wire.NEED_INVAL),
            unhex("0400000000000000000800000000000000010000001000000000000000000000"
                  "030020000100010000d0bc0a8188ffff1107020000100000"))
        self.assertEqual(wire.open_response(0, 2097152, 2560, 0, 4194303, 4096, 0, 4096, 512, 128, 0, 3),
                         unhex("03000000000000000000200000000000000a000000000000ffff3f0000100000"
                               "000000000010000280000000000300000000000000000000"))

    def test_immediates(self):
        self.assertEqual(wire.request_imm(128, 127, 131071), 0x0FE1FFFF)
        self.assertEqual(wire.request_imm(500, 499, 4128), 0x0F981020)
        self.assertEqual(wire.request_imm(1024, 1023, 72), 0x0FFC0048)
        self.assertEqual(wire.request_imm(1, 0, 100), 100)

    def test_leaky_answers_are_noticed(self):
        good = wire.open_response()
        wire.OpenResponse(good)
        for at in (2, 44, 46, 55):
            with self.assertRaises(wire.WireViolation):
                wire.OpenResponse(good[:at] + b"\x01" + good[at + 1:])


class AgainstPythonServer(unittest.TestCase):
    flags, crc = 0, False

    def setUp(self):
        class Server(rawserver.Server):
            flags = self.flags
        self.server = Server()
        self.session = rawclient.Session(("127.0.0.1", self.server.port), connections=3, crc=self.crc, timeout=5)

    def tearDown(self):
        self.session.close()
        self.server.stop()
        self.assertEqual(self.server.violations, [])

    def test_everything_right(self):
        session = self.session.establish()
        session.sess_info()
        volume = session.open("v1")
        self.assertEqual(volume.size, self.server.volume_size)
        data = os.urandom(131072)
        session.write(volume, 4096, data)
        self.assertEqual(session.read(volume, 4096, len(data), cid=2), data)
        self.assertEqual(session.read(volume, 4096, 512, need_inval=False), data[:512])
        session.flush(volume)
        session.discard(volume, 4096, 8192)
        session.write_zeroes(volume, 12288, 1024, wire.NOUNMAP)
        self.assertEqual(session.read(volume, 4096, 16384), bytes(9216) + data[9216:16384])
        session.heartbeat()
        images = [session.post(session.io_write_image(volume, i * 4096, bytes((i,)) * 4096), 1 + i % 2)
                  for i in range(session.queue_depth)]
        for image in images:
            self.assertEqual(session.wait(image).error, 0)
        self.assertEqual(session.read(volume, 5 * 4096, 4096), b"\5" * 4096)
        with self.assertRaises(rawclient.RequestFailed):
            session.read(volume, volume.size, 4096)
        session.close_device(volume)


class AgainstPythonServerCrc(AgainstPythonServer):
    crc = True


class AgainstPythonServerNewRkey(AgainstPythonServer):
    flags = wire.NEW_RKEY


class Faults(unittest.TestCase):
    """Each fault of the server must be noticed by the raw client."""

    def expect_violation(self, server_class):
        server = server_class()
        try:
            with rawclient.Session(("127.0.0.1", server.port), timeout=2) as session:
                session.establish()
                session.sess_info()
                volume = session.open("v1")
                with self.assertRaises(wire.WireViolation):
                    session.read(volume, 0, 4096)
        finally:
            server.stop()

    def test_answer_for_an_unused_id(self):
        class Server(rawserver.Server):
            def respond(self, connection, chunk, error, answer, descriptor, flags):
                chunk = 9 if len(answer) == 4096 else chunk
                super().respond(connection, chunk, error, answer, descriptor, flags)
        self.expect_violation(Server)

    def test_missing_invalidation(self):
        class Server(rawserver.Server):
            def respond(self, connection, chunk, error, answer, descriptor, flags):
                if len(answer) == 4096:
                    connection.send_raw(connection.immediate(wire.imm(wire.IMM_IO_RSP_INV, chunk)))
                else:
                    super().respond(connection, chunk, error, answer, descriptor, flags)
        self.expect_violation(Server)

    def test_write_beyond_the_read_buffer(self):
        class Server(rawserver.Server):
            def execute(self, connection, is_read, user, data, descriptor):
                error, answer = super().execute(connection, is_read, user, data, descriptor)
                return error, answer + bytes(4) if len(answer) == 4096 else answer
        self.expect_violation(Server)

    def test_spoiled_msn(self):
        class Server(rawserver.Server):
            def on_heartbeat(self, connection):
                connection.msn_out += 1
                super().on_heartbeat(connection)
        server = Server()
        with rawclient.Session(("127.0.0.1", server.port), timeout=2) as session:
            session.establish()
            with self.assertRaises(wire.WireViolation):
                session.heartbeat()
        server.stop()

    def test_reject_carries_errno(self):
        class Server(rawserver.Server):
            def on_connect(self, connection, cid):
                self.mpa_reject(connection, wire.connect_response(0, 0, 0, 0, error=6))
        server = Server()
        session = rawclient.Session(("127.0.0.1", server.port), timeout=2)
        with self.assertRaises(rawclient.Rejected) as caught:
            session.establish()
        self.assertEqual(caught.exception.error, 6)
        server.stop()

    def test_terminate_is_reported(self):
        class Server(rawserver.Server):
            def on_heartbeat(self, connection):
                connection.send_raw(wire.fpdu(wire.terminate_ulpdu(0x11, 2)))
                connection.socket.shutdown(socket.SHUT_WR)
                connection.exactly(1)  # the client answers the FIN
        server = Server()
        with rawclient.Session(("127.0.0.1", server.port), timeout=2) as session:
            session.establish()
            with self.assertRaises(rawclient.ConnectionClosed) as caught:
                session.heartbeat()
            self.assertEqual((caught.exception.terminate.layer_type, caught.exception.terminate.code), (0x11, 2))
        server.stop()


if __name__ == "__main__":
    unittest.main()
