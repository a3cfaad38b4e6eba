// SPDX-License-Identifier: BSD-3-Clause
#include "config/yaml_tree.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <cassert>
#include <cstdint>
#include <istream>
#include <optional>
#include <streambuf>
#include <utility>

namespace rtrsnbd::config {
namespace {

// Leaves yaml-cpp from inside an event.
struct Refused {
  YamlError error;
};

[[noreturn]] void refuse(int line, std::string text) {
  throw Refused{{line, std::move(text)}};
}

int line_of(const YAML::Mark& mark) {
  return mark.is_null() ? 0 : mark.line + 1;
}

// Length of the UTF-8 sequence at the start of text, 0 if there is none (RFC 3629, section 4).
size_t utf8_length(std::string_view text) {
  const auto byte = [text](size_t index) {
    return index < text.size() ? static_cast<unsigned char>(text[index]) : 0U;
  };
  const auto continues = [&byte](size_t index) { return (byte(index) & 0xc0U) == 0x80U; };
  const unsigned first = byte(0);
  const unsigned second = byte(1);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return continues(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const bool shortest = first != 0xe0 || second >= 0xa0;
    const bool no_surrogate = first != 0xed || second < 0xa0;
    return shortest && no_surrogate && continues(1) && continues(2) ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const bool shortest = first != 0xf0 || second >= 0x90;
    const bool in_range = first != 0xf4 || second < 0x90;
    return shortest && in_range && continues(1) && continues(2) && continues(3) ? 4 : 0;
  }
  return 0;
}

// What yaml-cpp would let pass or would misread.
std::optional<YamlError> check_characters(std::string_view text) {
  int line = 1;
  bool in_indentation = true;
  for (size_t at = 0; at < text.size();) {
    const char c = text[at];
    if (c == '\n') {
      ++line;
      in_indentation = true;
      ++at;
      continue;
    }
    if (c == '\t' && in_indentation) {
      return YamlError{line, "a tab in the indentation; YAML wants spaces"};
    }
    if (c == '\r' && (at + 1 == text.size() || text[at + 1] != '\n')) {
      return YamlError{line, "a carriage return inside the line"};
    }
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x20 && c != '\t' && c != '\r') || byte == 0x7f) {
      return YamlError{line, "a control character; the file must be UTF-8 text"};
    }
    const size_t length = utf8_length(text.substr(at));
    if (length == 0) return YamlError{line, "not UTF-8 text"};
    // "-" counts as indentation, since the key behind it sets the column of the next lines.
    in_indentation = in_indentation && (c == ' ' || c == '-');
    at += length;
  }
  return std::nullopt;
}

