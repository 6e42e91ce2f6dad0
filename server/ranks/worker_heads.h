// SPDX-License-Identifier: Apache-2.0
// The heads of a worker's backend: carries out what the leader asks of them.
//
// Driven by one thread, the backend's driving thread; what `send` is given may come from the backend's own.
#ifndef LOSSD_SERVER_RANKS_WORKER_HEADS_H_
#define LOSSD_SERVER_RANKS_WORKER_HEADS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "kernels/rank_link.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "server/ranks/mapped_rows.h"
#include "server/ranks/worker_buffers.h"

namespace lossd::ranks {

class WorkerHeads {
 public:
  using Send = std::function<void(v1::FromWorker)>;  // thread-safe

  // All outlive the object, and chunks in flight do too: they end before it.
  WorkerHeads(kernels::Backend* backend, kernels::RankLink* link, Send send);
  // Maps what the leader shares. UNAVAILABLE, saying why, if all slices have to bring their rows. Before the
  // first chunk.
  absl::Status UseRowsOf(const v1::Prepare& prepare);

  v1::Answer Execute(const v1::Request& request);
  kernels::HeadKernels* Find(uint64_t head) const;  // null: there is none
  // A chunk with all its slices. INTERNAL if it is not one.
  absl::Status Submit(const v1::ChunkStart& start, std::vector<v1::ChunkSlice> slices);

 private:
  struct Head {
    std::unique_ptr<kernels::HeadKernels> kernels;
    std::unique_ptr<kernels::Replicas> replicas;  // ends first; null of a head that is split by vocabulary
  };

  absl::Status Do(const v1::Request& request, v1::Answer& answer);
  absl::Status DoWith(Head& head, const v1::Request& request, v1::Answer& answer);
  absl::Status Plan(const v1::HeadConfig& config, v1::Answer& answer);
  absl::Status Create(uint64_t id, const v1::HeadConfig& config, v1::Answer& answer);
  absl::Status Join(kernels::HeadKernels* head, std::unique_ptr<kernels::Replicas>& replicas);
  absl::Status Read(Head& head, const v1::TensorAccess& access, v1::Answer& answer);
  absl::Status Write(Head& head, const v1::TensorAccess& access, bool add);

  kernels::Backend* const backend_;
  kernels::RankLink* const link_;
  const Send send_;
  const std::shared_ptr<WorkerBuffers> buffers_;
  std::unique_ptr<MappedRows> rows_;  // null: all slices bring their rows
  std::map<uint64_t, Head> heads_;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_WORKER_HEADS_H_
