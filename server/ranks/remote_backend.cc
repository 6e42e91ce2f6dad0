// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/remote_backend.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "kernels/validation.h"
#include "server/ranks/messages.h"

namespace lossd::ranks {
namespace {

using kernels::DType;
using kernels::HeadConfig;
using kernels::Param;
using kernels::TensorId;

// Of a tensor's rows, [first, first + rows).
struct Piece {
  int64_t first = 0;
  int64_t rows = 0;
};

// Sends what `make` says for pieces of the rows, kPiecesUnderWay at a time, and gives `take` the answers in
// their order. After the first error, which it returns, nothing more is sent and nothing taken; none is under
// way when it returns.
absl::Status ForPieces(WorkerStream& worker, int64_t rows, int64_t piece_rows,
                       absl::FunctionRef<v1::Request(const Piece&)> make,
                       absl::FunctionRef<absl::Status(const Piece&, const v1::Answer&)> take) {
  std::deque<std::pair<Piece, uint64_t>> under_way;
  absl::Status status;
  int64_t sent = 0;
  while (true) {
    while (status.ok() && sent < rows && under_way.size() < kPiecesUnderWay) {
      const Piece piece = {sent, std::min(piece_rows, rows - sent)};
      under_way.emplace_back(piece, worker.Start(make(piece)));
      sent += piece.rows;
    }
    if (under_way.empty()) return status;
    const auto [piece, request] = under_way.front();
    under_way.pop_front();
    const absl::StatusOr<v1::Answer> answer = worker.Await(request);
    if (status.ok()) status = answer.ok() ? take(piece, *answer) : answer.status();
  }
}

absl::Status TakeNothing(const Piece&, const v1::Answer&) { return absl::OkStatus(); }

absl::Status StatusOf(const absl::StatusOr<v1::Answer>& answer) { return answer.status(); }

absl::Status OnlyAtTheLeader() { return absl::UnimplementedError("memory of the host is the leader's"); }

}  // namespace

// ---- The head ----

RemoteHead::RemoteHead(const HeadConfig& config, uint64_t id, const v1::HeadDescription& description,
                       std::shared_ptr<WorkerStream> worker)
    : config_(config),
      id_{.id = id,
          .hidden_size = static_cast<size_t>(config.hidden_size),
          .is_part = config.split == kernels::Split::kVocabulary},
      worker_(std::move(worker)),
      compute_dtype_(DTypeOf(description.compute_dtype()).value_or(DType::kFloat32)),
      chunk_rows_(std::max<int64_t>(1, description.chunk_rows())),
      slice_rows_(std::max<int64_t>(1, description.slice_rows())),
      memory_(BytesOf(description.memory())),
      choices_(ChoicesOf(description.choices())) {}

RemoteHead::~RemoteHead() {
  v1::Request request = NewRequest();
  request.set_destroy(true);
  // A lost worker has no head any more.
  (void)worker_->Call(std::move(request));
}

v1::Request RemoteHead::NewRequest() const {
  v1::Request request;
  request.set_head(id_.id);
  return request;
}

int64_t RemoteHead::PieceRows(Param param, DType dtype) const {
  const int64_t row_bytes = ShapeOf(config_, param).cols * static_cast<int64_t>(SizeOf(dtype));
  return std::max<int64_t>(1, kPieceBytes / row_bytes);
}

void RemoteHead::Submit(kernels::Chunk* chunk, kernels::ChunkCallbacks callbacks) {
  worker_->Submit(id_, chunk, std::move(callbacks));
}

absl::Status RemoteHead::ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                    absl::Span<uint8_t> out) {
  absl::Status valid = ValidateTensorAccess(config_, id, row_begin, rows, dtype, out.size());
  if (!valid.ok()) return valid;
  const size_t row_bytes = static_cast<size_t>(ShapeOf(config_, id.param).cols) * SizeOf(dtype);
  const auto make = [&](const Piece& piece) {
    v1::Request request = NewRequest();
    *request.mutable_read() = ToProto(id, row_begin + piece.first, piece.rows, dtype);
    return request;
  };
  const auto take = [&](const Piece& piece, const v1::Answer& answer) {
    const size_t bytes = static_cast<size_t>(piece.rows) * row_bytes;
    if (answer.payload().size() != bytes) return absl::InternalError("a worker sent rows of another length");
    std::memcpy(out.data() + static_cast<size_t>(piece.first) * row_bytes, answer.payload().data(), bytes);
    return absl::OkStatus();
  };
  return ForPieces(*worker_, rows, PieceRows(id.param, dtype), make, take);
}

void RemoteHead::PassBy(absl::Span<const int> ranks) {
  passed_by_ = std::find(ranks.begin(), ranks.end(), worker_->rank()) != ranks.end();
}

