// SPDX-License-Identifier: Apache-2.0
// HostMemory finds out how much more memory this process can allocate. It reads MemAvailable of the system,
// the limits of the control groups of the process (v1 and v2, with their parent groups), and the limits of
// the process itself (ulimit -v, -d).
//
// Thread-safe. Every call reads the system's files again.
#ifndef LOSSD_KERNELS_HOST_MEMORY_H_
#define LOSSD_KERNELS_HOST_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace lossd::kernels {

// Reads the system's files about memory.
class HostMemory {
 public:
  // The tightest of several bounds.
  struct Bound {
    int64_t bytes = 0;  // how much more can be allocated; may be negative
    std::string what;   // for people: what sets the bound, with its figures
  };

  // `root`: a prefix for all paths, such as /proc; for tests.
  explicit HostMemory(std::string root = "") : root_(std::move(root)) {}

  // The tightest bound; nullopt if the system reports none.
  std::optional<Bound> Available() const;
  // Bytes of this process's anonymous memory that are in RAM; 0 if the system does not report them.
  int64_t ResidentBytes() const;

 private:
  const std::string root_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_HOST_MEMORY_H_
