// SPDX-License-Identifier: Apache-2.0
// How many attempts a test makes, where more of the same is possible: few in `make test`, all of them in the
// nightly suite, whose ctest entries set LOSSD_NIGHTLY=1 (lossd_nightly). Thread-safe.
#ifndef LOSSD_TESTS_SUPPORT_EFFORT_H_
#define LOSSD_TESTS_SUPPORT_EFFORT_H_

#include <cstdint>
#include <cstdlib>
#include <random>
#include <string_view>

namespace lossd::test {

inline bool Nightly() {
  const char* const nightly = std::getenv("LOSSD_NIGHTLY");
  return nightly != nullptr && std::string_view(nightly) == "1";
}

// The number of attempts to make.
inline int64_t Attempts(int64_t usual, int64_t nightly) { return Nightly() ? nightly : usual; }

// Which of the places 0, 1, 2, ... to try: all of them in the nightly suite; otherwise every `stride`-th,
// starting at random, so that several runs together try all.
struct Places {
  explicit Places(int64_t usual_stride)
      : stride(Nightly() ? 1 : usual_stride), first(static_cast<int64_t>(std::random_device{}()) % stride) {}
  int64_t stride;
  int64_t first;  // in [0, stride)
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_SUPPORT_EFFORT_H_
