// SPDX-License-Identifier: BSD-3-Clause
#include <doctest/doctest.h>

#include <chrono>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "config/config.h"

using namespace rtrsnbd::config;
using namespace std::chrono_literals;

namespace {

// The complaint about text, empty if there is none.
std::string complaint(std::string_view text) {
  const auto config = parse(text, "F");
  return config ? std::string() : config.error().text;
}

const std::string volume = "volumes:\n  - name: a\n    path: /a\n";

std::string with_volume_line(std::string_view line) {
  return volume + "    " + std::string(line) + "\n";
}

struct BadInput {
  std::string_view what;
  std::string text;
  std::string message;
};

}  // namespace

TEST_CASE("defaults are those of the header") {
  const auto config = parse(volume, "F");
  REQUIRE(config);
  REQUIRE(config->listen.size() == 1);
  CHECK(config->listen[0].scheme == "tcp");
  CHECK(config->listen[0].host.empty());
  CHECK(config->listen[0].port == 1234);
  CHECK(config->reactors == 0);
  CHECK(config->queue_depth == 128);
  CHECK(config->max_io_size == 262144);
  CHECK(config->memory_max == uint64_t{4} << 30);
  CHECK(config->heartbeat_interval == 5s);
  CHECK(config->drain_timeout == 30s);
  CHECK(config->log_level == "info");
  REQUIRE(config->volumes.size() == 1);
  CHECK(config->volumes[0].name == "a");
  CHECK(config->volumes[0].path == "/a");
  CHECK(config->volumes[0].size == 0);
  CHECK_FALSE(config->volumes[0].read_only);
  CHECK(config->volumes[0].line == 2);
}

TEST_CASE("every key is read") {
  const auto config = parse(
      "listen: [tcp:127.0.0.1:4000, 'tcp://[::1]', tcp:*:4001, tcp:store-1.example]\n"
      "reactors: 3\nqueue-depth: 64\nmax-io-size: 1MiB\nmax-sessions: 7\nmax-memory: 1 GiB\n"
      "always-invalidate: true\nheartbeat-interval: 500ms\nheartbeat-missed-max: 9\ncrc: off\n"
      "drain-timeout: 1min\nlog-level: debug\n"
      "volumes:\n"
      "- {name: vg0/lv1, path: /dev//vg0/./lv1, size: 10GiB, read-only: true, block-size: 4096, "
      "direct: on}\n"
      "- name: b\n  path: \"/b c\"\n  allow:\n  - address: 192.0.2.0/24\n    session: web-*\n  - "
      "address: ::1\n",
      "F");
  REQUIRE_MESSAGE(config, config.error().text);
  REQUIRE(config->listen.size() == 4);
  CHECK(config->listen[0].host == "127.0.0.1");
  CHECK(config->listen[0].port == 4000);
  CHECK(config->listen[1].host == "::1");
  CHECK(config->listen[1].port == 1234);
  CHECK(config->listen[1].text == "tcp://[::1]");
  CHECK(config->listen[2].host.empty());
  CHECK(config->listen[2].port == 4001);
  CHECK(config->listen[3].host == "store-1.example");
  CHECK(config->reactors == 3);
  CHECK(config->queue_depth == 64);
  CHECK(config->max_io_size == 1 << 20);
  CHECK(config->sessions_max == 7);
  CHECK(config->memory_max == 1 << 30);
  CHECK(config->always_invalidate);
  CHECK(config->heartbeat_interval == 500ms);
  CHECK(config->heartbeat_missed_max == 9);
  CHECK(config->crc == Crc::off);
  CHECK(config->drain_timeout == 60s);
  CHECK(config->log_level == "debug");
  REQUIRE(config->volumes.size() == 2);
  const Volume& first = config->volumes[0];
  CHECK(first.name == "vg0/lv1");
  CHECK(first.path == "/dev/vg0/lv1");
  CHECK(first.size == uint64_t{10} << 30);
  CHECK(first.read_only);
  CHECK(first.block_size == 4096);
  CHECK(first.direct == Direct::on);
  CHECK(first.allow.empty());
  const Volume& second = config->volumes[1];
  CHECK(second.line == 15);
  CHECK(second.path == "/b c");
  REQUIRE(second.allow.size() == 2);
  CHECK(second.allow[0].address == "192.0.2.0/24");
  CHECK(second.allow[0].session == "web-*");
  CHECK(second.allow[1].address == "::1");
  CHECK(second.allow[1].session.empty());
}

