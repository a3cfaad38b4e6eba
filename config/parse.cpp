// SPDX-License-Identifier: BSD-3-Clause
// The schema: one table of keys per level, each with the function that reads its value.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <map>
#include <span>
#include <utility>

#include "config/config.h"
#include "config/values.h"
#include "config/yaml_tree.h"

namespace rtrsnbd::config {
namespace {

using namespace std::chrono_literals;

constexpr size_t errors_shown_max = 20;
constexpr size_t shown_value_max = 60;
constexpr size_t listen_max = 64;
constexpr size_t volumes_max = 4096;
constexpr size_t allow_max = 256;
constexpr size_t volume_name_max = 254;  // what an RNBD open message carries
constexpr size_t session_name_max = 254;
constexpr size_t path_max = 4095;

constexpr uint64_t kib = 1024;
constexpr uint64_t io_size_granule = 4 * kib;
// Room in each chunk for the message behind the data; part of the geometry.
constexpr uint64_t header_size = 4 * kib;
// (chunk number, offset) travel in one immediate value of this many bits.
constexpr uint32_t immediate_bits = 28;
constexpr uint64_t io_size_max = (uint64_t{1} << immediate_bits) - header_size;
constexpr uint32_t queue_depth_max = 65535;
constexpr uint32_t reactors_max = 64;
constexpr uint32_t sessions_max = 65536;
constexpr uint64_t memory_limit_max = uint64_t{1} << 50;
constexpr uint64_t volume_size_max = uint64_t{1} << 62;
constexpr uint64_t sector_size = 512;

uint32_t bits_for(uint64_t count) {
  return count <= 1 ? 0 : static_cast<uint32_t>(std::bit_width(count - 1));
}

std::string quoted(std::string_view text) {
  return "\"" + std::string(text) + "\"";
}

// A value of the file as part of a message: one line, no control characters, bounded.
std::string shown(std::string_view text) {
  std::string result;
  for (const char c : text.substr(0, shown_value_max)) {
    const auto byte = static_cast<unsigned char>(c);
    result += byte >= 0x20 && byte < 0x7f ? c : '?';
  }
  if (text.size() > shown_value_max) result += "...";
  return quoted(result);
}

class Errors {
 public:
  explicit Errors(std::string file_name) : file_name_(std::move(file_name)) {}

  void add(int line, std::string_view key, std::string_view text) {
    if (++count_ > errors_shown_max) return;
    if (!text_.empty()) text_ += '\n';
    text_ += file_name_ + ':';
    if (line > 0) text_ += std::to_string(line) + ':';
    text_ += ' ';
    if (!key.empty()) text_ += std::string(key) + ": ";
    text_ += text;
  }
  [[nodiscard]] bool empty() const { return count_ == 0; }
  [[nodiscard]] ConfigError take() && {
    if (count_ > errors_shown_max) {
      text_ += '\n' + file_name_ + ": " + std::to_string(count_ - errors_shown_max) + " more";
    }
    return ConfigError{std::move(text_)};
  }

 private:
  std::string file_name_;
  std::string text_;
  size_t count_ = 0;
};

// A place in the file: what is there and how the user calls it.
struct Place {
  const Node& node;
  std::string key;  // "volumes[0].size"
  Errors& errors;