absl::Status RemoteHead::WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                     absl::Span<const uint8_t> in) {
  absl::Status valid = ValidateTensorAccess(config_, id, row_begin, rows, dtype, in.size());
  if (!valid.ok() || passed_by_) return valid;
  const size_t row_bytes = static_cast<size_t>(ShapeOf(config_, id.param).cols) * SizeOf(dtype);
  const auto make = [&](const Piece& piece) {
    v1::Request request = NewRequest();
    *request.mutable_write() = ToProto(id, row_begin + piece.first, piece.rows, dtype);
    request.mutable_write()->set_payload(in.data() + static_cast<size_t>(piece.first) * row_bytes,
                                         static_cast<size_t>(piece.rows) * row_bytes);
    return request;
  };
  return ForPieces(*worker_, rows, PieceRows(id.param, dtype), make, TakeNothing);
}

absl::Status RemoteHead::AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                                     absl::Span<const uint8_t> in) {
  const TensorId id = {param, kernels::Role::kGradient};
  absl::Status valid = ValidateTensorAccess(config_, id, row_begin, rows, dtype, in.size());
  if (!valid.ok()) return valid;
  const size_t row_bytes = static_cast<size_t>(ShapeOf(config_, param).cols) * SizeOf(dtype);
  const auto make = [&](const Piece& piece) {
    v1::Request request = NewRequest();
    *request.mutable_add() = ToProto(id, row_begin + piece.first, piece.rows, dtype);
    request.mutable_add()->set_scale(scale);
    request.mutable_add()->set_payload(in.data() + static_cast<size_t>(piece.first) * row_bytes,
                                       static_cast<size_t>(piece.rows) * row_bytes);
    return request;
  };
  return ForPieces(*worker_, rows, PieceRows(param, dtype), make, TakeNothing);
}

absl::StatusOr<double> RemoteHead::GradNorm() {
  v1::Request request = NewRequest();
  request.set_grad_norm(true);
  const absl::StatusOr<v1::Answer> answer = worker_->Call(std::move(request));
  if (!answer.ok()) return answer.status();
  return answer->grad_norm();
}

absl::Status RemoteHead::ApplyStep(const kernels::OptimizerOptions& options, int64_t update) {
  v1::Request request = NewRequest();
  *request.mutable_step() = ToProto(options, update);
  return StatusOf(worker_->Call(std::move(request)));
}

absl::Status RemoteHead::ZeroGradients() {
  v1::Request request = NewRequest();
  request.set_zero_gradients(true);
  return StatusOf(worker_->Call(std::move(request)));
}

absl::Status RemoteHead::ZeroMoments() {
  v1::Request request = NewRequest();
  request.set_zero_moments(true);
  return StatusOf(worker_->Call(std::move(request)));
}

uint64_t RemoteHead::StartSumGradients() {
  v1::Request request = NewRequest();
  request.set_sum_gradients(true);
  return worker_->Start(std::move(request));
}

uint64_t RemoteHead::StartSpreadValues() {
  v1::Request request = NewRequest();
  request.set_spread_values(true);
  return worker_->Start(std::move(request));
}

// ---- The backend ----

absl::StatusOr<std::unique_ptr<RemoteBackend>> RemoteBackend::Create(std::shared_ptr<WorkerStream> worker) {
  absl::StatusOr<kernels::BackendInfo> info = FromProto(worker->hello().backend());
  if (!info.ok()) return info.status();
  if (worker->hello().backend().max_chunks_in_flight() < 1) {
    return absl::InternalError("a worker takes no chunks");
  }
  return std::unique_ptr<RemoteBackend>(new RemoteBackend(*std::move(info), std::move(worker)));
}

absl::StatusOr<kernels::MemoryBytes> RemoteBackend::PlanHead(const HeadConfig& config) const {
  v1::Request request;
  *request.mutable_plan() = ToProto(config);
  const absl::StatusOr<v1::Answer> answer = worker_->Call(std::move(request));
  if (!answer.ok()) return answer.status();
  return BytesOf(answer->plan());
}

absl::StatusOr<std::unique_ptr<kernels::HeadKernels>> RemoteBackend::CreateHead(const HeadConfig& config) {
  const uint64_t id = next_head_++;
  v1::Request request;
  request.set_head(id);
  *request.mutable_create() = ToProto(config);
  const absl::StatusOr<v1::Answer> answer = worker_->Call(std::move(request));
  if (!answer.ok()) return answer.status();
  return std::make_unique<RemoteHead>(config, id, answer->head(), worker_);
}

absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> RemoteBackend::AllocateStaging(int64_t) {
  return OnlyAtTheLeader();
}
absl::StatusOr<std::unique_ptr<kernels::RetainedMemory>> RemoteBackend::AllocateRetained(int64_t) {
  return OnlyAtTheLeader();
}
absl::Status RemoteBackend::PlanHostMemory(kernels::MemoryKind, int64_t) { return OnlyAtTheLeader(); }

}  // namespace lossd::ranks
