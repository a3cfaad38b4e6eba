# SPDX-License-Identifier: BSD-3-Clause
"""An RTRS/RNBD server over iWARP in Python: one thread per connection, volumes in memory.

It serves two purposes: rawclient.py is tested against it, and hostile_server.py overrides single steps of
it to see what a client makes of a server that misbehaves. It trusts its client; ours is what is tested.
"""

import socket
import struct
import threading

import wire
from wire import check


class Stop(Exception):
    """Ends a connection: the peer went away, or a faulty step wants it closed."""


class ServerConnection:
    def __init__(self, server, sock):
        self.server, self.socket = server, sock
        self.msn_out, self.msn_in, self.crc = 1, 1, False
        self.lock = threading.Lock()
        self.path = None
        self.cid = None

    def exactly(self, count):
        data = b""
        while len(data) < count:
            try:
                piece = self.socket.recv(count - len(data))
            except OSError:
                piece = b""
            if not piece:
                raise Stop
            data += piece
        return data

    def send_raw(self, data):
        try:
            self.socket.sendall(data)
        except OSError:
            raise Stop from None

    def untagged(self, opcode, payload, ulp=0):
        frame = wire.fpdu(wire.untagged_ulpdu(opcode, payload, self.msn_out, ulp), self.crc)
        self.msn_out += 1
        return frame

    def write_frames(self, stag, to, payload):
        frames = b""
        for at in range(0, len(payload), wire.PAYLOAD_MAX):
            piece = payload[at:at + wire.PAYLOAD_MAX]
            frames += wire.fpdu(wire.tagged_ulpdu(stag, to + at, piece, at + len(piece) == len(payload)), self.crc)
        return frames

    def immediate(self, value):
        return self.untagged(wire.OP_IMMEDIATE, wire.immediate_payload(value))

    def next_ulpdu(self):
        length = struct.unpack(">H", self.exactly(2))[0]
        rest = self.exactly(length + (-(2 + length) % 4) + 4)
        if self.crc:
            body = struct.pack(">H", length) + rest[:-4]
            check(struct.unpack("<I", rest[-4:])[0] == wire.crc32c(body), "CRC of a client's FPDU")
        else:
            check(rest[-4:] == b"\0\0\0\0", "CRC field of a client's FPDU although CRC is off")
        return wire.Ulpdu(rest[:length])


class Path:
    def __init__(self, server, cid_num):
        self.cid_num, self.connections = cid_num, {}
        self.chunks = [bytearray(server.chunk_size) for _ in range(server.queue_depth)]
        self.keys = [((i + 1) << 8) | 7 for i in range(server.queue_depth)]
        self.devices = []


