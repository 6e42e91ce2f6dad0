#include "kernels/cpu/gloo_link.h"

#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <array>
#include <exception>
#include <stdexcept>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cpu/arena.h"
#include "kernels/cpu/cpu_head.h"
#include "kernels/cpu/cpu_params.h"
#include "kernels/cpu/rank_exchange.h"
#include "kernels/errors/field_error.h"
#include "kernels/shard_rows.h"

namespace lossd::kernels {
namespace {

// What one rank gets from another at a time: bytes, and how many floats those are.
constexpr size_t kRoomBytes = size_t{1} << 20;
constexpr int64_t kPiece = int64_t{kRoomBytes / sizeof(float)};
// Floats that one thread sums at a time.
constexpr int64_t kBlock = 4096;

// All transfers are matched in their order.
constexpr uint64_t kSlot = 1;

class GlooLink final : public RankLink, public RankTransfers {
 public:
  GlooLink(Replica replica, std::string host, absl::Duration timeout)
      : replica_(replica), host_(std::move(host)), timeout_(timeout) {}
  absl::StatusOr<std::string> Address() override;
  absl::Status Connect(const std::vector<std::string>& addresses) override;
  absl::StatusOr<std::unique_ptr<Replicas>> Join(HeadKernels* head) override;
  absl::Status JoinClasses(HeadKernels* head) override;
  void WatchChunks(std::function<absl::Status(const absl::Status&)> on_failure) override {
    on_chunk_failure_ = std::move(on_failure);
  }
  void Abort(const absl::Status& reason) override ABSL_LOCKS_EXCLUDED(mutex_);

  Replica replica() const override { return replica_; }
  absl::Span<uint8_t> Room(int rank) override { return {room_.get() + rank * kRoomBytes, kRoomBytes}; }
  absl::Status Exchange(absl::Span<const RankTransfer> send, absl::Span<const RankTransfer> receive) override;
  // As Exchange, of which WatchChunks hears nothing.
  absl::Status Transfer(absl::Span<const RankTransfer> send, absl::Span<const RankTransfer> receive);

 private:
  // Calls into Gloo, whose errors are exceptions. After one, the connections are closed.
  absl::Status Call(const std::string& what, absl::FunctionRef<void()> call) ABSL_LOCKS_EXCLUDED(mutex_);
  // So that the other ranks do not wait for this one.
  void Close();
  absl::Status failure() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The first is kept, and returned.
  absl::Status Fail(absl::Status failure) ABSL_LOCKS_EXCLUDED(mutex_);

