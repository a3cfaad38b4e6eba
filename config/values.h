// SPDX-License-Identifier: BSD-3-Clause
// Texts of single values as numbers and addresses. Each function returns the value, or the sentence
// that says what is accepted instead; the caller adds file, line and key.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <tl/expected.hpp>

#include "config/config.h"

namespace rtrsnbd::config {

template <class T>
using Parsed = tl::expected<T, std::string>;

// Decimal digits only: no sign, no leading zero, no exponent, no other base.
Parsed<uint64_t> parse_integer(std::string_view text, uint64_t min, uint64_t max);

// Bytes, or a whole number with KiB, MiB, GiB or TiB (2^10, 2^20, ...), one blank allowed between.
Parsed<uint64_t> parse_size(std::string_view text, uint64_t min, uint64_t max);

// A whole number with ms, s, min or h.
Parsed<std::chrono::milliseconds> parse_duration(std::string_view text,
                                                 std::chrono::milliseconds min,
                                                 std::chrono::milliseconds max);

// "true" or "false".
Parsed<bool> parse_boolean(std::string_view text);

// tcp:HOST:PORT, tcp://HOST:PORT, and the same with rdma; HOST (or "*") and PORT may be left out,
// IPv6 stands in brackets.
Parsed<Listen> parse_listen(std::string_view text);

// A single IPv4 or IPv6 address or a network ADDRESS/BITS. Returns the text to match against.
Parsed<std::string> parse_network(std::string_view text);

// The inverse of parse_size with the largest unit that divides it.
std::string size_text(uint64_t bytes);
std::string duration_text(std::chrono::milliseconds duration);

// The candidate a slip of the fingers away from word, or empty.
std::string_view near_match(std::string_view word, const std::vector<std::string_view>& candidates);

}  // namespace rtrsnbd::config
