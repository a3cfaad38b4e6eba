// SPDX-License-Identifier: BSD-3-Clause
// rtrsd.yaml as any bytes. Whatever comes in, the answer is a configuration within the documented
// bounds or a complaint that names the file.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "config/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace rtrsnbd::config;
  const auto config = parse(std::string_view(reinterpret_cast<const char*>(data), size), "F");
  const auto expect = [](bool truth) {
    if (!truth) std::abort();
  };
  if (!config) {
    expect(config.error().text.starts_with("F:"));
    return 0;
  }
  expect(!config->listen.empty());
  expect(!config->volumes.empty());
  expect(config->queue_depth >= 1);
  expect(config->max_io_size % 4096 == 0);
  expect(config->queue_depth * (config->max_io_size + 4096) <= config->memory_max);
  for (const Volume& volume : config->volumes) {
    expect(!volume.name.empty() && volume.name.size() <= 254);
    expect(volume.path.starts_with('/'));
    expect(volume.size % 512 == 0);
    for (const AccessRule& rule : volume.allow)
      expect(!rule.address.empty() || !rule.session.empty());
  }
  return 0;
}