TEST_CASE("harmless differences of the text are accepted") {
  CHECK(complaint("\xef\xbb\xbf" + volume) == "");
  CHECK(complaint("volumes:\r\n  - name: a\r\n    path: /a\r\n") == "");
  CHECK(complaint("---\n" + volume + "...\n") == "");
  CHECK(complaint("reactors: 1\t# a tab before a comment\n" + volume) == "");
  CHECK(complaint("volumes:\n- name: 010\n  path: /a\n- name: yes\n  path: /b\n") == "");
}

TEST_CASE("bad input is refused with file, line, key and what would be right") {
  const std::vector<BadInput> table = {
      // Keys
      {"key with a slip", "volumes:\n  - name: a\n    pth: /a\n",
       "F:3: volumes[0].pth: unknown key; did you mean \"path\"?\nF:2: volumes[0].path: is "
       "missing"},
      {"underscore", "queue_depth: 4\n" + volume,
       "F:1: queue_depth: unknown key; did you mean \"queue-depth\"?"},
      {"capitals", "Log-Level: info\n" + volume,
       "F:1: Log-Level: unknown key; did you mean \"log-level\"?"},
      {"nothing near", "\n\nzebra: 4\n" + volume, "F:3: zebra: unknown key"},
      {"volume key at the top", "size: 4096\n" + volume,
       "F:1: size: unknown key here; it belongs to an entry of \"volumes\""},
      {"top key in a volume", with_volume_line("reactors: 2"),
       "F:4: volumes[0].reactors: unknown key here; it belongs to the top level"},
      {"allow key in a volume", with_volume_line("session: x"),
       "F:4: volumes[0].session: unknown key here; it belongs to an entry of a volume's \"allow\""},
      {"key twice", "crc: on\n" + volume + "crc: off\n",
       "F:5: crc: given twice; the first is in line 1"},
      {"volume key twice", with_volume_line("path: /b"),
       "F:4: volumes[0].path: given twice; the first is in line 3"},
      {"merge key", with_volume_line("<<: {size: 4096}"),
       "F:4: volumes[0].<<: merge keys are not supported here"},
      {"odd key", "\"a\\nb\": 1\n" + volume, "F:1: \"a?b\": unknown key"},
      {"number as root", "5\n",
       "F:1: is a single value; accepted: a map with the keys listen, reactors, queue-depth, "
       "max-io-size, max-sessions, max-memory, always-invalidate, heartbeat-interval, "
       "heartbeat-missed-max, crc, "
       "drain-timeout, log-level, volumes"},
      {"list as key", "? [a]\n: 1\n", "F:1: a key must be a word, not a list or a map"},
      {"no key", ": 1\n", "F:1: a key must be a word"},
      // Kinds
      {"no value", "reactors:\n" + volume,
       "F:1: reactors: is nothing; accepted: a number from 0 to 64"},
      {"tilde", "reactors: ~\n" + volume,
       "F:1: reactors: is nothing; accepted: a number from 0 to 64"},
      {"list for number", "reactors: [1]\n" + volume,
       "F:1: reactors: is a list; accepted: a number from 0 to 64"},
      {"map for size", "max-memory: {a: 1}\n" + volume,
       "F:1: max-memory: is a map; accepted: a size as 4096, 128KiB or 10GiB"},
      {"map for volumes", "volumes: {name: a, path: /a}\n",
       "F:1: volumes: is a map; accepted: a list of volumes, each with name and path"},
      {"word as volume", "volumes:\n  - a\n",
       "F:2: volumes[0]: is a single value; accepted: a map with the keys name, path, size, "
       "read-only, "
       "block-size, direct, allow"},
      {"quoted number", "reactors: \"2\"\n" + volume,
       "F:1: reactors: \"2\": write it without quotes; accepted: a number from 0 to 64"},
      // Numbers
      {"octal", "queue-depth: 010\n" + volume,
       "F:1: queue-depth: \"010\": accepted: a number from 1 to 65535, without leading zeros"},
      {"hexadecimal", "queue-depth: 0x10\n" + volume,
       "F:1: queue-depth: \"0x10\": accepted: a number from 1 to 65535"},
      {"exponent", "queue-depth: 1e3\n" + volume,
       "F:1: queue-depth: \"1e3\": accepted: a number from 1 to 65535"},
      {"negative", "queue-depth: -1\n" + volume,
       "F:1: queue-depth: \"-1\": accepted: a number from 1 to 65535"},
      {"2^64", "queue-depth: 18446744073709551616\n" + volume,
       "F:1: queue-depth: \"18446744073709551616\": accepted: a number from 1 to 65535"},
      {"zero depth", "queue-depth: 0\n" + volume,
       "F:1: queue-depth: \"0\": accepted: a number from 1 to 65535"},
      // Sizes
      {"1G", "max-memory: 1G\n" + volume,
       "F:1: max-memory: \"1G\": unit \"G\" is ambiguous; write \"1GiB\" for units of 1073741824 "
       "bytes, or "
       "plain bytes"},
      {"kb", with_volume_line("size: 512kb"),
       "F:4: volumes[0].size: \"512kb\": unit \"kb\" is ambiguous; write \"512KiB\" for units of "
       "1024 bytes, "
       "or plain bytes"},
      {"fraction", with_volume_line("size: 1.5GiB"),
       "F:4: volumes[0].size: \"1.5GiB\": accepted: bytes, or a whole number with KiB, MiB, GiB or "
       "TiB, from "
       "512 to 4194304TiB"},
      {"size 2^64", with_volume_line("size: 16777216TiB"),
       "F:4: volumes[0].size: \"16777216TiB\": accepted: bytes, or a whole number with KiB, MiB, "
       "GiB or TiB, "
       "from 512 to 4194304TiB"},
      {"size 0", with_volume_line("size: 0"),
       "F:4: volumes[0].size: \"0\": accepted: bytes, or a whole number with KiB, MiB, GiB or TiB, "
       "from 512 "
       "to 4194304TiB"},
      {"odd size", with_volume_line("size: 1000"),
       "F:4: volumes[0].size: \"1000\": not a multiple of 512; the next ones are 512 and 1024"},
      {"size against block", with_volume_line("size: 4608\n    block-size: 4096"),
       "F:2: volumes[0].size: 4608 is not a multiple of block-size 4096"},
      {"io size", "max-io-size: 5000\n" + volume,
       "F:1: max-io-size: \"5000\": not a multiple of 4096; the next ones are 4096 and 8192"},
      {"block size", with_volume_line("block-size: 1024"),
       "F:4: volumes[0].block-size: \"1024\": accepted: 512, 4096"},
      // Durations
      {"no unit", "drain-timeout: 30\n" + volume,
       "F:1: drain-timeout: \"30\": a unit is missing; accepted: a whole number with ms, s, min or "
       "h, from 0s "
       "to 1h"},
      {"5m", "drain-timeout: 5m\n" + volume,
       "F:1: drain-timeout: \"5m\": unknown unit \"m\"; did you mean \"5min\"?"},
      {"too short", "heartbeat-interval: 1ms\n" + volume,
       "F:1: heartbeat-interval: \"1ms\": accepted: a whole number with ms, s, min or h, from 50ms "
       "to 10min"},
      // Booleans and words
      {"yes", "always-invalidate: yes\n" + volume,
       "F:1: always-invalidate: \"yes\": write \"true\"; accepted: true, false"},
      {"off", with_volume_line("read-only: off"),
       "F:4: volumes[0].read-only: \"off\": write \"false\"; accepted: true, false"},
      {"quoted boolean", with_volume_line("read-only: 'true'"),
       "F:4: volumes[0].read-only: \"true\": write it without quotes; accepted: true, false"},
      {"word", "log-level: warn\n" + volume,
       "F:1: log-level: \"warn\": accepted: error, warning, notice, info, debug"},
      {"word with a slip", "log-level: wraning\n" + volume,
       "F:1: log-level: \"wraning\": did you mean \"warning\"? accepted: error, warning, notice, "
       "info, debug"},
      {"crc", "crc: true\n" + volume, "F:1: crc: \"true\": accepted: auto, on, off"},
      // Addresses
      {"another scheme", "listen: roce:10.0.0.1\n" + volume,
       "F:1: listen: \"roce:10.0.0.1\": accepted: tcp:HOST:PORT or rdma:HOST:PORT, HOST and PORT "
       "may "
       "be left out"},
      {"IPv6 without brackets by RDMA", "listen: rdma:::1\n" + volume,
       "F:1: listen: \"rdma:::1\": an IPv6 address stands in brackets: rdma:[::1]:1234"},
      {"RDMA twice", "listen:\n- 'rdma:'\n- 'tcp:'\n- rdma:*:1234\n" + volume,
       "F:4: listen[2]: \"rdma:*:1234\": the same address twice"},
      {"no scheme", "listen: [\"127.0.0.1:5\"]\n" + volume,
       "F:1: listen[0]: \"127.0.0.1:5\": accepted: tcp:HOST:PORT or rdma:HOST:PORT, HOST "
       "and PORT may be left out"},
      {"port", "listen: tcp::70000\n" + volume,
       "F:1: listen: \"tcp::70000\": port \"70000\" is not a number from 1 to 65535"},
      {"empty port", "listen: 'tcp:a:'\n" + volume,
       "F:1: listen: \"tcp:a:\": port \"\" is not a number from 1 to 65535"},
      {"IPv6 without brackets", "listen: tcp:::1\n" + volume,
       "F:1: listen: \"tcp:::1\": an IPv6 address stands in brackets: tcp:[::1]:1234"},
      {"bad IPv6", "listen: tcp:[::g]\n" + volume,
       "F:1: listen: \"tcp:[::g]\": \"::g\" is not an IPv6 address"},
      {"bad IPv4", "listen: tcp:10.0.0.256\n" + volume,
       "F:1: listen: \"tcp:10.0.0.256\": \"10.0.0.256\" is not an IPv4 address; a port follows a "
       "colon: "
       "tcp::1234"},
      {"port only", "listen: tcp:1234\n" + volume,
       "F:1: listen: \"tcp:1234\": \"1234\" is not an IPv4 address; a port follows a colon: "
       "tcp::1234"},
      {"listen twice", "listen:\n- 'tcp:'\n- tcp:*:1234\n" + volume,
       "F:3: listen[1]: \"tcp:*:1234\": the same address twice"},
      {"listen that is a key to YAML", "listen: [tcp:]\n" + volume,
       "F:1: listen[0]: is a map; accepted: tcp:HOST:PORT, in quotes if it ends with a colon"},
      {"listen nowhere", "listen: []\n" + volume,
       "F:1: listen: is an empty list; leave the key out to listen on every address, port 1234"},
      // Volumes
      {"no volumes", "reactors: 1\n", "F:1: volumes: is missing"},
      {"empty volumes", "volumes: []\n", "F:1: volumes: is an empty list; nothing would be served"},
      {"name twice", volume + "  - name: a\n    path: /b\n",
       "F:4: volumes[1].name: \"a\": the volume in line 2 has the same name"},
      {"path twice", volume + "  - name: b\n    path: //./a\n",
       "F:4: volumes[1].path: \"/a\": the volume in line 2 has the same path"},
      {"name with ..", "volumes:\n  - name: a/../b\n    path: /a\n",
       "F:2: volumes[0].name: \"a/../b\": \"..\" is not allowed; clients refuse it too"},
      {"name with slash", "volumes:\n  - name: /dev/sda\n    path: /a\n",
       "F:2: volumes[0].name: \"/dev/sda\": \"/\" may only stand single, between other characters"},
      {"name with control character", "volumes:\n  - name: \"a\\x1b\"\n    path: /a\n",
       "F:2: volumes[0].name: \"a?\": a name is printable ASCII"},
      {"empty name", "volumes:\n  - name: ''\n    path: /a\n",
       "F:2: volumes[0].name: \"\": a name has 1 to 254 bytes"},
      {"long name", "volumes:\n  - name: " + std::string(255, 'n') + "\n    path: /a\n",
       "F:2: volumes[0].name: \"" + std::string(60, 'n') + "...\": a name has 1 to 254 bytes"},
      {"relative path", "volumes:\n  - name: a\n    path: a.img\n",
       "F:3: volumes[0].path: \"a.img\": not an absolute path; it has to start with \"/\""},
      {"path with NUL", "volumes:\n  - name: a\n    path: \"/a\\0b\"\n",
       "F:3: volumes[0].path: \"/a?b\": control characters in a path"},
      {"directory", "volumes:\n  - name: a\n    path: /srv/\n",
       "F:3: volumes[0].path: \"/srv/\": names a directory; accepted: a file or block device"},
      // Access lists
      {"nobody", with_volume_line("allow: []"),
       "F:4: volumes[0].allow: is an empty list; leave the key out to allow everybody"},
      {"empty rule", with_volume_line("allow: [{}]"),
       "F:4: volumes[0].allow[0]: is an empty rule; accepted: address, session, or both"},
      {"word as rule", with_volume_line("allow: [10.0.0.1]"),
       "F:4: volumes[0].allow[0]: is a single value; accepted: a map with the keys address, "
       "session"},
      {"host name", with_volume_line("allow: [{address: web1}]"),
       "F:4: volumes[0].allow[0].address: \"web1\": accepted: an IPv4 or IPv6 address, or a "
       "network as "
       "192.0.2.0/24"},
      {"prefix", with_volume_line("allow: [{address: 10.0.0.0/33}]"),
       "F:4: volumes[0].allow[0].address: \"10.0.0.0/33\": the part behind \"/\" is a number of "
       "bits from 0 "
       "to 32"},
      {"host bits", with_volume_line("allow: [{address: 10.0.0.5/8}]"),
       "F:4: volumes[0].allow[0].address: \"10.0.0.5/8\": bits behind the first 8 are set; write "
       "the "
       "network's own address, or the host's without \"/\""},
      {"session that cannot be", with_volume_line("allow: [{session: web1.example}]"),
       "F:4: volumes[0].allow[0].session: \"web1.example\": matches no session: their names hold "
       "no \".\" "
       "and no \"/\""},
      {"slip in a rule", with_volume_line("allow: [{adress: ::1}]"),
       "F:4: volumes[0].allow[0].adress: unknown key; did you mean \"address\"?"},
      // Several keys together
      {"geometry", "queue-depth: 65535\nmax-io-size: 128KiB\n" + volume,
       "F:1: queue-depth: queue-depth 65535 with max-io-size 128KiB does not fit in the protocol's "
       "28 bits "
       "for both (16 for the depth, 18 for max-io-size + 4KiB); queue-depth 1024 would"},
      {"geometry, size", "max-io-size: 4MiB\nqueue-depth: 64\n" + volume,
       "F:2: queue-depth: queue-depth 64 with max-io-size 4MiB does not fit in the protocol's 28 "
       "bits for "
       "both (6 for the depth, 23 for max-io-size + 4KiB); queue-depth 32 or max-io-size 4092KiB "
       "would"},
      {"memory", "max-memory: 1MiB\nmax-io-size: 128KiB\n" + volume,
       "F:1: max-memory: one session needs 17301504 bytes (queue-depth 128 with max-io-size "
       "128KiB), more "
       "than the 1048576 allowed; max-memory 16896KiB or queue-depth 7 would do"},
      // YAML itself
      {"empty file", "", "F:1: the file is empty; \"volumes\" is missing"},
      {"comment only", "# nothing\n", "F:1: the file is empty; \"volumes\" is missing"},
      {"tab", "volumes:\n\t- name: a\n", "F:2: a tab in the indentation; YAML wants spaces"},
      {"tab after the dash", "volumes:\n-\tname: a\n",
       "F:2: a tab in the indentation; YAML wants spaces"},
      {"carriage return", "a: 1\rb: 2\n", "F:1: a carriage return inside the line"},
      {"control character", volume + "# \x1b[2J\n",
       "F:4: a control character; the file must be UTF-8 text"},
      {"UTF-16",
       std::string("\xff\xfe"
                   "a\0",
                   4),
       "F:1: not UTF-8 text"},
      {"overlong UTF-8", "\n# \xc0\xaf\n", "F:2: not UTF-8 text"},
      {"surrogate", "\n# \xed\xa0\x80\n", "F:2: not UTF-8 text"},
      {"two documents", volume + "---\n" + volume, "F:4: a second YAML document; only one is read"},
      {"anchor", "volumes: &v\n  - name: a\n    path: /a\n",
       "F:1: an anchor (&name); anchors and aliases are not supported here"},
      {"anchor on a key", "&k crc: on\n" + volume,
       "F:1: an anchor (&name); anchors and aliases are not supported here"},
      {"tag", "reactors: !!int 2\n" + volume, "F:1: a tag (!name); tags are not supported here"},
      {"tag on a list", "volumes: !x\n  - name: a\n    path: /a\n",
       "F:1: a tag (!name); tags are not supported here"},
      {"unclosed", "volumes: [\n", "F:2: not valid YAML: end of sequence flow not found"},
      {"map in a value", "volumes:\n  - name: a: b\n",
       "F:2: not valid YAML: illegal map value; a value with a colon before a blank or at its end "
       "needs quotes"},
  };
  for (const BadInput& bad : table) {
    CAPTURE(bad.what);
    CHECK(complaint(bad.text) == bad.message);
  }
}

