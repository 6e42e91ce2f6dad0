// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_group.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/cuda/cuda_backend.h"

namespace lossd::bench {

absl::StatusOr<std::unique_ptr<kernels::Backend>> CreateGpus(int devices,
                                                             const kernels::CudaBackendOptions& options) {
  if (devices == 1) return kernels::CreateCudaBackend(options);
  std::vector<std::unique_ptr<kernels::Backend>> members;
  for (int i = 0; i < devices; ++i) {
    kernels::CudaBackendOptions own = options;
    own.device = i;
    own.replica = {i, devices};
    auto member = kernels::CreateCudaBackend(own);
    if (!member.ok()) return member.status();
    members.push_back(*std::move(member));
  }
  std::vector<int> gpus(static_cast<size_t>(devices));
  std::iota(gpus.begin(), gpus.end(), 0);
  auto connection = kernels::CudaReplicaGroup::Create(std::move(gpus));
  if (!connection.ok()) return connection.status();
  const std::shared_ptr<kernels::CudaReplicaGroup> shared = *std::move(connection);
  if (cudaSetDevice(0) != cudaSuccess) return absl::UnavailableError("cudaSetDevice failed");
  using Heads = absl::Span<kernels::HeadKernels* const>;
  return kernels::CreateGroupBackend(std::move(members),
                                     [shared](Heads heads) { return shared->Connect(heads); },
                                     {.join_classes = [shared](Heads heads) { return shared->Join(heads); },
                                      .exchanges = shared->exchanges()});
}

ExchangeWatch::ExchangeWatch(const kernels::Backend& backend) : backend_(backend), begin_(Read()) {}

std::vector<kernels::ExchangeTimes> ExchangeWatch::Read() const {
  std::vector<kernels::ExchangeTimes> times;
  for (const kernels::MemberState& member : backend_.MemberStates()) times.push_back(member.exchanges);
  return times;
}

nlohmann::json ExchangeWatch::PerOne(int count) const {
  const std::vector<kernels::ExchangeTimes> end = Read();
  nlohmann::json found;
  for (size_t kind = 0; kind < kernels::kExchangeKinds && !end.empty(); ++kind) {
    std::vector<double> of_gpus;
    for (size_t i = 0; i < end.size(); ++i) {
      of_gpus.push_back(absl::ToDoubleMilliseconds(end[i][kind] - begin_[i][kind]) / count);
    }
    const auto [least, most] = std::minmax_element(of_gpus.begin(), of_gpus.end());
    const auto operation = std::string(kernels::Name(static_cast<kernels::ExchangeKind>(kind)));
    if (*most > 0.0) found[operation] = {{"least", *least}, {"most", *most}};
  }
  return found;
}

}  // namespace lossd::bench