class Server:
    queue_depth, max_io_size, max_hdr_size, flags = 32, 131072, 4096, 0
    volume_size, block_size = 16 << 20, 512

    def __init__(self, port=0, host="127.0.0.1"):
        self.chunk_size = self.max_io_size + self.max_hdr_size
        self.disk = bytearray(self.volume_size)
        self.paths, self.violations = {}, []
        self.listener = socket.create_server((host, port))
        self.port = self.listener.getsockname()[1]
        self.running = True
        self.lock = threading.Lock()
        self.sockets = []
        self.thread = threading.Thread(target=self.accept_loop, daemon=True)
        self.thread.start()

    def stop(self):
        self.running = False
        self.listener.close()
        for sock in self.sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def accept_loop(self):
        while self.running:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sockets.append(sock)
            threading.Thread(target=self.connection_thread, args=(sock,), daemon=True).start()

    def connection_thread(self, sock):
        connection = ServerConnection(self, sock)
        try:
            self.serve(connection)
        except Stop:
            pass
        except wire.WireViolation as violation:
            self.violations.append(str(violation))
        finally:
            # All connections of a path live and die together.
            for other in list(connection.path.connections.values()) if connection.path else [connection]:
                try:
                    other.socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            sock.close()

    # --- steps, each of which a subclass may do wrong

    def mpa_reply(self, connection, private):
        flags = wire.MPA_CRC if connection.crc else 0
        connection.send_raw(wire.mpa_frame(private, wire.MPA_REPLY_KEY, flags))

    def mpa_reject(self, connection, private):
        flags = wire.MPA_REJECT | (wire.MPA_CRC if connection.crc else 0)
        connection.send_raw(wire.mpa_frame(private, wire.MPA_REPLY_KEY, flags))
        raise Stop

    def on_connect(self, connection, cid):
        self.mpa_reply(connection, wire.connect_response(self.queue_depth, self.max_io_size, self.max_hdr_size,
                                                         self.flags))

    def on_info(self, connection, name):
        connection.send_raw(connection.untagged(wire.OP_SEND, self.info_payload(connection)))

    def info_payload(self, connection):
        path = connection.path
        return wire.info_response([(i << 32, path.keys[i], self.chunk_size) for i in range(self.queue_depth)])

    def on_heartbeat(self, connection):
        connection.send_raw(connection.immediate(wire.imm(wire.IMM_HEARTBEAT_ACK)))

    def on_request(self, connection, chunk, is_read, user, data, descriptor, flags):
        error, answer = self.execute(connection, is_read, user, data, descriptor)
        self.respond(connection, chunk, error, answer, descriptor, flags)

    def respond(self, connection, chunk, error, answer, descriptor, flags):
        frames = b""
        invalidate = descriptor is not None and flags & wire.NEED_INVAL
        if descriptor is not None and error == 0:
            frames += connection.write_frames(descriptor[1], descriptor[0], answer)
        if invalidate:
            frames += connection.untagged(wire.OP_SEND_INVALIDATE, b"", descriptor[1])
        kind = wire.IMM_IO_RSP_INV if invalidate else wire.IMM_IO_RSP
        value = wire.imm(kind, error << 19 | chunk)
        if self.flags & wire.NEW_RKEY:
            keys = connection.path.keys
            keys[chunk] = (keys[chunk] & ~0xFF) | ((keys[chunk] + 1) & 0xFF)
            frames += connection.untagged(wire.OP_SEND_IMMEDIATE, wire.rkey_response(chunk, keys[chunk]), value)
        else:
            frames += connection.immediate(value)
        connection.send_raw(frames)

    def open_payload(self, device):
        return wire.open_response(device, self.volume_size // 512, logical=self.block_size)

    def execute(self, connection, is_read, user, data, descriptor):
        """errno and what a read gets."""
        kind = struct.unpack_from("<H", user)[0]
        if kind == wire.SESS_INFO:
            return 0, wire.sess_info(2, wire.SESS_INFO_RSP)
        if kind == wire.OPEN:
            return 0, self.open_payload(0)
        if kind == wire.CLOSE:
            return 0, b""
        check(kind == wire.IO, "RNBD message type %d" % kind)
        _, _, _, sector, rw, size, _ = struct.unpack_from("<HHIQIIH", user)
        op, at = rw & 0xFF, sector * 512
        if op != wire.FLUSH and at + size > len(self.disk):
            return 22, b""
        with self.lock:
            if op == wire.READ:
                return 0, bytes(self.disk[at:at + size])
            if op == wire.WRITE:
                self.disk[at:at + size] = data
            elif op in (wire.DISCARD, wire.WRITE_ZEROES):
                self.disk[at:at + size] = bytes(size)
        return 0, b""

    # --- the machine

    def serve(self, connection):
        header = connection.exactly(20)
        check(header[:16] == wire.MPA_REQUEST_KEY, "MPA request key")
        flags, revision, length = struct.unpack(">BBH", header[16:])
        check(revision == 1 and flags & ~wire.MPA_CRC == 0, "MPA request flags %02x revision %d" % (flags, revision))
        private = connection.exactly(length)
        check(length >= 56, "connect request of %d bytes" % length)
        connection.crc = bool(flags & wire.MPA_CRC)
        (cma, ip, magic, version, connection.cid, cid_num,
         recon) = struct.unpack("<BBHHHHH", private[:12])
        check((cma, ip, magic, version) == (0, 0, wire.RTRS_MAGIC, wire.RTRS_VERSION), "connect request header")
        check(connection.cid < cid_num <= 4096 and recon >= 1, "cid %d of %d, recon %d" % (connection.cid, cid_num,
                                                                                         recon))
        check(private[44] & 0xFE == 0 and not any(private[45:56]), "reserved bytes of the connect request")
        with self.lock:
            path = self.paths.get(private[12:28])
            if path is None or connection.cid == 0:
                path = self.paths[private[12:28]] = Path(self, cid_num)
            path.connections[connection.cid] = connection
        connection.path = path
        self.on_connect(connection, connection.cid)
        partial = b""
        while True:
            ulpdu = connection.next_ulpdu()
            if ulpdu.tagged:
                check(ulpdu.opcode == wire.OP_WRITE, "tagged opcode %d" % ulpdu.opcode)
                index, at = ulpdu.to >> 32, ulpdu.to & 0xFFFFFFFF
                check(index < self.queue_depth and ulpdu.stag == path.keys[index], "STag %08x at %x" % (ulpdu.stag,
                                                                                                     ulpdu.to))
                check(at + len(ulpdu.payload) <= self.chunk_size, "write beyond the chunk")
                path.chunks[index][at:at + len(ulpdu.payload)] = ulpdu.payload
                continue
            if ulpdu.opcode == wire.OP_TERMINATE:
                raise Stop
            check(ulpdu.qn == 0 and ulpdu.msn == connection.msn_in, "QN %d MSN %d" % (ulpdu.qn, ulpdu.msn))
            check(ulpdu.mo == len(partial), "MO")
            partial += ulpdu.payload
            if not ulpdu.last:
                continue
            message, partial = partial, b""
            connection.msn_in += 1
            if ulpdu.opcode == wire.OP_SEND:
                check(len(message) == 272 and connection.cid == 0, "Send of %d bytes" % len(message))
                check(len(path.connections) == path.cid_num, "INFO_REQ before all connections are there")
                name = message[2:257].split(b"\0")[0]
                check(name and b"/" not in name and b"." not in name, "session name %r" % name)
                check(not any(message[2 + len(name):]), "INFO_REQ is not padded with zeros")
                self.on_info(connection, name)
                continue
            check(ulpdu.opcode == wire.OP_IMMEDIATE and len(message) == 8, "opcode %d" % ulpdu.opcode)
            value, rest = struct.unpack(">II", message)
            check(rest == 0, "second word of Immediate Data")
            self.on_immediate(connection, value)

    def on_immediate(self, connection, value):
        kind, payload = value >> 28, value & 0x0FFFFFFF
        if kind == wire.IMM_HEARTBEAT:
            self.on_heartbeat(connection)
            return
        if kind == wire.IMM_HEARTBEAT_ACK:
            return
        check(kind == wire.IMM_IO_REQ, "immediate of type %d" % kind)
        shift = 28 - wire.bits(self.queue_depth)
        chunk, offset = payload >> shift, payload & ((1 << shift) - 1)
        check(chunk < self.queue_depth and offset + 4 <= self.chunk_size, "chunk %d offset %d" % (chunk, offset))
        memory = connection.path.chunks[chunk]
        kind, usr_len = struct.unpack_from("<HH", memory, offset)
        check(usr_len <= offset, "usr_len %d at offset %d" % (usr_len, offset))
        user, data = bytes(memory[offset - usr_len:offset]), bytes(memory[:offset - usr_len])
        descriptor, flags = None, 0
        if kind == wire.RTRS_READ:
            flags, count = struct.unpack_from("<HH", memory, offset + 4)
            check(count <= 1, "READ with %d descriptors" % count)
            check(count or not flags & wire.NEED_INVAL, "NEED_INVAL without a descriptor")
            if count:
                descriptor = struct.unpack_from("<QII", memory, offset + 8)
                check(descriptor[2] == len(data), "descriptor of %d for %d bytes" % (descriptor[2], len(data)))
        else:
            check(kind == wire.RTRS_WRITE, "RTRS message type %d" % kind)
        self.on_request(connection, chunk, kind == wire.RTRS_READ, user, data, descriptor, flags)
