// SPDX-License-Identifier: Apache-2.0
// Accounting of planned memory by purpose. Plain data; thread-compatible.
#ifndef LOSSD_KERNELS_MEMORY_H_
#define LOSSD_KERNELS_MEMORY_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace lossd::kernels {

enum class MemoryKind : uint8_t {
  kWeights,    // fp32 master weights, 16-bit compute copies, bias, norm, class weights
  kGradients,  // fp32 accumulators
  kOptimizer,  // momentum and Adam moments
  kWorkspace,  // what is computed on the way: logits, sums, lists, rows being converted
  kSlots,      // on a device: hidden states, gradients, inputs and results of rows, of chunks or clients
  kStaging,    // host buffers that slices are received into and sent from
  kRetained,   // hidden states of deferred microbatches, waiting for their backward pass
  kLedger,     // on the host: targets and weights of open streams, ledgers of open steps
};
inline constexpr size_t kMemoryKinds = 8;

constexpr absl::string_view Name(MemoryKind kind) {
  constexpr absl::string_view kNames[kMemoryKinds] = {"weights", "gradients", "optimizer", "workspace",
                                                      "slots",   "staging",   "retained",  "ledger"};
  return kNames[static_cast<size_t>(kind)];
}

// Bytes by kind.
struct MemoryBytes {
  std::array<int64_t, kMemoryKinds> by_kind{};

  int64_t& operator[](MemoryKind kind) { return by_kind[static_cast<size_t>(kind)]; }
  int64_t operator[](MemoryKind kind) const { return by_kind[static_cast<size_t>(kind)]; }
  int64_t Total() const {
    int64_t total = 0;
    for (int64_t bytes : by_kind) total += bytes;
    return total;
  }
};

// What a backend holds now and has held at most since it was created.
struct MemoryStats {
  MemoryBytes current;
  MemoryBytes peak;        // each kind's own peak
  int64_t peak_total = 0;  // peak of the sum over kinds
  int64_t limit = 0;       // bytes the plan may reach; 0: unlimited
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_MEMORY_H_
