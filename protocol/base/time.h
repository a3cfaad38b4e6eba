// SPDX-License-Identifier: BSD-3-Clause
// Time as the state machines see it: a monotonic instant that the caller passes in. Nothing below
// daemon/ and plugin/ reads a clock by itself, so that tests can drive every timer without waiting.
#pragma once

#include <chrono>

namespace rtrsnbd {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Duration = Clock::duration;

}  // namespace rtrsnbd