TEST_CASE("only readers may share a path") {
  const std::string reader = "    read-only: true\n";
  const std::string other = "  - name: b\n    path: /a\n";
  CHECK(complaint(volume + reader + other + reader) == "");
  const std::string refused =
      "F:%: volumes[1].path: \"/a\": the volume in line 2 has the same path";
  const auto at_line = [&refused](char line) {
    std::string text = refused;
    text[2] = line;
    return text;
  };
  CHECK(complaint(volume + reader + other) == at_line('5'));
  CHECK(complaint(volume + other + reader) == at_line('4'));
  CHECK(complaint(volume + other) == at_line('4'));
}

TEST_CASE("an alias bomb is refused at its first anchor") {
  std::string text = "a: &a [x, x, x, x, x, x, x, x, x, x]\n";
  for (char name = 'b'; name <= 'i'; ++name) {
    const std::string previous = std::string("*") + static_cast<char>(name - 1);
    text += std::string(1, name) + ": &" + name + " [" + previous;
    for (int i = 0; i < 9; ++i) text += ", " + previous;
    text += "]\n";
  }
  CHECK(complaint(text) == "F:1: an anchor (&name); anchors and aliases are not supported here");
}

TEST_CASE("nesting 10000 deep is refused and does not exhaust the stack") {
  constexpr int depth = 10000;
  std::string dashes;
  std::string lists;
  std::string maps;
  for (int i = 0; i < depth; ++i) {
    dashes += "- ";
    lists += '[';
    maps += "{a: ";
  }
  CHECK(complaint(dashes) == "F:1: nested deeper than 16 levels");
  // yaml-cpp takes brackets that it has not seen closed for a key; refused all the same.
  for (const std::string& text :
       {lists, maps, lists + std::string(depth, ']'), maps + std::string(depth, '}')}) {
    CHECK(complaint(text).starts_with("F:1: "));
  }
  std::string indented;
  for (size_t i = 0; i < 1400; ++i) indented += std::string(i, ' ') + "a:\n";
  CHECK(complaint(indented) == "F:17: nested deeper than 16 levels");
  CHECK(complaint("volumes: " + std::string(17, '[') + std::string(17, ']')) ==
        "F:1: nested deeper than 16 levels");
}

