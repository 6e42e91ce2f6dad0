// SPDX-License-Identifier: Apache-2.0
// GlooLink: the link of a rank of a CPU backend (gloo_link.h). It carries the exchanges of chunks
// (RankExchange in row_loss.h), and the sums and copies over the replicas of a head (GlooReplicas).
//
// A rank is a process with one replica or one part of each head. Each replica owns a shard of the parameters,
// which it alone updates. A room is the buffer for what one rank sends at a time.
#include "kernels/cpu/gloo_link.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/cpu/cpu_head.h"
#include "kernels/cpu/row_loss.h"
#include "kernels/cpu/threads_and_memory.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "kernels/validation.h"

namespace lossd::kernels {
namespace {

// The size of one transfer from one rank to another, in bytes and in floats.
constexpr size_t kRoomBytes = size_t{1} << 20;
constexpr int64_t kPiece = int64_t{kRoomBytes / sizeof(float)};

// `transfers` carries the bytes.
class GlooLink final : public RankLink, public RankTransfers {
 public:
  explicit GlooLink(std::unique_ptr<HostTransfers> transfers) : transfers_(std::move(transfers)) {}

  std::vector<std::string> CollectivesOffered() const override { return {kGloo}; }
  absl::Status UseCollectives(const std::string& collectives) override;
  absl::StatusOr<std::string> Address() override { return transfers_->Address(); }
  absl::Status Connect(const std::vector<std::string>& addresses) override;
  absl::StatusOr<std::unique_ptr<Replicas>> Join(HeadKernels* head) override;
  absl::Status JoinClasses(HeadKernels* head) override;
  void WatchChunks(std::function<absl::Status(const absl::Status&)> on_failure) override {
    on_chunk_failure_ = std::move(on_failure);
  }
  ExchangeTimes Times() const override { return clocks_.Totals(); }
  void Abort(const absl::Status& reason) override { transfers_->Abort(reason); }

  Replica replica() const override { return transfers_->replica(); }
  absl::Span<uint8_t> Room(int rank) override { return {room_.get() + rank * kRoomBytes, kRoomBytes}; }
  absl::Status Exchange(ExchangeKind kind, absl::Span<const RankTransfer> send,
                        absl::Span<const RankTransfer> receive) override;
  // As Exchange, but its time is not counted in Times, and its failure is not reported to WatchChunks.
  absl::Status Transfer(absl::Span<const RankTransfer> send, absl::Span<const RankTransfer> receive) {
    return transfers_->Exchange(send, receive);
  }

 private:
  const std::unique_ptr<HostTransfers> transfers_;
  AlignedBytes room_;  // [ranks, kRoomBytes]
  ExchangeClocks clocks_;
  std::function<absl::Status(const absl::Status&)> on_chunk_failure_;
};

absl::Status GlooLink::UseCollectives(const std::string& collectives) {
  if (collectives == kGloo) return absl::OkStatus();
  return errors::FieldError("collectives", "be gloo on CPUs", collectives);
}

absl::Status GlooLink::Connect(const std::vector<std::string>& addresses) {
  LOSSD_TRY(room_, AllocateAligned(GlooLinkBytes(replica())));
  return transfers_->Connect(addresses);
}

absl::Status GlooLink::Exchange(ExchangeKind kind, absl::Span<const RankTransfer> send,
                                absl::Span<const RankTransfer> receive) {
  absl::Status status;
  {
    const auto counting = clocks_.During(kind);
    status = Transfer(send, receive);
  }
  return status.ok() || !on_chunk_failure_ ? status : on_chunk_failure_(status);
}

// The replicas of a head, one in each rank. SumGradients adds up the gradients of each shard at its owner;
// SpreadValues copies the values of each shard from its owner to all other ranks.
class GlooReplicas final : public Replicas {
 public:
  GlooReplicas(GlooLink* link, CpuParams* params) : link_(link), params_(params) {}

  absl::Status SumGradients() override {
    return ForEachShard([this](Param param) { return params_->gradient(param); },
                        [this](int owner, float* shard, int64_t n) { return SumPiece(owner, shard, n); });
  }

  absl::Status SpreadValues() override {
    return ForEachShard([this](Param param) { return params_->value(param); },
                        [this](int owner, float* shard, int64_t n) { return SpreadPiece(owner, shard, n); });
  }

 private:
  using TensorOf = absl::FunctionRef<float*(Param param)>;
  using Exchange = absl::FunctionRef<absl::Status(int owner, float* piece, int64_t n)>;

