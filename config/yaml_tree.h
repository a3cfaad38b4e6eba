// SPDX-License-Identifier: BSD-3-Clause
// YAML text as a small tree that remembers lines, key order and repeated keys, which is what a
// strict reader needs and what yaml-cpp's own nodes do not keep. What a configuration file has no
// use for is refused here, with its line: anchors, aliases, tags, several documents, tabs as
// indentation, control characters, text that is not UTF-8, and depth or size beyond the bounds
// below.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <vector>

namespace rtrsnbd::config {

inline constexpr size_t file_bytes_max = size_t{1} << 20;
inline constexpr size_t depth_max = 16;      // the schema needs five
inline constexpr size_t nodes_max = 100000;  // keys and values

struct Entry;

struct Node {
  enum class Kind { null, scalar, sequence, map };
  Kind kind = Kind::null;
  int line = 0;                // from 1
  bool quoted = false;         // scalar: in quotes or as a block
  std::string text;            // scalar
  std::vector<Node> items;     // sequence
  std::vector<Entry> entries;  // map, in the order of the file, repeated keys and all
};

struct Entry {
  std::string key;
  int line = 0;
  Node value;
};

struct YamlError {
  int line = 0;  // 0: unknown
  std::string text;
};

// An empty document is a null node.
tl::expected<Node, YamlError> parse_yaml(std::string_view text);

}  // namespace rtrsnbd::config
