// SPDX-License-Identifier: Apache-2.0
// How much memory something takes at most.
#ifndef LOSSD_TESTS_SUPPORT_PEAK_MEMORY_H_
#define LOSSD_TESTS_SUPPORT_PEAK_MEMORY_H_

#include <cstdint>
#include <fstream>
#include <limits>
#include <string>

namespace lossd::test {

#if defined(__SANITIZE_ADDRESS__)
inline constexpr bool kFreedMemoryIsKept = true;
#elif defined(__has_feature)
inline constexpr bool kFreedMemoryIsKept = __has_feature(address_sanitizer);
#else
inline constexpr bool kFreedMemoryIsKept = false;
#endif

// A field of /proc/self/status in bytes; -1 without it.
inline int64_t StatusBytes(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string name; file >> name; file.ignore(std::numeric_limits<std::streamsize>::max(), '\n')) {
    int64_t kib = 0;
    if (name == field + ":" && file >> kib) return kib << 10;
  }
  return -1;
}

// By how many bytes the process grows at most while `work` runs; -1 if the system does not tell, and under
// the address sanitizer, which keeps what was freed.
template <typename Work>
int64_t PeakGrowth(const Work& work) {
  if (kFreedMemoryIsKept) {
    work();
    return -1;
  }
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts from now
  const int64_t before = StatusBytes("VmRSS");
  if (before < 0 || StatusBytes("VmHWM") > before + (int64_t{4} << 20)) return -1;
  work();
  return StatusBytes("VmHWM") - before;
}

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_PEAK_MEMORY_H_
