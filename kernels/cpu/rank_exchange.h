// SPDX-License-Identifier: Apache-2.0
// The class exchange of a head whose parts lie in several processes, one in each.
#ifndef LOSSD_KERNELS_CPU_RANK_EXCHANGE_H_
#define LOSSD_KERNELS_CPU_RANK_EXCHANGE_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/cpu/class_exchange.h"
#include "kernels/exchange_times.h"
#include "kernels/host_transfers.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// What carries an exchange between ranks. Called by one thread at a time.
class RankTransfers {
 public:
  virtual ~RankTransfers() = default;

  virtual Replica replica() const = 0;  // this rank, of how many
  // Where to put what a rank sends: aligned to 64, of the same size for all ranks. Overwritten by the next
  // user.
  virtual absl::Span<uint8_t> Room(int rank) = 0;
  // As HostTransfers::Exchange; `kind` is what its time counts as.
  virtual absl::Status Exchange(ExchangeKind kind, absl::Span<const RankTransfer> send,
                                absl::Span<const RankTransfer> receive) = 0;
};

// The bits are those of a ThreadExchange with as many parts. All rows are delivered by rank 0.
class RankExchange final : public ClassExchange {
 public:
  // `transfers` outlives the object.
  explicit RankExchange(RankTransfers* transfers) : transfers_(transfers) {}

  absl::Status MergeStatistics(int part, absl::Span<const RowStatistics> own,
                               absl::Span<RowStatistics> merged) override;
  absl::Status MergeGradients(int part, absl::Span<const GradientSums> own,
                              absl::Span<RowResult> results) override;
  absl::StatusOr<RowRange> SumRows(int part, float* own, RowRange rows, int64_t cols) override;
  absl::Status AddSums(int part, const float* own, float* to, int64_t n) override;
  absl::StatusOr<RowRange> CollectRows(int part, float* own, RowRange rows, RowRange wanted,
                                       int64_t cols) override;

 private:
  int ranks() const { return transfers_->replica().count; }
  // Has every rank send all of its `own` [n] to all others, and calls `merge` for pieces of it: elements
  // [first, first + n) of all ranks, in their order.
  template <typename T>
  absl::Status ForAll(
      ExchangeKind kind, int part, const T* own, int64_t n,
      absl::FunctionRef<void(int64_t first, int64_t n, absl::Span<const T* const> of_rank)> merge);

  RankTransfers* const transfers_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_RANK_EXCHANGE_H_
