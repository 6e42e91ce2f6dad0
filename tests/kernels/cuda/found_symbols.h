// SPDX-License-Identifier: Apache-2.0
// Functions of libraries that are loaded at run time, replaced by tests: the linker sends calls of dlsym to
// cuda_faults_test.cc, which asks every function here in turn. Files add theirs before main; not thread-safe
// then.
#ifndef LOSSD_TESTS_KERNELS_CUDA_FOUND_SYMBOLS_H_
#define LOSSD_TESTS_KERNELS_CUDA_FOUND_SYMBOLS_H_

#include <vector>

namespace lossd::kernels::testing {

// What dlsym returns for `name` in `file` in the place of `found`, which it may be, and which may be null.
// `real`: dlsym.
using FoundSymbol = void* (*)(void* file, const char* name, void* found, void* (*real)(void*, const char*));

inline std::vector<FoundSymbol>& FoundSymbols() {
  static auto* const symbols = new std::vector<FoundSymbol>();
  return *symbols;
}

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_CUDA_FOUND_SYMBOLS_H_