TEST_CASE("a file too large is refused") {
  CHECK(complaint(std::string(size_t{1} << 20, '\n') + volume) == "F: larger than 1048576 bytes");
}

TEST_CASE("many values are refused in reasonable time") {
  std::string text = "volumes: [";
  for (int i = 0; i < 200000; ++i) text += "a,";
  text += "]";
  CHECK(complaint(text) == "F:1: more than 100000 keys and values");
}

TEST_CASE("many errors are counted, twenty are shown") {
  std::string text = volume;
  for (int i = 0; i < 50; ++i) text += "zebra" + std::to_string(i) + ": 1\n";
  const std::string all = complaint(text);
  CHECK(all.find("F:23: zebra19: unknown key\nF: 30 more") != std::string::npos);
  CHECK(all.find("zebra20") == std::string::npos);
}

TEST_CASE("files that cannot be read say why") {
  const auto absent = load_file("/nonexistent/rtrsd.yaml");
  REQUIRE_FALSE(absent);
  CHECK(absent.error().text ==
        "/nonexistent/rtrsd.yaml: cannot be opened: No such file or directory");
  const auto directory = load_file("/etc");
  REQUIRE_FALSE(directory);
  CHECK(directory.error().text == "/etc: is a directory, not a file");
  const auto endless = load_file("/dev/zero");
  REQUIRE_FALSE(endless);
  CHECK(endless.error().text == "/dev/zero: larger than 1048576 bytes");
}