  const Replica replica_;
  const std::string host_;
  const absl::Duration timeout_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;  // its pairs are thread-safe
  AlignedBytes room_;                                  // [ranks, kRoomBytes]
  std::function<absl::Status(const absl::Status&)> on_chunk_failure_;

  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  bool connecting_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<gloo::transport::UnboundBuffer*> waiting_ ABSL_GUARDED_BY(mutex_);
};

absl::Status GlooLink::failure() const {
  absl::MutexLock lock(&mutex_);
  return failure_;
}

absl::Status GlooLink::Fail(absl::Status failure) {
  absl::MutexLock lock(&mutex_);
  failure_.Update(std::move(failure));
  return failure_;
}

void GlooLink::Abort(const absl::Status& reason) {
  bool connecting = false;
  {
    absl::MutexLock lock(&mutex_);
    failure_.Update(reason);
    connecting = connecting_;
    for (gloo::transport::UnboundBuffer* buffer : waiting_) {
      buffer->abortWaitSend();
      buffer->abortWaitRecv();
    }
  }
  if (connecting) Close();
}

absl::Status GlooLink::Call(const std::string& what, absl::FunctionRef<void()> call) {
  if (absl::Status failed = failure(); !failed.ok()) return failed;
  try {
    call();
    return failure();
  } catch (const std::exception& error) {
    Fail(absl::UnavailableError(
             absl::StrCat("rank ", replica_.index, " could not ", what, ": ", error.what())))
        .IgnoreError();
  }
  Close();
  return failure();
}

absl::Status GlooLink::Transfer(absl::Span<const RankTransfer> send, absl::Span<const RankTransfer> receive) {
  std::string what = "exchange with the other ranks";
  return Call(what, [&] {
    std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> buffers;
    for (const auto transfers : {receive, send}) {
      for (const RankTransfer& transfer : transfers) {
        buffers.push_back(context_->createUnboundBuffer(transfer.data, transfer.bytes));
      }
    }
    {
      absl::MutexLock lock(&mutex_);
      if (!failure_.ok()) return;
      for (const auto& buffer : buffers) waiting_.push_back(buffer.get());
    }
    const absl::Cleanup not_waiting = [this] {
      absl::MutexLock lock(&mutex_);
      waiting_.clear();
    };
    const auto for_each =
        [&](absl::FunctionRef<void(bool receives, int rank, gloo::transport::UnboundBuffer&)> call) {
          for (size_t i = 0; i < buffers.size(); ++i) {
            const bool receives = i < receive.size();
            const int rank = receives ? receive[i].rank : send[i - receive.size()].rank;
            what = absl::StrCat(receives ? "receive from rank " : "send to rank ", rank);
            call(receives, rank, *buffers[i]);
          }
        };
    for_each([](bool receives, int rank, gloo::transport::UnboundBuffer& buffer) {
      receives ? buffer.recv(rank, kSlot) : buffer.send(rank, kSlot);
    });
    for_each([](bool receives, int, gloo::transport::UnboundBuffer& buffer) {
      if (!(receives ? buffer.waitRecv() : buffer.waitSend()))
        throw std::runtime_error("the transfer was aborted");
    });
  });
}

absl::Status GlooLink::Exchange(absl::Span<const RankTransfer> send, absl::Span<const RankTransfer> receive) {
  absl::Status status = Transfer(send, receive);
  return status.ok() || !on_chunk_failure_ ? status : on_chunk_failure_(status);
}

void GlooLink::Close() {
  for (int rank = 0; context_ != nullptr && rank < replica_.count; ++rank) {
    try {
      if (context_->getPair(rank) != nullptr) context_->getPair(rank)->close();
    } catch (const std::exception&) {
      // It is closed, or was never open.
    }
  }
}

// One pair of sockets for each other rank. What the others need: the addresses of all, of the same length, in
// the order of the ranks; zeros in this one's place.
absl::StatusOr<std::string> GlooLink::Address() {
  std::string all;
  absl::Status status = Call("listen for the other ranks", [&] {
    gloo::transport::tcp::attr attributes(host_.c_str());
    device_ = gloo::transport::tcp::CreateDevice(attributes);
    context_ = device_->createContext(replica_.index, replica_.count);
    context_->setTimeout(absl::ToChronoMilliseconds(timeout_));
    size_t each = 0;
    for (int rank = 0; rank < replica_.count; ++rank) {
      if (rank == replica_.index) continue;
      const std::vector<char> address = context_->createPair(rank)->address().bytes();
      each = address.size();
      all.append(address.begin(), address.end());
    }
    all.insert(static_cast<size_t>(replica_.index) * each, each, '\0');
  });
  if (!status.ok()) return status;
  return all;
}

absl::Status GlooLink::Connect(const std::vector<std::string>& addresses) {
  const auto count = static_cast<size_t>(replica_.count);
  if (addresses.size() != count) {
    return errors::FieldError("addresses", absl::StrCat("be those of ", count, " ranks"), addresses.size());
  }
  absl::StatusOr<AlignedBytes> room = AllocateAligned(GlooLinkBytes(replica_));
  if (!room.ok()) return room.status();
  room_ = *std::move(room);
  {
    absl::MutexLock lock(&mutex_);
    connecting_ = true;
  }
  const absl::Cleanup connected = [this] {
    absl::MutexLock lock(&mutex_);
    connecting_ = false;
  };
  return Call("connect with the other ranks", [&] {
    for (int rank = 0; rank < replica_.count; ++rank) {
      if (rank == replica_.index) continue;
      const std::string& all = addresses[static_cast<size_t>(rank)];
      const auto own =
          all.begin() + static_cast<std::ptrdiff_t>(all.size() / count * static_cast<size_t>(replica_.index));
      context_->getPair(rank)->connect({own, own + static_cast<std::ptrdiff_t>(all.size() / count)});
    }
  });
}

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

  // Every rank goes through the pieces of all shards in the same order.
  absl::Status ForEachShard(TensorOf tensor, Exchange exchange) {
    for (const Param param : kTrainedParams) {
      float* const all = tensor(param);
      if (all == nullptr) continue;
      const int64_t cols = ShapeOf(params_->config(), param).cols;
      for (int owner = 0; owner < link_->replica().count; ++owner) {
        const ShardRows rows = ShardRowsOf(params_->config(), param, {owner, link_->replica().count});
        for (int64_t from = 0; from < rows.rows * cols; from += kPiece) {
          const int64_t n = std::min(kPiece, rows.rows * cols - from);
          absl::Status status = exchange(owner, all + rows.first * cols + from, n);
          if (!status.ok()) return status;
        }
      }
    }
    return absl::OkStatus();
  }

  // The parts of all ranks, added up in their order at the owner; the others' become zero.
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
    if (absl::Status status = link_->Transfer({}, receive); !status.ok()) return status;
    params_->pool().ParallelFor(n, kBlock, [&](int64_t begin, int64_t end) {
      for (int64_t from = begin; from < end; from += kBlock) {
        SumBlock(parts, from, std::min(kBlock, end - from), piece);
      }
    });
    return absl::OkStatus();
  }

  static void SumBlock(const std::vector<const float*>& parts, int64_t from, int64_t n, float* out) {
    std::array<float, kBlock> sum{};
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
  return std::make_unique<GlooReplicas>(this, &cpu->params());
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
  return std::make_unique<GlooLink>(replica, host, timeout);
}

}  // namespace lossd::kernels
