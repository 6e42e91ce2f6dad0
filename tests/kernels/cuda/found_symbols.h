// SPDX-License-Identifier: Apache-2.0
// FoundSymbols: lets tests replace functions of libraries that are loaded at run time. The linker redirects
// calls of dlsym to cuda_faults_test.cc, which calls every function in this list in turn. Source files add
// their functions before main(); adding is not thread-safe.
#ifndef LOSSD_TESTS_KERNELS_CUDA_FOUND_SYMBOLS_H_
#define LOSSD_TESTS_KERNELS_CUDA_FOUND_SYMBOLS_H_

#include <vector>

namespace lossd::kernels::testing {

// Returns what dlsym should return for `name` in `file`. `found` is the result so far, may be null, and may
// be returned. `real` is the real dlsym.
using FoundSymbol = void* (*)(void* file, const char* name, void* found, void* (*real)(void*, const char*));

inline std::vector<FoundSymbol>& FoundSymbols() {
  static auto* const symbols = new std::vector<FoundSymbol>();
  return *symbols;
}

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_CUDA_FOUND_SYMBOLS_H_