// ---- Parser, example and man page agree

namespace {

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  REQUIRE_MESSAGE(file, path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

std::string last_part(const std::string& key) {
  return key.substr(key.rfind('.') + 1);
}

// The example with every commented setting switched on: "#" not followed by exactly one blank.
std::string everything_switched_on(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) {
    const size_t hash = line.find_first_not_of(' ');
    std::string result = line;
    if (hash != std::string::npos && line[hash] == '#') {
      const size_t next = line.find_first_not_of(' ', hash + 1);
      if (next == std::string::npos || next == hash + 2) continue;
      result.erase(hash, 1);
    }
    text += result + "\n";
  }
  return text;
}

}  // namespace

TEST_CASE("the example is accepted as it is and with every setting switched on") {
  const std::string path = SOURCE_ROOT "/config/rtrsd.yaml.example";
  const auto plain = load_file(path);
  REQUIRE_MESSAGE(plain, plain.error().text);
  const std::string text = everything_switched_on(lines_of(path));
  const auto full = parse(text, path);
  REQUIRE_MESSAGE(full, full.error().text);
  CHECK(full->volumes.size() == 2);
  CHECK(full->volumes[0].allow.size() == 2);
  for (const std::string& key : known_keys()) {
    CAPTURE(key);
    const std::string written = last_part(key) + ":";
    const bool found = ("\n" + text).find("\n" + written) != std::string::npos ||
                       text.find(" " + written) != std::string::npos;
    CHECK(found);
  }
}