  void refuse(std::string_view text) const { errors.add(node.line, key, text); }
  void refuse_value(std::string_view why) const {
    errors.add(node.line, key, shown(node.text) + ": " + std::string(why));
  }
};

std::string_view kind_name(const Node& node) {
  switch (node.kind) {
    case Node::Kind::null:
      return "nothing";
    case Node::Kind::scalar:
      return "a single value";
    case Node::Kind::sequence:
      return "a list";
    case Node::Kind::map:
      return "a map";
  }
  return "something else";
}

// The text of a scalar, or null after a complaint.
const std::string* scalar(const Place& place, std::string_view accepted) {
  if (place.node.kind == Node::Kind::scalar) return &place.node.text;
  place.refuse("is " + std::string(kind_name(place.node)) + "; accepted: " + std::string(accepted));
  return nullptr;
}

// Numbers and true/false: a quoted one is text in YAML.
const std::string* plain_scalar(const Place& place, std::string_view accepted) {
  const std::string* text = scalar(place, accepted);
  if (text != nullptr && place.node.quoted) {
    place.refuse_value("write it without quotes; accepted: " + std::string(accepted));
    return nullptr;
  }
  return text;
}

void read_integer(const Place& place, uint32_t& target, uint32_t min, uint32_t max) {
  const std::string* text =
      plain_scalar(place, "a number from " + std::to_string(min) + " to " + std::to_string(max));
  if (text == nullptr) return;
  const Parsed<uint64_t> value = parse_integer(*text, min, max);
  if (!value) return place.refuse_value(value.error());
  target = static_cast<uint32_t>(*value);
}

void read_size(const Place& place, uint64_t& target, uint64_t min, uint64_t max) {
  const std::string* text = scalar(place, "a size as 4096, 128KiB or 10GiB");
  if (text == nullptr) return;
  const Parsed<uint64_t> value = parse_size(*text, min, max);
  if (!value) return place.refuse_value(value.error());
  target = *value;
}

void read_duration(const Place& place, std::chrono::milliseconds& target,
                   std::chrono::milliseconds min, std::chrono::milliseconds max) {
  const std::string* text = scalar(place, "a duration as 500ms, 5s or 1min");
  if (text == nullptr) return;
  const auto value = parse_duration(*text, min, max);
  if (!value) return place.refuse_value(value.error());
  target = *value;
}

void read_boolean(const Place& place, bool& target) {
  const std::string* text = plain_scalar(place, "true, false");
  if (text == nullptr) return;
  const Parsed<bool> value = parse_boolean(*text);
  if (!value) return place.refuse_value(value.error());
  target = *value;
}

template <class T>
void read_word(const Place& place, T& target,
               std::span<const std::pair<std::string_view, T>> words) {
  std::string accepted;
  std::vector<std::string_view> names;
  for (const auto& [name, value] : words) {
    if (!accepted.empty()) accepted += ", ";
    accepted += name;
    names.push_back(name);
  }
  const std::string* text = scalar(place, accepted);
  if (text == nullptr) return;
  for (const auto& [name, value] : words) {
    if (name == *text) {
      target = value;
      return;
    }
  }
  const std::string_view match = near_match(*text, names);
  place.refuse_value((match.empty() ? "" : "did you mean " + quoted(match) + "? ") +
                     "accepted: " + accepted);
}

bool printable_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
}

// ---- Keys of one level

template <class T>
struct Field {
  std::string_view name;
  void (*read)(const Place& place, T& target);
  bool required = false;
};

extern const std::array<Field<Config>, 13> config_fields;
extern const std::array<Field<Volume>, 7> volume_fields;
extern const std::array<Field<AccessRule>, 2> allow_fields;

template <class T, size_t N>
std::vector<std::string_view> names_of(const std::array<Field<T>, N>& fields) {
  std::vector<std::string_view> names;
  for (const Field<T>& field : fields) names.push_back(field.name);
  return names;
}

bool contains(const std::vector<std::string_view>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Where an unknown key would be right.
std::string unknown_key_hint(std::string_view key, const std::vector<std::string_view>& here) {
  if (key == "<<") return "merge keys are not supported here";
  const auto elsewhere = [key, &here](const std::vector<std::string_view>& names) {
    return contains(names, key) && names != here;
  };
  if (elsewhere(names_of(config_fields))) return "unknown key here; it belongs to the top level";
  if (elsewhere(names_of(volume_fields))) {
    return "unknown key here; it belongs to an entry of \"volumes\"";
  }
  if (elsewhere(names_of(allow_fields))) {
    return "unknown key here; it belongs to an entry of a volume's \"allow\"";
  }
  const std::string_view match = near_match(key, here);
  if (match.empty()) return "unknown key";
  return "unknown key; did you mean " + quoted(match) + "?";
}

std::string joined(std::string_view prefix, std::string_view key) {
  // A key from the file may hold anything.
  std::string text = shown(key);
  if (printable_ascii(key) && key.size() <= shown_value_max && !key.empty() &&
      key.find_first_of(" .[]\"") == std::string_view::npos) {
    text = std::string(key);
  }
  return prefix.empty() ? text : std::string(prefix) + "." + text;
}

template <class T, size_t N>
void read_map(const Place& place, T& target, const std::array<Field<T>, N>& fields) {
  if (place.node.kind != Node::Kind::map) {
    std::string accepted;
    for (const Field<T>& field : fields) {
      accepted += (accepted.empty() ? "" : ", ") + std::string(field.name);
    }
    place.refuse("is " + std::string(kind_name(place.node)) + "; accepted: a map with the keys " +
                 accepted);
    return;
  }
  std::map<std::string_view, int> seen;  // key to line
  for (const Entry& entry : place.node.entries) {
    const std::string name = joined(place.key, entry.key);
    if (const auto [first, is_new] = seen.try_emplace(entry.key, entry.line); !is_new) {
      place.errors.add(entry.line, name,
                       "given twice; the first is in line " + std::to_string(first->second));
      continue;
    }
    const auto field = std::find_if(fields.begin(), fields.end(),
                                    [&entry](const Field<T>& f) { return f.name == entry.key; });
    if (field == fields.end()) {
      place.errors.add(entry.line, name, unknown_key_hint(entry.key, names_of(fields)));
      continue;
    }
    field->read(Place{entry.value, name, place.errors}, target);
  }
  for (const Field<T>& field : fields) {
    if (field.required && !seen.contains(field.name)) {
      place.errors.add(place.node.line, joined(place.key, field.name), "is missing");
    }
  }
}

// A list with 1 to max entries; false after a complaint.
bool is_list(const Place& place, size_t max, std::string_view of_what) {
  if (place.node.kind != Node::Kind::sequence) {
    place.refuse("is " + std::string(kind_name(place.node)) + "; accepted: a list of " +
                 std::string(of_what));
    return false;
  }
  if (place.node.items.size() > max) {
    place.refuse("has " + std::to_string(place.node.items.size()) + " entries; at most " +
                 std::to_string(max) + " are accepted");
    return false;
  }
  return true;
}

Place item(const Place& list, size_t index) {
  return {list.node.items[index], list.key + "[" + std::to_string(index) + "]", list.errors};
}

// ---- Single keys that need more than a bound

constexpr std::array<std::pair<std::string_view, Crc>, 3> crc_words{
    {{"auto", Crc::automatic}, {"on", Crc::on}, {"off", Crc::off}}};
constexpr std::array<std::pair<std::string_view, Direct>, 3> direct_words{
    {{"auto", Direct::automatic}, {"on", Direct::on}, {"off", Direct::off}}};
constexpr std::array<std::pair<std::string_view, std::string_view>, 5> log_level_words{
    {{"error", "error"},
     {"warning", "warning"},
     {"notice", "notice"},
     {"info", "info"},
     {"debug", "debug"}}};

void read_listen_entry(const Place& place, Config& config) {
  // To YAML a word with a colon at its end is a key.
  const bool is_map = place.node.kind == Node::Kind::map;
  const std::string* text =
      scalar(place, is_map ? "tcp:HOST:PORT, in quotes if it ends with a colon" : "tcp:HOST:PORT");
  if (text == nullptr) return;
  Parsed<Listen> listen = parse_listen(*text);
  if (!listen) return place.refuse_value(listen.error());
  const bool repeated =
      std::any_of(config.listen.begin(), config.listen.end(), [&listen](const Listen& other) {
        return other.scheme == listen->scheme && other.host == listen->host &&
               other.port == listen->port;
      });
  if (repeated) return place.refuse_value("the same address twice");
  config.listen.push_back(*std::move(listen));
}

void read_listen(const Place& place, Config& config) {
  if (place.node.kind == Node::Kind::scalar) return read_listen_entry(place, config);
  if (!is_list(place, listen_max, "addresses as tcp:HOST:PORT, or one such address")) return;
  if (place.node.items.empty()) {
    return place.refuse(
        "is an empty list; leave the key out to listen on every address, port 1234");
  }
  for (size_t index = 0; index < place.node.items.size(); ++index) {
    read_listen_entry(item(place, index), config);
  }
}

void read_max_io_size(const Place& place, Config& config) {
  uint64_t size = 0;
  read_size(place, size, io_size_granule, io_size_max);
  if (size == 0) return;  // refused
  if (size % io_size_granule != 0) {
    const uint64_t below = size - size % io_size_granule;
    return place.refuse_value("not a multiple of 4096; the next ones are " + std::to_string(below) +
                              " and " + std::to_string(below + io_size_granule));
  }
  config.max_io_size = size;
}

void read_volume_name(const Place& place, Volume& volume) {
  const std::string* text = scalar(place, "a name");
  if (text == nullptr) return;
  if (text->empty() || text->size() > volume_name_max) {
    return place.refuse_value("a name has 1 to " + std::to_string(volume_name_max) + " bytes");
  }
  if (!printable_ascii(*text)) return place.refuse_value("a name is printable ASCII");
  if (text->find("..") != std::string::npos) {
    return place.refuse_value("\"..\" is not allowed; clients refuse it too");
  }
  if (text->front() == '/' || text->back() == '/' || text->find("//") != std::string::npos) {
    return place.refuse_value("\"/\" may only stand single, between other characters");
  }
  if (text->front() == ' ' || text->back() == ' ') {
    return place.refuse_value("a blank at the end of a name is a trap");
  }
  volume.name = *text;
}

// Removes doubled slashes and "." components. ".." is kept: behind a symbolic link it is not the
// parent.
std::string normal_path(std::string_view path) {
  std::string result;
  for (size_t at = 0; at < path.size();) {
    const size_t slash = std::min(path.find('/', at), path.size());
    const std::string_view component = path.substr(at, slash - at);
    if (!component.empty() && component != ".") result += "/" + std::string(component);
    at = slash + 1;
  }
  return result.empty() ? "/" : result;
}

void read_path(const Place& place, Volume& volume) {
  const std::string* text = scalar(place, "an absolute path of a file or block device");
  if (text == nullptr) return;
  if (text->empty()) return place.refuse_value("an empty path; accepted: an absolute path");
  if (text->front() != '/') {
    return place.refuse_value("not an absolute path; it has to start with \"/\"");
  }
  if (text->size() > path_max) {
    return place.refuse_value("longer than " + std::to_string(path_max) + " bytes");
  }
  // Escapes of quoted YAML text can make any character; a NUL would cut the path silently.
  const bool control = std::any_of(text->begin(), text->end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x20 || byte == 0x7f;
  });
  if (control) return place.refuse_value("control characters in a path");
  if (text->back() == '/')
    return place.refuse_value("names a directory; accepted: a file or block device");
  volume.path = normal_path(*text);
}

void read_volume_size(const Place& place, Volume& volume) {
  uint64_t size = 0;
  read_size(place, size, sector_size, volume_size_max);
  if (size == 0) return;  // refused
  if (size % sector_size != 0) {
    const uint64_t below = size - size % sector_size;
    return place.refuse_value("not a multiple of 512; the next ones are " + std::to_string(below) +
                              " and " + std::to_string(below + sector_size));
  }
  volume.size = size;
}

void read_block_size(const Place& place, Volume& volume) {
  const std::string* text = scalar(place, "512, 4096");
  if (text == nullptr) return;
  const Parsed<uint64_t> size = parse_size(*text, 512, 4096);
  if (!size || (*size != 512 && *size != 4096)) return place.refuse_value("accepted: 512, 4096");
  volume.block_size = static_cast<uint32_t>(*size);
}

void read_allow_address(const Place& place, AccessRule& rule) {
  const std::string* text = scalar(place, "an address or a network");
  if (text == nullptr) return;
  Parsed<std::string> network = parse_network(*text);
  if (!network) return place.refuse_value(network.error());
  rule.address = *std::move(network);
}

void read_allow_session(const Place& place, AccessRule& rule) {
  const std::string* text = scalar(place, "a session name, * and ? match anything");
  if (text == nullptr) return;
  if (text->empty() || text->size() > session_name_max || !printable_ascii(*text)) {
    return place.refuse_value("a session name has 1 to " + std::to_string(session_name_max) +
                              " printable ASCII characters");
  }
  if (text->find_first_of("./") != std::string::npos) {
    return place.refuse_value("matches no session: their names hold no \".\" and no \"/\"");
  }
  rule.session = *text;
}

void read_allow(const Place& place, Volume& volume) {
  if (!is_list(place, allow_max, "rules with the keys address and session")) return;
  if (place.node.items.empty()) {
    return place.refuse("is an empty list; leave the key out to allow everybody");
  }
  for (size_t index = 0; index < place.node.items.size(); ++index) {
    const Place entry = item(place, index);
    AccessRule rule;
    if (entry.node.kind == Node::Kind::map && entry.node.entries.empty()) {
      entry.refuse("is an empty rule; accepted: address, session, or both");
      continue;
    }
    read_map(entry, rule, allow_fields);
    volume.allow.push_back(std::move(rule));
  }
}

void check_against_others(const Place& place, const Volume& volume,
                          const std::vector<Volume>& others) {
  for (const Volume& other : others) {
    if (!volume.name.empty() && volume.name == other.name) {
      place.errors.add(place.node.line, place.key + ".name",
                       shown(volume.name) + ": the volume in line " + std::to_string(other.line) +
                           " has the same name");
    }
    // Readers may share a backing; a writer has it alone.
    if (!volume.path.empty() && volume.path == other.path &&
        !(volume.read_only && other.read_only)) {
      place.errors.add(place.node.line, place.key + ".path",
                       shown(volume.path) + ": the volume in line " + std::to_string(other.line) +
                           " has the same path");
    }
  }
}

void check_volume(const Place& place, const Volume& volume) {
  if (volume.block_size != 0 && volume.size % volume.block_size != 0) {
    place.errors.add(place.node.line, place.key + ".size",
                     std::to_string(volume.size) + " is not a multiple of block-size " +
                         std::to_string(volume.block_size));
  }
}

void read_volumes(const Place& place, Config& config) {
  if (!is_list(place, volumes_max, "volumes, each with name and path")) return;
  if (place.node.items.empty()) return place.refuse("is an empty list; nothing would be served");
  for (size_t index = 0; index < place.node.items.size(); ++index) {
    const Place entry = item(place, index);
    Volume volume;
    volume.line = entry.node.line;
    read_map(entry, volume, volume_fields);
    check_volume(entry, volume);
    check_against_others(entry, volume, config.volumes);
    config.volumes.push_back(std::move(volume));
  }
}

// ---- The schema

constinit const std::array<Field<AccessRule>, 2> allow_fields{{
    {"address", read_allow_address},
    {"session", read_allow_session},
}};

constinit const std::array<Field<Volume>, 7> volume_fields{{
    {"name", read_volume_name, true},
    {"path", read_path, true},
    {"size", read_volume_size},
    {"read-only", [](const Place& place, Volume& v) { read_boolean(place, v.read_only); }},
    {"block-size", read_block_size},
    {"direct",
     [](const Place& place, Volume& v) { read_word<Direct>(place, v.direct, direct_words); }},
    {"allow", read_allow},
}};

constinit const std::array<Field<Config>, 13> config_fields{{
    {"listen", read_listen},
    {"reactors", [](const Place& p, Config& c) { read_integer(p, c.reactors, 0, reactors_max); }},
    {"queue-depth",
     [](const Place& p, Config& c) { read_integer(p, c.queue_depth, 1, queue_depth_max); }},
    {"max-io-size", read_max_io_size},
    {"max-sessions",
     [](const Place& p, Config& c) { read_integer(p, c.sessions_max, 1, sessions_max); }},
    {"max-memory",
     [](const Place& p, Config& c) {
       read_size(p, c.memory_max, 2 * io_size_granule, memory_limit_max);
     }},
    {"always-invalidate", [](const Place& p, Config& c) { read_boolean(p, c.always_invalidate); }},
    {"heartbeat-interval",
     [](const Place& p, Config& c) { read_duration(p, c.heartbeat_interval, 50ms, 10min); }},
    {"heartbeat-missed-max",
     [](const Place& p, Config& c) { read_integer(p, c.heartbeat_missed_max, 1, 100); }},
    {"crc", [](const Place& p, Config& c) { read_word<Crc>(p, c.crc, crc_words); }},
    {"drain-timeout", [](const Place& p, Config& c) { read_duration(p, c.drain_timeout, 0s, 1h); }},
    {"log-level",
     [](const Place& p, Config& c) {
       std::string_view level = c.log_level;
       read_word<std::string_view>(p, level, log_level_words);
       c.log_level = std::string(level);
     }},
    {"volumes", read_volumes, true},
}};

// ---- Rules over several keys

int line_of_key(const Node& root, std::string_view first, std::string_view second) {
  for (const std::string_view name : {first, second}) {
    for (const Entry& entry : root.entries) {
      if (entry.key == name) return entry.line;
    }
  }
  return root.line;
}

void check_geometry(const Node& root, const Config& config, Errors& errors) {
  const uint64_t chunk_size = config.max_io_size + header_size;
  const int line = line_of_key(root, "queue-depth", "max-io-size");
  const std::string given = "queue-depth " + std::to_string(config.queue_depth) +
                            " with max-io-size " + size_text(config.max_io_size);
  const uint32_t depth_bits = bits_for(config.queue_depth);
  const uint32_t chunk_bits = bits_for(chunk_size);
  if (depth_bits + chunk_bits > immediate_bits) {
    const uint32_t depth_that_fits =
        std::min(queue_depth_max, uint32_t{1} << (immediate_bits - chunk_bits));
    const uint64_t size_that_fits = (uint64_t{1} << (immediate_bits - depth_bits)) - header_size;
    std::string text = given + " does not fit in the protocol's " + std::to_string(immediate_bits) +
                       " bits for both (" + std::to_string(depth_bits) + " for the depth, " +
                       std::to_string(chunk_bits) + " for max-io-size + 4KiB); queue-depth " +
                       std::to_string(depth_that_fits);
    if (size_that_fits >= io_size_granule) {
      text += " or max-io-size " + size_text(size_that_fits);
    }
    errors.add(line, "queue-depth", text + " would");
    return;
  }
  const uint64_t session_bytes = config.queue_depth * chunk_size;
  if (session_bytes > config.memory_max) {
    const uint64_t depth_that_fits = config.memory_max / chunk_size;
    std::string text = "one session needs " + std::to_string(session_bytes) + " bytes (" + given +
                       "), more than the " + std::to_string(config.memory_max) +
                       " allowed; max-memory " + size_text((session_bytes + kib - 1) / kib * kib);
    if (depth_that_fits > 0) text += " or queue-depth " + std::to_string(depth_that_fits);
    errors.add(line_of_key(root, "max-memory", "queue-depth"), "max-memory", text + " would do");
  }
}

template <class T, size_t N>
void append_keys(std::vector<std::string>& keys, std::string_view prefix,
                 const std::array<Field<T>, N>& fields) {
  for (const Field<T>& field : fields)
    keys.push_back(std::string(prefix) + std::string(field.name));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  [[nodiscard]] int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

tl::expected<Config, ConfigError> parse(std::string_view text, const std::string& file_name) {
  Errors errors(file_name);
  const tl::expected<Node, YamlError> tree = parse_yaml(text);
  if (!tree) {
    errors.add(tree.error().line, "", tree.error().text);
    return tl::unexpected(std::move(errors).take());
  }
  Config config;
  if (tree->kind == Node::Kind::null) {
    errors.add(1, "", "the file is empty; \"volumes\" is missing");
    return tl::unexpected(std::move(errors).take());
  }
  read_map(Place{*tree, "", errors}, config, config_fields);
  // With another value refused the numbers would be those of the default, not the user's.
  if (errors.empty()) check_geometry(*tree, config, errors);
  if (!errors.empty()) return tl::unexpected(std::move(errors).take());
  if (config.listen.empty()) {
    Listen everywhere;
    everywhere.text = "tcp:*:1234";
    config.listen.push_back(std::move(everywhere));
  }
  return config;
}

tl::expected<Config, ConfigError> load_file(const std::string& path) {
  const auto failed = [&path](std::string_view what) {
    return tl::unexpected(ConfigError{path + ": " + std::string(what)});
  };
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY));
  if (file.get() < 0) return failed("cannot be opened: " + std::string(std::strerror(errno)));
  struct stat status {};
  if (fstat(file.get(), &status) == 0 && S_ISDIR(status.st_mode)) {
    return failed("is a directory, not a file");
  }
  // One byte more than allowed, so that parse() sees a file that is too large.
  std::string text(file_bytes_max + 1, '\0');
  size_t used = 0;
  while (used < text.size()) {
    const ssize_t got = read(file.get(), text.data() + used, text.size() - used);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return failed("cannot be read: " + std::string(std::strerror(errno)));
    if (got == 0) break;
    used += static_cast<size_t>(got);
  }
  text.resize(used);
  return parse(text, path);
}

std::vector<std::string> known_keys() {
  std::vector<std::string> keys;
  append_keys(keys, "", config_fields);
  append_keys(keys, "volumes[].", volume_fields);
  append_keys(keys, "volumes[].allow[].", allow_fields);
  return keys;
}

}  // namespace rtrsnbd::config
