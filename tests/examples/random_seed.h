// SPDX-License-Identifier: Apache-2.0
// A fresh seed for a test's random inputs, printed so that a failure can be repeated with LOSSD_TEST_SEED.
#ifndef LOSSD_TESTS_EXAMPLES_RANDOM_SEED_H_
#define LOSSD_TESTS_EXAMPLES_RANDOM_SEED_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace lossd::ngram_lm {

inline uint64_t FreshSeed() {
  const char* given = std::getenv("LOSSD_TEST_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::printf("LOSSD_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace lossd::ngram_lm

#endif  // LOSSD_TESTS_EXAMPLES_RANDOM_SEED_H_
