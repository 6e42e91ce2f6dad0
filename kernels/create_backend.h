// The one place that knows which backends this build has.
#ifndef LOSSD_KERNELS_CREATE_BACKEND_H_
#define LOSSD_KERNELS_CREATE_BACKEND_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace lossd::kernels {

struct BackendChoice {
  std::string backend = "auto";  // "auto" (CUDA if there is a usable GPU, else CPU), "cpu" or "cuda"
  std::string device = "0";      // CUDA: index among the visible GPUs, or a UUID ("GPU-" or "MIG-" and so on)
  int threads = 0;               // CPU: 0: all the process may use
  int64_t workspace_bytes = 0;   // per head; 0: the backend's default
  int64_t memory_limit_bytes = 0;                     // 0: none
  int64_t memory_reserve_bytes = int64_t{256} << 20;  // CPU: left to others of what the system can give
  bool deterministic = false;  // nothing that may differ between runs of the program, whatever it gains
};

struct CreatedBackend {
  std::unique_ptr<Backend> backend;
  std::string note;  // why "auto" did not take a GPU; empty if there is nothing to say
};

// INVALID_ARGUMENT naming the option if one is out of range, UNAVAILABLE if "cuda" was asked for and this
// build or this machine has none. Thread-safe.
absl::StatusOr<CreatedBackend> CreateBackend(const BackendChoice& choice);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CREATE_BACKEND_H_