TEST_CASE("settings the example shows as defaults are the defaults") {
  const std::string path = SOURCE_ROOT "/config/rtrsd.yaml.example";
  const auto full = parse(everything_switched_on(lines_of(path)), path);
  const auto defaults = parse(volume, "F");
  REQUIRE(full);
  REQUIRE(defaults);
  CHECK(full->reactors == defaults->reactors);
  CHECK(full->queue_depth == defaults->queue_depth);
  CHECK(full->max_io_size == defaults->max_io_size);
  CHECK(full->sessions_max == defaults->sessions_max);
  CHECK(full->memory_max == defaults->memory_max);
  CHECK(full->always_invalidate == defaults->always_invalidate);
  CHECK(full->heartbeat_interval == defaults->heartbeat_interval);
  CHECK(full->heartbeat_missed_max == defaults->heartbeat_missed_max);
  CHECK(full->crc == defaults->crc);
  CHECK(full->drain_timeout == defaults->drain_timeout);
  CHECK(full->log_level == defaults->log_level);
  CHECK(full->volumes[0].read_only == defaults->volumes[0].read_only);
  CHECK(full->volumes[0].direct == defaults->volumes[0].direct);
}

// The page has one ".It Ic KEY" for each key, in a subsection for each level.
TEST_CASE("the manual has every key, and no other") {
  const std::vector<std::pair<std::string, std::string>> levels = {
      {".Ss Top level", ""},
      {".Ss Volumes", "volumes[]."},
      {".Ss Access rules", "volumes[].allow[]."}};
  std::vector<std::string> described;
  const std::string* prefix = nullptr;
  for (const std::string& line : lines_of(SOURCE_ROOT "/man/rtrsd.yaml.5")) {
    if (line.starts_with(".Ss ") || line.starts_with(".Sh ")) prefix = nullptr;
    for (const auto& [title, keys_prefix] : levels) {
      if (line == title) prefix = &keys_prefix;
    }
    constexpr std::string_view item = ".It Ic ";
    if (prefix != nullptr && line.starts_with(item)) {
      described.push_back(*prefix + line.substr(item.size()));
    }
  }
  CHECK(described == known_keys());
}
