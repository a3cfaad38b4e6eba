// SPDX-License-Identifier: BSD-3-Clause
#include "config/values.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace rtrsnbd::config {
namespace {

struct Unit {
  std::string_view name;
  uint64_t factor;
};
constexpr std::array<Unit, 4> size_units{{{"TiB", uint64_t{1} << 40},
                                          {"GiB", uint64_t{1} << 30},
                                          {"MiB", uint64_t{1} << 20},
                                          {"KiB", uint64_t{1} << 10}}};
constexpr std::array<Unit, 4> duration_units{
    {{"h", 3600 * 1000}, {"min", 60 * 1000}, {"s", 1000}, {"ms", 1}}};

tl::unexpected<std::string> refusal(std::string sentence) {
  return tl::unexpected<std::string>(std::move(sentence));
}

constexpr size_t host_name_max = 253;  // RFC 1035, as text

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

std::string_view leading_digits(std::string_view text) {
  return text.substr(
      0, static_cast<size_t>(std::find_if_not(text.begin(), text.end(), is_digit) - text.begin()));
}

// Only digits may be passed. Nothing if the number does not fit.
std::optional<uint64_t> number(std::string_view digits) {
  uint64_t value = 0;
  for (const char c : digits) {
    const auto digit = static_cast<uint64_t>(c - '0');
    if (value > (std::numeric_limits<uint64_t>::max() - digit) / 10) return std::nullopt;
    value = value * 10 + digit;
  }
  return value;
}

std::string with_largest_unit(uint64_t value, std::span<const Unit> units) {
  for (const Unit& unit : units) {
    if (value >= unit.factor && value % unit.factor == 0) {
      return std::to_string(value / unit.factor) + std::string(unit.name);
    }
  }
  return std::to_string(value);
}

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

std::string lowered(std::string_view text) {
  std::string result(text);
  std::transform(text.begin(), text.end(), result.begin(), lower);
  return result;
}

// The unit a wrong suffix was probably meant as: 1G, 1GB, 1gib and the like.
const Unit* meant_size_unit(std::string_view suffix) {
  if (suffix.empty() || suffix.size() > 3) return nullptr;
  const auto* unit = std::find_if(size_units.begin(), size_units.end(), [suffix](const Unit& u) {
    return lower(u.name.front()) == lower(suffix.front());
  });
  if (unit == size_units.end()) return nullptr;
  const std::string rest = lowered(suffix.substr(1));
  return rest.empty() || rest == "b" || rest == "i" || rest == "ib" ? unit : nullptr;
}

std::string_view meant_duration_unit(std::string_view suffix) {
  const std::string word = lowered(suffix);
  if (word == "m" || word == "minute" || word == "minutes" || word == "min") return "min";
  if (word == "sec" || word == "secs" || word == "second" || word == "seconds" || word == "s")
    return "s";
  if (word == "hour" || word == "hours" || word == "hr" || word == "h") return "h";
  if (word == "msec" || word == "msecs" || word == "ms" || word == "milliseconds") return "ms";
  return {};
}

struct Quantity {
  std::string_view digits;
  std::string_view suffix;  // without the blank in front
};

// Nothing if text does not start with a plain decimal number.
std::optional<Quantity> split_quantity(std::string_view text) {
  const std::string_view digits = leading_digits(text);
  if (digits.empty() || (digits.size() > 1 && digits.front() == '0')) return std::nullopt;
  std::string_view suffix = text.substr(digits.size());
  if (suffix.size() > 1 && suffix.front() == ' ') suffix.remove_prefix(1);
  return Quantity{digits, suffix};
}

bool valid_ipv4(const std::string& text) {
  in_addr address{};
  return inet_pton(AF_INET, text.c_str(), &address) == 1;
}

bool valid_ipv6(const std::string& text) {
  in6_addr address{};
  return inet_pton(AF_INET6, text.c_str(), &address) == 1;
}

bool plausible_host_name(std::string_view text) {
  const auto allowed = [](char c) {
    return is_digit(c) || (lower(c) >= 'a' && lower(c) <= 'z') || c == '-' || c == '.' || c == '_';
  };
  return text.size() <= host_name_max && std::all_of(text.begin(), text.end(), allowed);
}

constexpr std::string_view listen_accepted =
    "accepted: tcp:HOST:PORT or rdma:HOST:PORT, HOST and PORT may be left out";

Parsed<uint16_t> parse_port(std::string_view text) {
  const Parsed<uint64_t> port = parse_integer(text, 1, 65535);
  if (!port) return refusal("port \"" + std::string(text) + "\" is not a number from 1 to 65535");
  return static_cast<uint16_t>(*port);
}

}  // namespace

