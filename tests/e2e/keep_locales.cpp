// SPDX-License-Identifier: BSD-3-Clause
// Preloaded beside a sanitizer's runtime. In a process that preloads one, glibc 2.36 comes up with
// one reader too few in the lock of its locales (seen with nbdkit's own plugins as well). After the
// next translated error message whoever writes waits for ever; that is p11-kit, which nbdkit links,
// when it frees its locale at exit.
#include <locale.h>

extern "C" void freelocale(locale_t) noexcept {}