class TreeBuilder : public YAML::EventHandler {
 public:
  void OnDocumentStart(const YAML::Mark& mark) override {
    if (document_seen_) refuse(line_of(mark), "a second YAML document; only one is read");
    document_seen_ = true;
  }
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    add(mark, "", anchor, Node::Kind::null);
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t /*anchor*/) override {
    refuse(line_of(mark), "an alias (*name); anchors and aliases are not supported here");
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    // yaml-cpp reports plain text as "?" and quoted text as "!".
    if (tag != "?" && tag != "!" && !tag.empty()) refuse_tag(mark);
    if (wants_key()) {
      check(mark, anchor);
      open_.back().node.entries.push_back({value, line_of(mark), {}});
      open_.back().value_is_next = true;
      return;
    }
    Node& node = add(mark, "", anchor, Node::Kind::scalar);
    node.text = value;
    node.quoted = tag == "!";
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value /*style*/) override {
    begin(mark, tag, anchor, Node::Kind::sequence);
  }
  void OnSequenceEnd() override { end(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value /*style*/) override {
    begin(mark, tag, anchor, Node::Kind::map);
  }
  void OnMapEnd() override { end(); }

  Node take() { return std::move(root_); }

 private:
  struct Open {
    Node node;
    bool value_is_next = false;  // map: the last entry has its key and waits for its value
  };

  [[noreturn]] static void refuse_tag(const YAML::Mark& mark) {
    refuse(line_of(mark), "a tag (!name); tags are not supported here");
  }

  [[nodiscard]] bool wants_key() const {
    return !open_.empty() && open_.back().node.kind == Node::Kind::map &&
           !open_.back().value_is_next;
  }

  void check(const YAML::Mark& mark, YAML::anchor_t anchor) {
    if (anchor != YAML::NullAnchor) {
      refuse(line_of(mark), "an anchor (&name); anchors and aliases are not supported here");
    }
    if (++nodes_ > nodes_max) {
      refuse(line_of(mark), "more than " + std::to_string(nodes_max) + " keys and values");
    }
  }

  // The place of a new value in the innermost open collection.
  Node& place(Node node) {
    if (open_.empty()) {
      root_ = std::move(node);
      return root_;
    }
    Open& parent = open_.back();
    if (parent.node.kind == Node::Kind::sequence) {
      return parent.node.items.emplace_back(std::move(node));
    }
    assert(parent.value_is_next);
    parent.value_is_next = false;
    Node& value = parent.node.entries.back().value;
    value = std::move(node);
    // yaml-cpp puts the mark of a missing value at the next token, maybe lines further down.
    if (value.kind == Node::Kind::null) value.line = parent.node.entries.back().line;
    return value;
  }

  Node& add(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
            Node::Kind kind) {
    check(mark, anchor);
    if (!tag.empty() && tag != "?") refuse_tag(mark);
    if (wants_key()) refuse(line_of(mark), "a key must be a word");
    Node node;
    node.kind = kind;
    node.line = line_of(mark);
    return place(std::move(node));
  }

  void begin(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
             Node::Kind kind) {
    check(mark, anchor);
    // A collection without a tag has none or "?"; "!" is an explicit one.
    if (!tag.empty() && tag != "?") refuse_tag(mark);
    if (wants_key()) refuse(line_of(mark), "a key must be a word, not a list or a map");
    if (open_.size() == depth_max) {
      refuse(line_of(mark), "nested deeper than " + std::to_string(depth_max) + " levels");
    }
    Open opened;
    opened.node.kind = kind;
    opened.node.line = line_of(mark);
    open_.push_back(std::move(opened));
  }

  void end() {
    assert(!open_.empty());
    Node node = std::move(open_.back().node);
    open_.pop_back();
    place(std::move(node));
  }

  std::vector<Open> open_;  // from the outside in
  Node root_;
  size_t nodes_ = 0;
  bool document_seen_ = false;
};

// An istream over a view: yaml-cpp reads streams only.
class ViewBuffer : public std::streambuf {
 public:
  explicit ViewBuffer(std::string_view text) {
    char* begin = const_cast<char*>(text.data());  // a get area is never written to
    setg(begin, begin, begin + text.size());
  }
};

}  // namespace

tl::expected<Node, YamlError> parse_yaml(std::string_view text) {
  if (text.size() > file_bytes_max) {
    return tl::unexpected(YamlError{0, "larger than " + std::to_string(file_bytes_max) + " bytes"});
  }
  if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);
  if (auto error = check_characters(text)) return tl::unexpected(std::move(*error));
  ViewBuffer buffer(text);
  std::istream stream(&buffer);
  try {
    YAML::Parser parser(stream);
    TreeBuilder builder;
    while (parser.HandleNextDocument(builder)) {
    }
    return builder.take();
  } catch (const Refused& refused) {
    return tl::unexpected(refused.error);
  } catch (const YAML::Exception& exception) {
    std::string why = "not valid YAML: " + exception.msg;
    if (exception.msg == YAML::ErrorMsg::MAP_VALUE) {
      why += "; a value with a colon before a blank or at its end needs quotes";
    }
    return tl::unexpected(YamlError{line_of(exception.mark), std::move(why)});
  }
}

}  // namespace rtrsnbd::config