Parsed<uint64_t> parse_integer(std::string_view text, uint64_t min, uint64_t max) {
  const std::string accepted =
      "accepted: a number from " + std::to_string(min) + " to " + std::to_string(max);
  if (text.empty() || leading_digits(text).size() != text.size()) return refusal(accepted);
  if (text.size() > 1 && text.front() == '0') {
    return refusal(accepted + ", without leading zeros");
  }
  const std::optional<uint64_t> value = number(text);
  if (!value || *value < min || *value > max) return refusal(accepted);
  return *value;
}

Parsed<uint64_t> parse_size(std::string_view text, uint64_t min, uint64_t max) {
  const std::string accepted =
      "accepted: bytes, or a whole number with KiB, MiB, GiB or TiB, from " + size_text(min) +
      " to " + size_text(max);
  const std::optional<Quantity> quantity = split_quantity(text);
  if (!quantity) return refusal(accepted);
  uint64_t factor = 1;
  if (!quantity->suffix.empty()) {
    const auto* unit =
        std::find_if(size_units.begin(), size_units.end(),
                     [&quantity](const Unit& u) { return u.name == quantity->suffix; });
    if (unit == size_units.end()) {
      const Unit* meant = meant_size_unit(quantity->suffix);
      if (meant == nullptr) return refusal(accepted);
      return refusal("unit \"" + std::string(quantity->suffix) + "\" is ambiguous; write \"" +
                     std::string(quantity->digits) + std::string(meant->name) + "\" for units of " +
                     std::to_string(meant->factor) + " bytes, or plain bytes");
    }
    factor = unit->factor;
  }
  const std::optional<uint64_t> count = number(quantity->digits);
  if (!count || *count > std::numeric_limits<uint64_t>::max() / factor || *count * factor < min ||
      *count * factor > max) {
    return refusal(accepted);
  }
  return *count * factor;
}

Parsed<std::chrono::milliseconds> parse_duration(std::string_view text,
                                                 std::chrono::milliseconds min,
                                                 std::chrono::milliseconds max) {
  const std::string accepted = "accepted: a whole number with ms, s, min or h, from " +
                               duration_text(min) + " to " + duration_text(max);
  const std::optional<Quantity> quantity = split_quantity(text);
  if (!quantity) return refusal(accepted);
  if (quantity->suffix.empty()) {
    return refusal("a unit is missing; " + accepted);
  }
  const auto* unit =
      std::find_if(duration_units.begin(), duration_units.end(),
                   [&quantity](const Unit& u) { return u.name == quantity->suffix; });
  if (unit == duration_units.end()) {
    const std::string_view meant = meant_duration_unit(quantity->suffix);
    if (meant.empty()) return refusal(accepted);
    return refusal("unknown unit \"" + std::string(quantity->suffix) + "\"; did you mean \"" +
                   std::string(quantity->digits) + std::string(meant) + "\"?");
  }
  const std::optional<uint64_t> count = number(quantity->digits);
  if (!count || *count > static_cast<uint64_t>(max.count()) / unit->factor ||
      *count * unit->factor < static_cast<uint64_t>(min.count())) {
    return refusal(accepted);
  }
  return std::chrono::milliseconds(*count * unit->factor);
}

Parsed<bool> parse_boolean(std::string_view text) {
  if (text == "true") return true;
  if (text == "false") return false;
  const std::string word = lowered(text);
  if (word == "yes" || word == "on" || word == "y" || word == "1" || word == "true") {
    return refusal("write \"true\"; accepted: true, false");
  }
  if (word == "no" || word == "off" || word == "n" || word == "0" || word == "false") {
    return refusal("write \"false\"; accepted: true, false");
  }
  return refusal("accepted: true, false");
}

