// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/worker_heads.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "server/ranks/messages.h"

namespace lossd::ranks {
namespace {

// Slices begin at multiples of this in their buffer, as staging memory does.
constexpr size_t kAlignment = 64;
// The most bytes of a read, but for a single row that has more.
constexpr int64_t kMostPayload = int64_t{64} << 20;

size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// A chunk while the backend computes it: the messages that its inputs lie in, and those of its results.
struct WorkerChunk {
  kernels::Chunk chunk;
  std::vector<v1::ChunkSlice> messages;
  std::vector<v1::SliceResults> results;
  std::vector<kernels::Slice> slices;
  size_t row_bytes = 0;
  bool is_part = false;                    // of a head that is split by vocabulary
  WorkerBuffers::Buffer buffer;            // null: no slice needs it
  std::vector<MappedRows::Rows> in_place;  // that the slices name
};

// Room for `rows` rows in so many slices that are not empty.
int64_t BufferBytes(int64_t rows, size_t row_bytes, int64_t slices) {
  return rows * static_cast<int64_t>(row_bytes) + slices * static_cast<int64_t>(kAlignment);
}

bool IsPart(const kernels::HeadKernels& head) { return head.config().split == kernels::Split::kVocabulary; }

// Memory at a place that a slice names.
absl::StatusOr<void*> FindRows(const MappedRows* rows, const v1::RowsPlace& place, size_t bytes,
                               WorkerChunk& chunk) {
  if (rows == nullptr) return absl::InternalError("the leader named memory, and shares none");
  LOSSD_TRY(MappedRows::Rows found, rows->Find(place, bytes));
  chunk.in_place.push_back(std::move(found));
  return chunk.in_place.back().data;
}

absl::StatusOr<SliceMemory> MemoryOf(const v1::ChunkSlice& message, size_t bytes, const MappedRows* rows,
                                     WorkerChunk& chunk) {
  SliceMemory memory;
  if (message.has_hidden_at()) {
    LOSSD_TRY(memory.hidden, FindRows(rows, message.hidden_at(), bytes, chunk));
  }
  if (message.has_grad_hidden_at()) {
    LOSSD_TRY(memory.grad_hidden, FindRows(rows, message.grad_hidden_at(), bytes, chunk));
  }
  return memory;
}

// The slices have no more rows than a chunk may.
absl::Status CheckRows(const std::vector<v1::ChunkSlice>& slices, int64_t most) {
  for (const v1::ChunkSlice& slice : slices) {
    if (slice.rows() < 0 || slice.rows() > most) return absl::InternalError("a chunk has too many rows");
    most -= slice.rows();
  }
  return absl::OkStatus();
}

absl::Status FillSlices(const MappedRows* rows, WorkerChunk& chunk) {
  chunk.results.resize(chunk.messages.size());
  size_t offset = 0;
  for (size_t i = 0; i < chunk.messages.size(); ++i) {
    v1::ChunkSlice& message = chunk.messages[i];
    const size_t bytes = static_cast<size_t>(message.rows()) * chunk.row_bytes;
    LOSSD_TRY(SliceMemory memory, MemoryOf(message, bytes, rows, chunk));
    if (NeedsOwnMemory(message)) {
      if (offset + bytes > chunk.buffer->bytes().size()) {
        return absl::InternalError("a chunk has too many rows");
      }
      memory.own = chunk.buffer->bytes().data() + offset;
      offset += Aligned(bytes);
    }
    LOSSD_TRY(auto slice, SliceOf(message, chunk.row_bytes, memory, chunk.results[i]));
    chunk.slices.push_back(slice);
  }
  chunk.chunk.slices = absl::MakeSpan(chunk.slices);
  return absl::OkStatus();
}

void SendResults(WorkerChunk& chunk, uint64_t id, const absl::Status& status, const WorkerHeads::Send& send) {
  for (size_t i = 0; status.ok() && i < chunk.slices.size(); ++i) {
    if (chunk.is_part) {
      SetPartResults(chunk.slices[i], chunk.results[i]);
    } else {
      SetResults(chunk.slices[i], chunk.row_bytes, chunk.messages[i].has_grad_hidden_at(), chunk.results[i]);
    }
    chunk.results[i].set_chunk(id);
    chunk.results[i].set_slice(static_cast<uint32_t>(i));
    v1::FromWorker message;
    message.mutable_slice()->Swap(&chunk.results[i]);
    send(std::move(message));
  }
  v1::FromWorker message;
  v1::ChunkResults* const results = message.mutable_results();
  results->set_chunk(id);
  *results->mutable_status() = ToProto(status);
  SetChoices(chunk.chunk.choices, results->mutable_choices());
  results->set_gradients(static_cast<uint32_t>(chunk.chunk.gradients));
  results->set_sample_threshold(chunk.chunk.sample_threshold);
  send(std::move(message));
}

void SendDone(uint64_t id, const absl::Status& status, const kernels::Backend& backend,
              const WorkerHeads::Send& send) {
  v1::FromWorker message;
  *message.mutable_done()->mutable_memory() = ToProto(backend.memory());
  message.mutable_done()->set_chunk(id);
  *message.mutable_done()->mutable_status() = ToProto(status);
  send(std::move(message));
}

}  // namespace

WorkerHeads::WorkerHeads(kernels::Backend* backend, kernels::RankLink* link, Send send)
    : backend_(backend),
      link_(link),
      send_(std::move(send)),
      buffers_(std::make_shared<WorkerBuffers>(backend)) {}

absl::Status WorkerHeads::UseRowsOf(const v1::Prepare& prepare) {
  if (prepare.rows_socket().empty()) return absl::UnavailableError("messages: the leader shares no memory");
  absl::StatusOr<std::unique_ptr<MappedRows>> rows =
      MappedRows::Connect(prepare.rows_socket(), prepare.rows_token(), backend_);
  if (!rows.ok()) return absl::UnavailableError(absl::StrCat("messages: ", rows.status().message()));
  rows_ = *std::move(rows);
  return absl::OkStatus();
}

// ---- Requests ----

v1::Answer WorkerHeads::Execute(const v1::Request& request) {
  v1::Answer answer;
  *answer.mutable_status() = ToProto(Do(request, answer));
  answer.set_request(request.id());
  *answer.mutable_memory() = ToProto(backend_->memory());
  return answer;
}

kernels::HeadKernels* WorkerHeads::Find(uint64_t head) const {
  const auto found = heads_.find(head);
  return found == heads_.end() ? nullptr : found->second.kernels.get();
}

absl::Status WorkerHeads::Do(const v1::Request& request, v1::Answer& answer) {
  if (request.has_plan()) return Plan(request.plan(), answer);
  if (request.has_create()) return Create(request.head(), request.create(), answer);
  const auto head = heads_.find(request.head());
  if (head == heads_.end()) return absl::InternalError(absl::StrCat("there is no head ", request.head()));
  if (!request.has_destroy()) return DoWith(head->second, request, answer);
  heads_.erase(head);
  return absl::OkStatus();
}

absl::Status WorkerHeads::DoWith(Head& head, const v1::Request& request, v1::Answer& answer) {
  switch (request.operation_case()) {
    case v1::Request::kRead:
      return Read(head, request.read(), answer);
    case v1::Request::kWrite:
      return Write(head, request.write(), /*add=*/false);
    case v1::Request::kAdd:
      return Write(head, request.add(), /*add=*/true);
    case v1::Request::kGradNorm: {
      const absl::StatusOr<double> norm = head.kernels->GradNorm();
      if (norm.ok()) answer.set_grad_norm(*norm);
      return norm.status();
    }
    case v1::Request::kStep: {
      LOSSD_TRY(const kernels::OptimizerOptions options, FromProto(request.step()));
      return head.kernels->ApplyStep(options, request.step().update());
    }
    case v1::Request::kZeroGradients:
      return head.kernels->ZeroGradients();
    case v1::Request::kZeroMoments:
      return head.kernels->ZeroMoments();
    case v1::Request::kSumGradients:
    case v1::Request::kSpreadValues:
      if (head.replicas == nullptr) return absl::InternalError("the head has no replicas");
      return request.has_sum_gradients() ? head.replicas->SumGradients() : head.replicas->SpreadValues();
    default:
      return absl::InternalError(absl::StrCat("operation ", request.operation_case(), " is not known"));
  }
}

absl::Status WorkerHeads::Plan(const v1::HeadConfig& config, v1::Answer& answer) {
  LOSSD_TRY(const kernels::HeadConfig head, FromProto(config));
  const absl::StatusOr<kernels::MemoryBytes> plan = backend_->PlanHead(head);
  if (plan.ok()) SetBytes(*plan, answer.mutable_plan());
  return plan.status();
}

absl::Status WorkerHeads::Create(uint64_t id, const v1::HeadConfig& config, v1::Answer& answer) {
  LOSSD_TRY(const kernels::HeadConfig wanted, FromProto(config));
  LOSSD_TRY(std::unique_ptr<kernels::HeadKernels> made, backend_->CreateHead(wanted));
  const kernels::HeadKernels& head = *made;
  std::unique_ptr<kernels::Replicas> replicas;
  LOSSD_RETURN_IF_ERROR(Join(made.get(), replicas));
  v1::HeadDescription* const description = answer.mutable_head();
  description->set_compute_dtype(static_cast<uint32_t>(head.compute_dtype()));
  description->set_chunk_rows(head.chunk_rows());
  description->set_slice_rows(head.slice_rows());
  SetBytes(head.memory(), description->mutable_memory());
  SetChoices(head.Describe(), description->mutable_choices());
  heads_[id] = {std::move(made), std::move(replicas)};
  return absl::OkStatus();
}

// Chunks of a part cannot fail here alone, since the other parts wait for it: there is memory for them from
// now on.
absl::Status WorkerHeads::Join(kernels::HeadKernels* head, std::unique_ptr<kernels::Replicas>& replicas) {
  if (IsPart(*head)) {
    const int64_t rows = head->chunk_rows();
    const size_t row_bytes = static_cast<size_t>(head->config().hidden_size) * sizeof(float);
    absl::Status status = buffers_->Reserve(BufferBytes(rows, row_bytes, rows));
    return status.ok() ? link_->JoinClasses(head) : status;
  }
  absl::StatusOr<std::unique_ptr<kernels::Replicas>> made = link_->Join(head);
  if (made.ok()) replicas = *std::move(made);
  return made.status();
}

absl::Status WorkerHeads::Read(Head& head, const v1::TensorAccess& access, v1::Answer& answer) {
  LOSSD_TRY(const auto id, TensorOf(access));
  LOSSD_TRY(const auto dtype, DTypeOf(access.dtype()));
  const int64_t row_bytes =
      ShapeOf(head.kernels->config(), id.param).cols * static_cast<int64_t>(SizeOf(dtype));
  if (access.rows() < 0 || access.rows() > std::max<int64_t>(1, kMostPayload / row_bytes)) {
    return absl::InternalError("a read of too many rows");
  }
  std::string* const payload = answer.mutable_payload();
  payload->resize(static_cast<size_t>(access.rows() * row_bytes));
  return head.kernels->ReadTensor(id, access.row_begin(), access.rows(), dtype,
                                  {reinterpret_cast<uint8_t*>(payload->data()), payload->size()});
}

absl::Status WorkerHeads::Write(Head& head, const v1::TensorAccess& access, bool add) {
  LOSSD_TRY(const auto id, TensorOf(access));
  LOSSD_TRY(const auto dtype, DTypeOf(access.dtype()));
  const absl::Span<const uint8_t> bytes = {reinterpret_cast<const uint8_t*>(access.payload().data()),
                                           access.payload().size()};
  if (!add) return head.kernels->WriteTensor(id, access.row_begin(), access.rows(), dtype, bytes);
  return head.kernels->AddGradient(id.param, access.row_begin(), access.rows(), dtype, access.scale(), bytes);
}

// ---- Chunks ----

absl::Status WorkerHeads::Submit(const v1::ChunkStart& start, std::vector<v1::ChunkSlice> slices) {
  const auto head = heads_.find(start.head());
  if (head == heads_.end()) return absl::InternalError(absl::StrCat("there is no head ", start.head()));
  kernels::HeadKernels& kernels = *head->second.kernels;
  LOSSD_TRY(kernels::Chunk made, ChunkOf(start));
  if (start.rows() < 0 || start.rows() > kernels.chunk_rows()) {
    return absl::InternalError(absl::StrCat("a chunk of ", start.rows(), " rows"));
  }
  const auto chunk = std::make_shared<WorkerChunk>();
  chunk->chunk = made;
  chunk->messages = std::move(slices);
  chunk->row_bytes = static_cast<size_t>(kernels.config().hidden_size) * SizeOf(made.hidden_dtype);
  chunk->is_part = IsPart(kernels);
  LOSSD_RETURN_IF_ERROR(CheckRows(chunk->messages, start.rows()));
  const auto need_memory = std::count_if(chunk->messages.begin(), chunk->messages.end(), NeedsOwnMemory);
  if (need_memory > 0) {
    absl::StatusOr<WorkerBuffers::Buffer> buffer =
        buffers_->Take(BufferBytes(start.rows(), chunk->row_bytes, need_memory));
    if (!buffer.ok()) {
      SendResults(*chunk, start.chunk(), buffer.status(), send_);
      SendDone(start.chunk(), buffer.status(), *backend_, send_);
      return absl::OkStatus();
    }
    chunk->buffer = *std::move(buffer);
  }
  LOSSD_RETURN_IF_ERROR(FillSlices(rows_.get(), *chunk));
  const uint64_t id = start.chunk();
  kernels.Submit(&chunk->chunk,
                 {.on_results =
                      [chunk, id, send = send_, buffers = buffers_](const absl::Status& status) {
                        chunk->in_place.clear();
                        SendResults(*chunk, id, status, send);
                        if (chunk->buffer != nullptr) buffers->Return(std::move(chunk->buffer));
                      },
                  .on_done = [chunk, id, backend = backend_, send = send_](
                                 const absl::Status& status) { SendDone(id, status, *backend, send); }});
  return absl::OkStatus();
}

}  // namespace lossd::ranks
