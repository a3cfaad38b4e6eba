#!/usr/bin/python3
# SPDX-License-Identifier: BSD-3-Clause
"""Other people's tools through the whole stack: qemu-img, qemu-io, nbdcopy, nbdinfo, mkfs and fsck."""

import json
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import (GIB, KIB, MIB, Daemon, Nbdkit, allocated, equal, main, nbdkit_run, requires_tool, run,  # noqa: E402
                     true, volume)


def sparse_image(path, size, data_bytes, seed=1):
    """Random data in pieces of 64 KiB to 4 MiB at random places, holes between."""
    source = random.Random(seed)
    with open(path, "wb") as image:
        image.truncate(size)
        written = 0
        while written < data_bytes:
            piece = min(source.choice((64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB)), data_bytes - written)
            image.seek(source.randrange(0, (size - piece) // (4 * KIB)) * 4 * KIB)
            image.write(source.randbytes(piece))
            written += piece
        image.seek(size - 512)
        image.write(source.randbytes(512))
    return path


def same(first, second):
    run("cmp", first, second, timeout=60)


def test_qemu_img_convert_1_gib_in_and_out_compares_equal(stack):
    requires_tool("qemu-img")
    image = sparse_image(stack.path("in.img"), 1 * GIB, 150 * MIB)
    backing = stack.path("v1.img")
    daemon = Daemon(stack, [volume("v1", backing, "1GiB")])
    nbdkit = Nbdkit(stack, daemon, "v1")
    run("qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", "-W", "-m", "8", image, nbdkit.uri, timeout=120)
    run("qemu-img", "compare", "-f", "raw", "-F", "raw", image, nbdkit.uri, timeout=120)
    run("qemu-img", "convert", "-f", "raw", "-O", "raw", nbdkit.uri, stack.path("out.img"), timeout=120)
    same(image, stack.path("out.img"))
    nbdkit.terminate()
    daemon.terminate()
    same(image, backing)
    true(allocated(backing) < 200 * MIB, "the volume of 150 MiB data takes %d MiB" % (allocated(backing) // MIB))


def test_copying_a_sparse_disk_onto_a_full_volume_frees_the_space(stack):
    """Zeroes must punch holes, whatever was there before."""
    requires_tool("qemu-img", "nbdcopy")
    image = sparse_image(stack.path("in.img"), 128 * MIB, 10 * MIB)
    for tool in ("qemu-img convert -n -f raw -O raw %s %s", "nbdcopy --flush %s %s"):
        backing = stack.path("full.img")
        with open(backing, "wb") as full:
            for _ in range(128):
                full.write(os.urandom(1 * MIB))
        daemon = Daemon(stack, [volume("v1", backing)])
        nbdkit = Nbdkit(stack, daemon, "v1")
        run(*(tool % (image, nbdkit.uri)).split(), timeout=60)
        nbdkit.terminate()
        daemon.terminate()
        same(image, backing)
        true(allocated(backing) < 16 * MIB, "%s: %d MiB allocated for 10 MiB of data" % (tool.split()[0],
                                                                                         allocated(backing) // MIB))


def test_nbdcopy_both_ways_over_several_connections(stack):
    requires_tool("nbdcopy")
    image = sparse_image(stack.path("in.img"), 256 * MIB, 100 * MIB, seed=2)
    daemon = Daemon(stack, [volume("v1", stack.path("v1.img"), "256MiB")])
    nbdkit = Nbdkit(stack, daemon, "v1", connections=4)
    run("nbdcopy", "--flush", "--connections=4", image, nbdkit.uri)
    run("nbdcopy", "--connections=16", nbdkit.uri, stack.path("out.img"))
    same(image, stack.path("out.img"))
    same(image, stack.path("v1.img"))


def test_nbdcopy_between_two_volumes_of_two_daemons(stack):
    requires_tool("nbdcopy")
    image = sparse_image(stack.path("a.img"), 64 * MIB, 30 * MIB, seed=3)
    one = Daemon(stack, [volume("a", image)])
    two = Daemon(stack, [volume("b", stack.path("b.img"), "64MiB")])
    run("nbdcopy", "--flush", Nbdkit(stack, one, "a").uri, Nbdkit(stack, two, "b").uri)
    same(image, stack.path("b.img"))


def test_nbdinfo_tells_size_blocks_and_capabilities(stack):
    requires_tool("nbdinfo")
    daemon = Daemon(stack, [volume("v512", stack.path("a.img"), 10 * MIB + 512, block_size=512),
                            volume("v4k", stack.path("b.img"), "12MiB", block_size=4096)])
    for name, size, block in (("v512", 10 * MIB + 512, 512), ("v4k", 12 * MIB, 4096)):
        nbdkit = Nbdkit(stack, daemon, name)
        equal(run("nbdinfo", "--size", nbdkit.uri).strip(), str(size), "size")
        export = json.loads(run("nbdinfo", "--json", nbdkit.uri))["exports"][0]
        equal(export["export-size"], size, "size")
        equal(export["block_size_minimum"], block, "minimum block size")
        true(export["block_size_preferred"] >= 4096, "preferred block size %d" % export["block_size_preferred"])
        true(export["block_size_maximum"] >= 32 * MIB, "maximum block size %d" % export["block_size_maximum"])
        for key in ("can_flush", "can_fua", "can_trim", "can_zero", "can_multi_conn"):
            true(export[key], key)
        equal(export["is_read_only"], False, "read only")
        equal(export["can_fast_zero"], True, "fast zero")
        for capability in ("flush", "fua", "trim", "zero", "multi-conn", "fast-zero", "write"):
            run("nbdinfo", "--can", capability, nbdkit.uri)
        run("nbdinfo", "--is", "read-only", nbdkit.uri, status=2)
        nbdkit.terminate()


def test_volume_name_as_nbd_export_name(stack):
    requires_tool("nbdinfo")
    daemon = Daemon(stack, [volume("one", stack.path("1.img"), "1MiB"), volume("two", stack.path("2.img"), "2MiB")])
    nbdkit = Nbdkit(stack, daemon, None)
    equal(run("nbdinfo", "--size", nbdkit.export_uri("one")).strip(), str(1 * MIB), "size of one")
    equal(run("nbdinfo", "--size", nbdkit.export_uri("two")).strip(), str(2 * MIB), "size of two")
    run("nbdinfo", "--size", nbdkit.export_uri("three"), status=1)
    run("nbdinfo", "--size", nbdkit.uri, status=1)  # no name at all


def test_qemu_io_patterns_land_where_they_should(stack):
    requires_tool("qemu-io")
    backing = stack.path("v1.img")
    daemon = Daemon(stack, [volume("v1", backing, "64MiB")])
    nbdkit = Nbdkit(stack, daemon, "v1")
    run("qemu-io", "-f", "raw", "-c", "write -P 0x11 0 1M", "-c", "write -f -P 0x22 1M 64k", "-c", "write -P 0x33 5M 3M",
        "-c", "write -z 6M 1M", "-c", "write -z -u 7M 512k", "-c", "discard 0 64k", "-c", "aio_write -P 0x44 20M 8M",
        "-c", "aio_write -P 0x55 28M 8M", "-c", "aio_flush", "-c", "flush",
        "-c", "write -P 0x66 63M 1M", nbdkit.uri)
    expected = "read -P 0 0 64k;read -P 0x11 64k 960k;read -P 0x22 1M 64k;read -P 0x33 5M 1M;read -P 0 6M 1536k;" \
               "read -P 0x33 7680k 512k;read -P 0x44 20M 8M;read -P 0x55 28M 8M;read -P 0x66 63M 1M;read -P 0 40M 20M"
    commands = [part for command in expected.split(";") for part in ("-c", command)]
    true("Pattern verification failed" not in run("qemu-io", "-r", "-f", "raw", *commands, nbdkit.uri), "through NBD")
    nbdkit.terminate()
    daemon.terminate()  # qemu-io respects the lock
    true("Pattern verification failed" not in run("qemu-io", "-r", "-f", "raw", *commands, backing), "in the backing")


def test_qemu_img_bench(stack):
    requires_tool("qemu-img")
    daemon = Daemon(stack, [volume("v1", stack.path("v1.img"), "64MiB")])
    nbdkit = Nbdkit(stack, daemon, "v1")
    for options in (["-d", "32", "-s", "4k"], ["-w", "-d", "32", "-s", "4k"], ["-w", "-d", "16", "-s", "64k",
                    "--flush-interval", "64"], ["-d", "1", "-s", "4k"], ["-w", "-d", "8", "-s", "1M"]):
        run("qemu-img", "bench", "-f", "raw", "-c", "2000" if "1M" not in options else "200", *options, nbdkit.uri)


def test_ext4_image_survives_the_way_in_and_out(stack):
    requires_tool("mkfs.ext4", "e2fsck", "nbdcopy")
    tree = stack.directory()
    source = random.Random(4)
    for number in range(40):
        with open(os.path.join(tree, "file%d" % number), "wb") as out:
            out.write(source.randbytes(source.randrange(1, 300000)))
    for block in (1024, 4096):
        image = stack.path("ext4-%d.img" % block)
        run("mkfs.ext4", "-q", "-F", "-b", block, "-d", tree, image, "96M")
        backing = stack.path("v-%d.img" % block)
        daemon = Daemon(stack, [volume("v1", backing, os.path.getsize(image))])
        run("nbdcopy", "--flush", image, Nbdkit(stack, daemon, "v1").uri)
        run("e2fsck", "-f", "-n", backing)
        run("nbdcopy", Nbdkit(stack, daemon, "v1", access="ro").uri, stack.path("out.img"))
        run("e2fsck", "-f", "-n", stack.path("out.img"))
        same(image, backing)
        os.unlink(stack.path("out.img"))


def test_xfs_image_survives_on_a_4096_volume(stack):
    requires_tool("mkfs.xfs", "xfs_repair", "nbdcopy")
    image = stack.file("xfs.img", 320 * MIB)
    run("mkfs.xfs", "-q", "-s", "size=4096", image)
    backing = stack.path("v.img")
    daemon = Daemon(stack, [volume("v1", backing, "320MiB", block_size=4096)])
    nbdkit = Nbdkit(stack, daemon, "v1")
    run("nbdcopy", "--flush", image, nbdkit.uri)
    run("nbdcopy", nbdkit.uri, stack.path("out.img"))
    for copy in (backing, stack.path("out.img")):
        run("xfs_repair", "-n", "-f", copy)
        same(image, copy)


def test_partition_table_is_the_same_at_both_ends(stack):
    requires_tool("sfdisk", "nbdcopy")
    for label in ("dos", "gpt"):
        image = stack.file("disk-%s.img" % label, 64 * MIB)
        run("sfdisk", "-q", image, stdin="label: %s\nsize=10MiB\nsize=20MiB\n" % label)
        daemon = Daemon(stack, [volume("v1", stack.path("v-%s.img" % label), "64MiB")])
        run("nbdcopy", "--flush", image, Nbdkit(stack, daemon, "v1").uri)
        dump = [run("sfdisk", "-d", path).replace(path, "X") for path in (image, stack.path("v-%s.img" % label))]
        equal(dump[1], dump[0], "partition table")


def test_extents_add_up_and_allocated_copies_are_equal(stack):
    """nbdinfo --map and qemu-img map on a size that is no multiple of anything but the block."""
    requires_tool("nbdinfo", "qemu-img", "nbdcopy")
    size = 3 * MIB + 512
    backing = stack.file("v.img", size)
    with open(backing, "r+b") as out:
        out.write(os.urandom(100))
        out.seek(size - 10)
        out.write(os.urandom(10))
    daemon = Daemon(stack, [volume("v1", backing)])
    nbdkit = Nbdkit(stack, daemon, "v1")
    extents = json.loads(run("nbdinfo", "--map", "--json", nbdkit.uri))
    equal(sum(extent["length"] for extent in extents), size, "sum of the extents")
    extents = json.loads(run("qemu-img", "map", "--output=json", "-f", "raw", nbdkit.uri))
    equal(sum(extent["length"] for extent in extents), size, "sum of qemu-img's extents")
    run("nbdcopy", "--allocated", nbdkit.uri, stack.path("out.img"))
    same(backing, stack.path("out.img"))
    run("qemu-img", "convert", "-f", "raw", "-O", "raw", nbdkit.uri, stack.path("out2.img"))
    same(backing, stack.path("out2.img"))


def test_one_command_with_run(stack):
    """The form of the README: nbdkit -U - ... --run."""
    requires_tool("qemu-img")
    daemon = Daemon(stack, [volume("v1", stack.path("v.img"), "8MiB")])
    out = nbdkit_run(daemon, "v1", 'qemu-img info --output=json "$uri"')
    equal(json.loads(out)["virtual-size"], 8 * MIB, "virtual size")


if __name__ == "__main__":
    main(globals())