Parsed<Listen> parse_listen(std::string_view text) {
  Listen listen;
  listen.text = std::string(text);
  std::string_view rest = text;
  const size_t scheme_length = rest.find(':');
  listen.scheme = std::string(rest.substr(0, scheme_length));
  if (scheme_length == std::string_view::npos ||
      (listen.scheme != "tcp" && listen.scheme != "rdma"))
    return refusal(std::string(listen_accepted));
  rest.remove_prefix(scheme_length + 1);
  if (rest.starts_with("//")) rest.remove_prefix(2);

  std::optional<std::string_view> port;
  if (rest.starts_with('[')) {
    const size_t close = rest.find(']');
    if (close == std::string_view::npos) return refusal("\"]\" is missing after the IPv6 address");
    listen.host = std::string(rest.substr(1, close - 1));
    // An interface after "%" (RFC 4007) is left to the resolver.
    if (!valid_ipv6(listen.host.substr(0, listen.host.find('%')))) {
      return refusal("\"" + listen.host + "\" is not an IPv6 address");
    }
    rest.remove_prefix(close + 1);
    if (!rest.empty()) {
      if (rest.front() != ':') return refusal(std::string(listen_accepted));
      port = rest.substr(1);
    }
  } else {
    const size_t colon = rest.find(':');
    if (colon != std::string_view::npos) {
      port = rest.substr(colon + 1);
      if (port->find(':') != std::string_view::npos) {
        return refusal("an IPv6 address stands in brackets: " + listen.scheme + ":[::1]:1234");
      }
    }
    const std::string_view host = rest.substr(0, colon);
    if (host != "*") listen.host = std::string(host);
    if (!plausible_host_name(listen.host)) {
      return refusal("\"" + listen.host + "\" is not a host name or address");
    }
    const bool numeric =
        !listen.host.empty() && listen.host.find_first_not_of("0123456789.") == std::string::npos;
    if (numeric && !valid_ipv4(listen.host)) {
      return refusal("\"" + listen.host + "\" is not an IPv4 address; a port follows a colon: " +
                     listen.scheme + "::1234");
    }
  }
  if (port) {
    const Parsed<uint16_t> number_of_port = parse_port(*port);
    if (!number_of_port) return refusal(number_of_port.error());
    listen.port = *number_of_port;
  }
  return listen;
}

Parsed<std::string> parse_network(std::string_view text) {
  constexpr std::string_view accepted =
      "accepted: an IPv4 or IPv6 address, or a network as 192.0.2.0/24";
  const size_t slash = text.find('/');
  const std::string host(text.substr(0, slash));
  std::array<uint8_t, 16> bytes{};
  size_t bits = 0;
  if (inet_pton(AF_INET, host.c_str(), bytes.data()) == 1) {
    bits = 32;
  } else if (inet_pton(AF_INET6, host.c_str(), bytes.data()) == 1) {
    bits = 128;
  } else {
    return refusal(std::string(accepted));
  }
  if (slash == std::string_view::npos) return std::string(text);
  const Parsed<uint64_t> prefix = parse_integer(text.substr(slash + 1), 0, bits);
  if (!prefix) {
    return refusal("the part behind \"/\" is a number of bits from 0 to " + std::to_string(bits));
  }
  for (size_t bit = *prefix; bit < bits; ++bit) {
    if ((bytes[bit / 8] & (0x80U >> (bit % 8))) != 0) {
      return refusal("bits behind the first " + std::to_string(*prefix) +
                     " are set; write the network's own address, or the host's without \"/\"");
    }
  }
  return std::string(text);
}

std::string size_text(uint64_t bytes) {
  return with_largest_unit(bytes, size_units);
}

std::string duration_text(std::chrono::milliseconds duration) {
  if (duration.count() == 0) return "0s";
  return with_largest_unit(static_cast<uint64_t>(duration.count()), duration_units);
}

std::string_view near_match(std::string_view word,
                            const std::vector<std::string_view>& candidates) {
  constexpr size_t word_max = 64;
  if (word.empty() || word.size() > word_max) return {};
  std::string normal = lowered(word);
  std::replace(normal.begin(), normal.end(), '_', '-');
  std::string_view best;
  size_t best_distance = std::max<size_t>(1, normal.size() / 3) + 1;
  for (const std::string_view candidate : candidates) {
    // Levenshtein distance, one row at a time.
    std::vector<size_t> row(candidate.size() + 1);
    std::iota(row.begin(), row.end(), size_t{0});
    for (size_t i = 0; i < normal.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i + 1;
      for (size_t j = 0; j < candidate.size(); ++j) {
        const size_t replaced = diagonal + (normal[i] == candidate[j] ? 0 : 1);
        diagonal = row[j + 1];
        row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
      }
    }
    if (row.back() < best_distance) {
      best = candidate;
      best_distance = row.back();
    }
  }
  return best;
}

}  // namespace rtrsnbd::config
