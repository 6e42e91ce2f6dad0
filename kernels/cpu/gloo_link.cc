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
#include "kernels/cpu/cpu_head.h"
#include "kernels/cpu/cpu_params.h"
#include "kernels/errors/field_error.h"
#include "kernels/shard_rows.h"

namespace lossd::kernels {
namespace {

// Floats that are under way between two ranks at a time, and those that one thread sums at a time.
constexpr int64_t kPiece = int64_t{1} << 18;
constexpr int64_t kBlock = 4096;

// All transfers are matched in their order.
constexpr uint64_t kSlot = 1;

class GlooLink final : public RankLink {
 public:
  GlooLink(Replica replica, std::string host, absl::Duration timeout)
      : replica_(replica), host_(std::move(host)), timeout_(timeout) {}
  absl::StatusOr<std::string> Address() override;
  absl::Status Connect(const std::vector<std::string>& addresses) override;
  absl::StatusOr<std::unique_ptr<Replicas>> Join(HeadKernels* head) override;
  void Abort(const absl::Status& reason) override ABSL_LOCKS_EXCLUDED(mutex_);

  Replica replica() const { return replica_; }
  // Sends memory to other ranks, or fills it with what another sends, and waits.
  absl::Status Send(const void* data, size_t bytes, const std::vector<int>& to);
  absl::Status Receive(void* data, size_t bytes, int from);

 private:
  // Calls into Gloo, whose errors are exceptions. After one, the connections are closed.
  absl::Status Call(const std::string& what, absl::FunctionRef<void()> call) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same with a buffer that Abort can end the waiting of.
  absl::Status Transfer(const std::string& what, void* data, size_t bytes,
                        absl::FunctionRef<bool(gloo::transport::UnboundBuffer&)> call);
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

  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  bool connecting_ ABSL_GUARDED_BY(mutex_) = false;
  gloo::transport::UnboundBuffer* waiting_ ABSL_GUARDED_BY(mutex_) = nullptr;
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
    if (waiting_ != nullptr) {
      waiting_->abortWaitSend();
      waiting_->abortWaitRecv();
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

absl::Status GlooLink::Transfer(const std::string& what, void* data, size_t bytes,
                                absl::FunctionRef<bool(gloo::transport::UnboundBuffer&)> call) {
  return Call(what, [&] {
    const auto buffer = context_->createUnboundBuffer(data, bytes);
    {
      absl::MutexLock lock(&mutex_);
      if (!failure_.ok()) return;
      waiting_ = buffer.get();
    }
    const absl::Cleanup not_waiting = [this] {
      absl::MutexLock lock(&mutex_);
      waiting_ = nullptr;
    };
    if (!call(*buffer)) throw std::runtime_error("the transfer was aborted");
  });
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

absl::Status GlooLink::Send(const void* data, size_t bytes, const std::vector<int>& to) {
  return Transfer("send to another rank", const_cast<void*>(data), bytes,
                  [&](gloo::transport::UnboundBuffer& buffer) {
                    for (const int rank : to) buffer.send(rank, kSlot);
                    for (size_t i = 0; i < to.size(); ++i) {
                      if (!buffer.waitSend()) return false;
                    }
                    return true;
                  });
}

absl::Status GlooLink::Receive(void* data, size_t bytes, int from) {
  return Transfer(absl::StrCat("receive from rank ", from), data, bytes,
                  [&](gloo::transport::UnboundBuffer& buffer) {
                    buffer.recv(from, kSlot);
                    return buffer.waitRecv();
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
      absl::Status status = link_->Send(piece, bytes, {owner});
      std::fill_n(piece, n, 0.0f);
      return status;
    }
    std::vector<const float*> parts(static_cast<size_t>(link_->replica().count), piece);
    received_.resize(parts.size() * kPiece);
    for (const int rank : Others()) {
      float* const part = received_.data() + rank * kPiece;
      absl::Status status = link_->Receive(part, bytes, rank);
      if (!status.ok()) return status;
      parts[static_cast<size_t>(rank)] = part;
    }
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
    return owns(owner) ? link_->Send(piece, bytes, Others()) : link_->Receive(piece, bytes, owner);
  }

  GlooLink* const link_;
  CpuParams* const params_;
  std::vector<float> received_;  // [ranks, kPiece]
};

absl::StatusOr<std::unique_ptr<Replicas>> GlooLink::Join(HeadKernels* head) {
  auto* const cpu = dynamic_cast<CpuHead*>(head);
  if (cpu == nullptr) return errors::FieldError("head", "be one of a CPU backend", "another one");
  return std::make_unique<GlooReplicas>(this, &cpu->params());
}

}  // namespace

absl::StatusOr<std::unique_ptr<RankLink>> CreateGlooLink(Replica replica, const std::string& host,
                                                         absl::Duration timeout) {
  return std::make_unique<GlooLink>(replica, host, timeout);
}

}  // namespace lossd::kernels
