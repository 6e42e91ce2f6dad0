// SPDX-License-Identifier: Apache-2.0
// Lets tests set the wall clock of their program. The program has its own clock_gettime, which is
// `system_ahead` seconds ahead of the kernel's. All code of the program sees this wall clock, also libraries;
// the steady clock does not change. Include this header in one source of a program. A program with a
// sanitizer keeps the system's function.
#ifndef LOSSD_TESTS_SUPPORT_SYSTEM_CLOCK_H_
#define LOSSD_TESTS_SUPPORT_SYSTEM_CLOCK_H_

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace lossd::test {

inline std::atomic<int64_t> system_ahead{0};  // seconds

}  // namespace lossd::test

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
extern "C" int clock_gettime(clockid_t clock, struct timespec* time) noexcept {
  const long result = syscall(SYS_clock_gettime, clock, time);
  if (result == 0 && clock == CLOCK_REALTIME) time->tv_sec += lossd::test::system_ahead;
  return static_cast<int>(result);
}
inline constexpr bool kMovesTheSystemsClock = true;
#else
inline constexpr bool kMovesTheSystemsClock = false;
#endif

#endif  // LOSSD_TESTS_SUPPORT_SYSTEM_CLOCK_H_
