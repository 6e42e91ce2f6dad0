// SPDX-License-Identifier: Apache-2.0
// The choice of the row loops (row_loops.h) by the instruction sets of the processor. The loops are listed
// from the narrowest set to the widest.
#include "kernels/cpu/row_loops.h"

namespace lossd::kernels {

extern const RowLoops kRowLoopsBaseline;
#ifdef __x86_64__
extern const RowLoops kRowLoopsAvx2;
extern const RowLoops kRowLoopsAvx512;
#endif

std::vector<const RowLoops*> AvailableRowLoops() {
  std::vector<const RowLoops*> loops = {&kRowLoopsBaseline};
#ifdef __x86_64__
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) loops.push_back(&kRowLoopsAvx2);
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) loops.push_back(&kRowLoopsAvx512);
#endif
  return loops;
}

const RowLoops& SelectRowLoops() {
  static const RowLoops* const kWidest = AvailableRowLoops().back();
  return *kWidest;
}

}  // namespace lossd::kernels
