// SPDX-License-Identifier: Apache-2.0
// Nccl (collectives.h) in a build without NCCL's header: every call fails. The file is shorter than 60 lines
// because it stands in for nccl.cc.
#include "kernels/cuda/device/collectives.h"

namespace lossd::kernels::cuda {

struct Nccl::Library {};

Nccl::~Nccl() = default;

absl::Status Nccl::CheckLoads() {
  return absl::UnavailableError(
      "GPUs that exchange by NCCL need it, and this program was built without it (libnccl-dev)");
}

absl::StatusOr<std::unique_ptr<Nccl>> Nccl::Connect(std::vector<int>, absl::Duration) { return CheckLoads(); }
absl::StatusOr<std::string> Nccl::NewId() { return CheckLoads(); }
absl::StatusOr<std::string> Nccl::Version() { return CheckLoads(); }
absl::StatusOr<std::unique_ptr<Nccl>> Nccl::Join(int, Replica, const std::string&, absl::Duration) {
  return CheckLoads();
}

// Never called: no object of the class can be made.
absl::Status Nccl::Sum(const std::vector<Part>&, int64_t, int) { return failure(); }
absl::Status Nccl::Spread(const std::vector<Part>&, DType, int64_t, int) { return failure(); }
absl::Status Nccl::SumOfAll(const Part&, int64_t) { return failure(); }
absl::Status Nccl::Gather(const Part&, const void*, int64_t) { return failure(); }
absl::Status Nccl::SumPlaces(const Part&, int64_t) { return failure(); }
absl::Status Nccl::MakeLinks() { return failure(); }
absl::Status Nccl::SumShards(const std::vector<Part>&, int64_t) { return failure(); }
absl::Status Nccl::SpreadShards(const std::vector<Part>&, DType, int64_t) { return failure(); }
absl::Status Nccl::Watched(absl::FunctionRef<absl::Status()>) { return failure(); }
absl::Status Nccl::Enqueue(absl::FunctionRef<absl::Status()>) { return failure(); }
absl::Status Nccl::Wait(const std::vector<Part>&, absl::Duration) { return failure(); }
absl::Status Nccl::Wait(int, cudaEvent_t, absl::Duration) { return failure(); }
absl::Status Nccl::Abort(absl::Status reason) { return reason; }
absl::Status Nccl::failure() const { return CheckLoads(); }

}  // namespace lossd::kernels::cuda