  bool owns(int owner) const { return owner == link_->replica().index; }
  std::vector<int> Others() const {
    std::vector<int> others;
    for (int rank = 0; rank < link_->replica().count; ++rank) {
      if (!owns(rank)) others.push_back(rank);
    }
    return others;
  }

  // Calls `exchange` for the pieces of all shards. Every rank does so in the same order.
  absl::Status ForEachShard(TensorOf tensor, Exchange exchange) {
    for (const Param param : kTrainedParams) {
      float* const all = tensor(param);
      if (all == nullptr) continue;
      const int64_t cols = ShapeOf(params_->config(), param).cols;
      for (int owner = 0; owner < link_->replica().count; ++owner) {
        const ShardRows rows = ShardRowsOf(params_->config(), param, {owner, link_->replica().count});
        for (int64_t from = 0; from < rows.rows * cols; from += kPiece) {
          const int64_t n = std::min(kPiece, rows.rows * cols - from);
          LOSSD_RETURN_IF_ERROR(exchange(owner, all + rows.first * cols + from, n));
        }
      }
    }
    return absl::OkStatus();
  }

  // Adds up the pieces of all ranks, in the order of the ranks, at the owner. The pieces of the other ranks
  // become zero.
  absl::Status SumPiece(int owner, float* piece, int64_t n) {
    const auto bytes = static_cast<size_t>(n) * sizeof(float);
    if (!owns(owner)) {
      absl::Status status = link_->Transfer({{owner, piece, bytes}}, {});
      std::fill_n(piece, n, 0.0f);
      return status;
    }
    std::vector<const float*> parts(static_cast<size_t>(link_->replica().count), piece);
    std::vector<RankTransfer> receive;
    for (const int rank : Others()) {
      uint8_t* const room = link_->Room(rank).data();
      parts[static_cast<size_t>(rank)] = reinterpret_cast<const float*>(room);
      receive.push_back({rank, room, bytes});
    }
    LOSSD_RETURN_IF_ERROR(link_->Transfer({}, receive));
    params_->pool().ParallelFor(n, kSumBlock, [&](int64_t begin, int64_t end) {
      for (int64_t from = begin; from < end; from += kSumBlock) {
        SumBlock(parts, from, std::min(kSumBlock, end - from), piece);
      }
    });
    return absl::OkStatus();
  }

  static void SumBlock(const std::vector<const float*>& parts, int64_t from, int64_t n, float* out) {
    std::array<float, kSumBlock> sum{};
    for (const float* part : parts) {
      for (int64_t i = 0; i < n; ++i) sum[static_cast<size_t>(i)] += part[from + i];
    }
    std::copy_n(sum.begin(), n, out + from);
  }

  absl::Status SpreadPiece(int owner, float* piece, int64_t n) {
    const auto bytes = static_cast<size_t>(n) * sizeof(float);
    if (!owns(owner)) return link_->Transfer({}, {{owner, piece, bytes}});
    std::vector<RankTransfer> send;
    for (const int rank : Others()) send.push_back({rank, piece, bytes});
    return link_->Transfer(send, {});
  }

  GlooLink* const link_;
  CpuParams* const params_;
};

absl::StatusOr<std::unique_ptr<Replicas>> GlooLink::Join(HeadKernels* head) {
  auto* const cpu = dynamic_cast<CpuHead*>(head);
  if (cpu == nullptr) return errors::FieldError("head", "be one of a CPU backend", "another one");
  return std::make_unique<TimedReplicas>(std::make_unique<GlooReplicas>(this, &cpu->params()),
                                         std::vector<ExchangeClocks*>{&clocks_});
}

absl::Status GlooLink::JoinClasses(HeadKernels* head) {
  auto* const cpu = dynamic_cast<CpuHead*>(head);
  if (cpu == nullptr) return errors::FieldError("head", "be one of a CPU backend", "another one");
  if (cpu->config().split != Split::kVocabulary) {
    return errors::FieldError("split", "be vocabulary", Name(cpu->config().split));
  }
  cpu->Join(std::make_shared<RankExchange>(this));
  return absl::OkStatus();
}

}  // namespace

int64_t GlooLinkBytes(Replica replica) { return replica.count * int64_t{kRoomBytes}; }

absl::StatusOr<std::unique_ptr<RankLink>> CreateGlooLink(Replica replica, const std::string& host,
                                                         absl::Duration timeout) {
  LOSSD_TRY(std::unique_ptr<HostTransfers> transfers, CreateGlooTransfers(replica, host, timeout));
  return std::make_unique<GlooLink>(std::move(transfers));
}

}  // namespace lossd::kernels
