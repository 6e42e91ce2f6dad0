// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/service_in_memory.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/types/span.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/errors/field_error.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/payload_codec.h"
#include "proto/wire/status_details.h"
#include "server/engine/stream.h"
#include "server/head/manifest.h"
#include "server/messages/convert.h"
#include "server/regions/regions.h"
#include "server/rpc/compute_loss_call.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

constexpr uint64_t kIncarnation = 42;
constexpr int64_t kLedgerBytes = int64_t{128} << 10;
constexpr int64_t kMemoryLimit = (int64_t{1} << 20) + kLedgerBytes;
constexpr int64_t kWorkspaceBytes = int64_t{64} << 10;
constexpr int64_t kStagingBytes = int64_t{64} << 10;
constexpr int64_t kSliceBytes = int64_t{4} << 10;
constexpr int64_t kRetainedBytes = int64_t{16} << 10;
constexpr int64_t kMostFilledBytes = int64_t{8} << 10;  // of rows whose values the input leaves out

// What a request gives, or numbers near 1 for `bytes` bytes.
std::string Values(const Payload& payload, int64_t bytes, kernels::DType dtype) {
  if (!payload.bytes().empty() || bytes < 0 || bytes > kMostFilledBytes) return payload.bytes();
  std::string values(static_cast<size_t>(bytes), '\0');
  const size_t size = kernels::SizeOf(dtype);
  for (size_t at = 0; at + size <= values.size(); at += size) {
    const auto step = static_cast<uint32_t>((at / size + payload.seed()) % 7);
    const uint32_t fp32 = 0x3f800000u + (step << 20) + ((payload.seed() & 1u) << 31);
    const uint32_t bits = dtype == kernels::DType::kFloat32    ? fp32
                          : dtype == kernels::DType::kBFloat16 ? fp32 >> 16
                                                               : 0x3c00u + (step << 6);
    std::memcpy(&values[at], &bits, size);
  }
  return values;
}

absl::Span<const uint8_t> AsBytes(const std::string& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size()};
}

// A region of shared memory for one call, between the sanitizer's fences, and what the call may write of it.
// Thread-compatible.
class RegionOnHeap {
 public:
  static constexpr size_t kBytes = 4 << 10;

  // Full of `values`, again and again.
  explicit RegionOnHeap(const std::string& values) {
    auto memory = std::make_unique<Memory>();
    for (size_t i = 0; i < kBytes; ++i) memory->bytes_[i] = static_cast<uint8_t>(values[i % values.size()]);
    before_.assign(memory->bytes_.get(), memory->bytes_.get() + kBytes);
    region_ = std::make_shared<regions::Region>("region", std::move(memory));
  }

  const std::shared_ptr<regions::Region>& region() const { return region_; }
  // The call may write to this part, which is one of the region.
  void Allow(const v1::RegionRange& part) { writable_.push_back(part); }
  void CheckRest() const {
    const absl::Span<const uint8_t> bytes = region_->bytes();
    std::vector<uint8_t> rest(bytes.begin(), bytes.end());
    for (const v1::RegionRange& part : writable_)
      std::memcpy(&rest[part.offset()], &before_[part.offset()], part.bytes());
    FUZZ_CHECK(rest == before_, "a part of the region was written that the call had not named");
  }

 private:
  struct Memory final : regions::RegionMemory {
    struct Free {
      void operator()(uint8_t* bytes) const { operator delete (bytes, std::align_val_t{256}); }
    };
    absl::Span<uint8_t> bytes() const override { return {bytes_.get(), kBytes}; }
    int descriptor() const override { return -1; }
    const std::string& device() const override { return none_; }
    absl::Status CopyToHost(absl::Span<const uint8_t> from, uint8_t* to) const override {
      std::memcpy(to, from.data(), from.size());
      return absl::OkStatus();
    }
    absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const override {
      std::memcpy(to.data(), from, to.size());
      return absl::OkStatus();
    }

    std::unique_ptr<uint8_t[], Free> bytes_{
        static_cast<uint8_t*>(operator new (kBytes, std::align_val_t{256}))};
    std::string none_;
  };

  std::shared_ptr<regions::Region> region_;
  std::vector<uint8_t> before_;
  std::vector<v1::RegionRange> writable_;
};

// ---- One stream of the engine, from its slices to its end, as a call of LossService drives it ----

// Takes what a stream reports, and makes messages of it. Thread-safe.
class StreamResults final : public engine::StreamObserver {
 public:
  // `places`: of the call's slices; outlives the stream.
  explicit StreamResults(rpc::SlicePlaces* places) : places_(places) {}

  void OnMemory(absl::AnyInvocable<void()> receive) override { receive(); }
  void OnSlice(engine::SliceOutput output) override {
    FUZZ_CHECK(!finished_.HasBeenNotified(), "a slice after the end");
    const int64_t rows = output.rows.size(), bytes = output.grad_hidden ? output.grad_bytes : 0;
    v1::ComputeLossResponse answer;
    const auto payload = wire::Decode(places_->Answer(std::move(output)), &answer);
    FUZZ_CHECK(payload.ok(), payload.status().ToString());
    FUZZ_CHECK(static_cast<int64_t>(payload->size()) == (answer.slice().in_region() ? 0 : bytes),
               absl::StrCat(payload->size(), " bytes of gradients in the message"));
    absl::MutexLock lock(&mutex_);
    rows_ += rows;
  }
  void OnFinished(absl::Status status, const engine::StreamSummary& summary) override {
    status_ = std::move(status);
    summary_ = summary;
    finished_.Notify();  // aborts if called twice
  }

  const absl::Status& Wait() {
    finished_.WaitForNotification();
    return status_;
  }
  const engine::StreamSummary& summary() const { return summary_; }
  int64_t rows() {
    absl::MutexLock lock(&mutex_);
    return rows_;
  }

 private:
  rpc::SlicePlaces* const places_;
  absl::Mutex mutex_;
  int64_t rows_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status status_;
  engine::StreamSummary summary_;
  absl::Notification finished_;
};

// Hands a slice over and waits until it is queued or the stream has ended. Its hidden states may have any
// size.
void SendSlice(engine::Stream& stream, engine::IncomingSlice slice) {
  struct Sent {
    ~Sent() { over->Notify(); }
    std::shared_ptr<absl::Notification> over;
  };
  auto over = std::make_shared<absl::Notification>();
  auto sent = std::make_unique<Sent>();
  sent->over = over;
  slice.on_queued = [sent = std::move(sent)](int64_t) mutable { sent.reset(); };
  stream.Receive(std::move(slice));
  over->WaitForNotification();
}

engine::IncomingSlice SliceOf(engine::RowRange rows, std::string hidden) {
  engine::IncomingSlice slice;
  slice.rows = rows;
  slice.bytes = static_cast<int64_t>(hidden.size());
  slice.copy = [hidden = std::move(hidden)](uint8_t* to) { std::memcpy(to, hidden.data(), hidden.size()); };
  return slice;
}

}  // namespace

ServiceInMemory::ServiceInMemory(const std::string& folder) : metrics_({"0", "cpu", "cpu", "clang"}) {
  auto backend = kernels::CreateCpuBackend(
      {.threads = 1, .workspace_bytes = kWorkspaceBytes, .memory_limit_bytes = kMemoryLimit});
  FUZZ_CHECK(backend.ok(), backend.status().ToString());
  backend_ = *std::move(backend);
  engine::EngineOptions options;
  options.slice_bytes = kSliceBytes;
  options.staging_bytes = kStagingBytes;
  options.retained_bytes = kRetainedBytes;
  options.max_heads = 4;
  options.max_streams = 4;
  options.max_ledger_rows = 4096;
  options.ledger_bytes = kLedgerBytes;
  options.max_step_microbatches = 16;
  auto engine = engine::Engine::Create(options, backend_.get(), kIncarnation, {&metrics_});
  FUZZ_CHECK(engine.ok(), engine.status().ToString());
  engine_ = *std::move(engine);
  admin::HeadOperationsOptions operations;
  operations.checkpoints.directory = folder;
  operations_ = std::make_unique<admin::HeadOperations>(operations, engine_.get(), &metrics_);
  books_ = Books();
}

// ---- What is checked ----

void ServiceInMemory::Run(const Call& call) {
  bool opened = false;  // a stream of rows, whose end is not a refusal
  absl::Status status;
  if (call.has_compute_loss()) {
    status = ComputeLoss(call.compute_loss(), &opened);
  } else if (call.has_backward()) {
    status = Backward(call.backward().open(), &opened);
  } else {
    status = RunUnary(call);
  }
  CheckIdle();
  const std::string before = std::exchange(books_, Books());
  if (status.ok()) return;
  CheckRefusal(status);
  FUZZ_CHECK(opened || before == books_,
             absl::StrCat("refused with ", status.ToString(), "\nbefore:\n", before, "after:\n", books_));
}

std::string ServiceInMemory::Books() {
  const engine::EngineStats stats = engine_->stats();
  // Not the bytes that are retained: those of a microbatch that was released are freed a little later.
  std::string books =
      absl::StrCat("ledger rows ", stats.ledger_rows, ", memory ", backend_->memory().current.Total(), "\n");
  for (const engine::HeadSnapshot& snapshot : engine_->List()) {
    v1::HeadDescription head = messages::ToProto(snapshot);
    head.clear_last_chunk_choices();
    head.clear_gradient_error();
    absl::StrAppend(&books, head.ShortDebugString(), " tensors ", Tensors(snapshot.name, snapshot.config),
                    "\n");
  }
  return books;
}

std::string ServiceInMemory::Tensors(const std::string& name, const kernels::HeadConfig& config) {
  using kernels::Param;
  using kernels::Role;
  head::Checksum checksum;
  const absl::Status read = engine_->OnDevice(name, [&](head::Head& head) {
    for (const Param param :
         {Param::kWeight, Param::kBias, Param::kNormGain, Param::kNormShift, Param::kClassWeights}) {
      for (const Role role : {Role::kValue, Role::kGradient, Role::kMoment1, Role::kMoment2}) {
        if (!kernels::HasTensor(config, {param, role})) continue;
        const kernels::TensorShape shape = kernels::ShapeOf(config, param);
        std::vector<uint8_t> bytes(static_cast<size_t>(shape.rows * shape.cols) * sizeof(float));
        const absl::Status status =
            head.ReadRows({param, role}, 0, shape.rows, kernels::DType::kFloat32, absl::MakeSpan(bytes));
        if (!status.ok()) return status;
        checksum.Update(bytes);
      }
    }
    return absl::OkStatus();
  });
  FUZZ_CHECK(read.ok(), read.ToString());
  return checksum.Digest();
}

int64_t ServiceInMemory::StepRows(const std::string& head) {
  const absl::StatusOr<engine::HeadSnapshot> snapshot = engine_->Describe(head);
  return snapshot.ok() ? snapshot->step_rows : -1;
}

int64_t ServiceInMemory::TeacherWidth(const v1::OpenMicrobatch& open) {
  if (!open.options().has_distillation()) return 0;
  const absl::StatusOr<engine::HeadSnapshot> snapshot =
      engine_->Describe(open.options().distillation().teacher());
  return snapshot.ok() ? snapshot->config.hidden_size : 0;
}

void ServiceInMemory::CheckRefusal(const absl::Status& status) const {
  constexpr absl::StatusCode kCodes[] = {
      absl::StatusCode::kInvalidArgument,   absl::StatusCode::kNotFound,
      absl::StatusCode::kAlreadyExists,     absl::StatusCode::kFailedPrecondition,
      absl::StatusCode::kAborted,           absl::StatusCode::kOutOfRange,
      absl::StatusCode::kResourceExhausted, absl::StatusCode::kUnavailable,
      absl::StatusCode::kUnimplemented};
  FUZZ_CHECK(std::find(std::begin(kCodes), std::end(kCodes), status.code()) != std::end(kCodes),
             status.ToString());
  FUZZ_CHECK(
      status.code() != absl::StatusCode::kInvalidArgument || errors::GetFieldViolation(status).has_value(),
      absl::StrCat("names no field: ", status.ToString()));
  const grpc::Status sent = wire::ToGrpcStatus(messages::WithDetail(status, kIncarnation));
  FUZZ_CHECK(wire::GetErrorDetail(sent).has_value(), "the error's detail cannot be read");
}

void ServiceInMemory::CheckIdle() const {
  const engine::EngineStats stats = engine_->stats();
  FUZZ_CHECK(stats.open_streams == 0 && stats.queued_slices == 0 && stats.staging_used_bytes == 0,
             absl::StrCat(stats.open_streams, " streams, ", stats.queued_slices, " slices, ",
                          stats.staging_used_bytes, " bytes of staging are left"));
  FUZZ_CHECK(backend_->memory().current.Total() <= kMemoryLimit, "more memory than the limit");
}

void ServiceInMemory::CheckSummary(const engine::StreamSummary& summary, const std::string& head,
                                   int64_t rows_before, bool accumulates) {
  const int64_t added = StepRows(head) - rows_before;
  FUZZ_CHECK(added == summary.accumulated_rows,
             absl::StrCat(summary.accumulated_rows, " rows acknowledged, ", added, " booked"));
  const int64_t acknowledged = summary.accumulated_rows + summary.repeated_rows;
  FUZZ_CHECK(acknowledged == (accumulates ? summary.sums.valid_rows : 0),
             absl::StrCat(acknowledged, " rows acknowledged of ", summary.sums.valid_rows));
}

// ---- Calls ----

absl::Status ServiceInMemory::RunUnary(const Call& call) {
  switch (call.kind_case()) {
    case Call::kCreateHead:
      return operations_->CreateHead(call.create_head()).status();
    case Call::kDeleteHead:
      return operations_->DeleteHead(call.delete_head()).status();
    case Call::kGradNorm:
      return operations_->GradNorm(call.grad_norm()).status();
    case Call::kApplyStep:
      return operations_->ApplyStep(call.apply_step()).status();
    case Call::kZeroGradients:
      return operations_->ZeroGradients(call.zero_gradients()).status();
    case Call::kLoadCheckpoint:
      return operations_->LoadCheckpoint(call.load_checkpoint()).status();
    case Call::kListCheckpoints:
      return operations_->ListCheckpoints(call.list_checkpoints()).status();
    case Call::kResetHead:
      return operations_->ResetHead(call.reset_head()).status();
    case Call::kSetShares:
      return operations_->SetShares(call.set_shares()).status();
    case Call::kDeleteCheckpoint:
      return operations_->DeleteCheckpoint(call.delete_checkpoint()).status();
    case Call::kReadTensor:
      return ReadTensor(call.read_tensor());
    case Call::kWriteTensor:
      return WriteTensor(call.write_tensor());
    case Call::kAddGradient:
      return AddGradient(call.add_gradient());
    case Call::kReleaseMicrobatch:
      return engine_->Release(call.release_microbatch().head(), call.release_microbatch().microbatch_id())
          .status();
    default:
      return absl::OkStatus();
  }
}

absl::Status ServiceInMemory::ReadTensor(const v1::ReadTensorRequest& request) {
  const absl::StatusOr<admin::TensorRead> read = operations_->OpenRead(request);
  if (!read.ok()) return read.status();
  const admin::TensorRows& tensor = read->tensor;
  std::vector<uint8_t> bytes(static_cast<size_t>(tensor.rows.size() * tensor.row_bytes()));
  if (bytes.empty()) return absl::OkStatus();
  return operations_->ReadRows(*read, tensor.rows, absl::MakeSpan(bytes)).status();
}

absl::Status ServiceInMemory::WriteTensor(const fuzz::WriteTensor& write) {
  const absl::StatusOr<admin::TensorWrite> opened = operations_->OpenWrite(write.open());
  if (!opened.ok()) return opened.status();
  const admin::TensorRows& tensor = opened->tensor;
  const int64_t bytes = tensor.rows.size() * tensor.row_bytes();
  const std::string values = Values(write.payload(), bytes, tensor.dtype);
  if (values.empty() || static_cast<int64_t>(values.size()) != bytes)
    return absl::OkStatus();  // the call's to refuse
  return operations_->WriteRows(*opened, tensor.rows, AsBytes(values)).status();
}

absl::Status ServiceInMemory::AddGradient(const fuzz::AddGradient& add) {
  const v1::OpenGradient& open = add.open();
  if (absl::Status meant = CheckIncarnation(open.has_incarnation(), "open.incarnation", open.incarnation());
      !meant.ok())
    return meant;
  const absl::StatusOr<engine::ContributionSpec> spec = messages::ToContributionSpec(open);
  if (!spec.ok()) return spec.status();
  const absl::StatusOr<engine::Contribution> contribution = engine_->OpenContribution(*spec);
  if (!contribution.ok()) return contribution.status();
  const int64_t bytes = contribution->rows.size() * contribution->row_bytes();
  const std::string values = Values(add.payload(), bytes, spec->dtype);
  if (values.empty() || static_cast<int64_t>(values.size()) != bytes)
    return absl::OkStatus();  // the call's to refuse
  const std::string before = Books();
  const absl::StatusOr<engine::AddedRows> added =
      engine_->AddRows(*contribution, contribution->rows, AsBytes(values));
  if (added.ok()) {
    FUZZ_CHECK(added->rows >= 0 && added->rows <= contribution->rows.size(),
               absl::StrCat(added->rows, " rows added"));
    return absl::OkStatus();
  }
  FUZZ_CHECK(before == Books(), absl::StrCat("all or nothing: ", added.status().ToString()));
  CheckRefusal(added.status());
  return absl::OkStatus();  // the contribution itself is entered
}

absl::Status ServiceInMemory::ComputeLoss(const fuzz::ComputeLoss& call, bool* opened) {
  v1::OpenMicrobatch open = call.open();
  const uint64_t rows = open.rows().end() - open.rows().begin();
  constexpr uint64_t kMostFilledRows = 64;
  if (open.targets_size() == 0 && rows <= kMostFilledRows) {
    for (uint64_t i = 0; i < rows; ++i) open.add_targets(static_cast<int32_t>(i % 3));
  }
  if (absl::Status meant = CheckIncarnation(open.has_incarnation(), "open.incarnation", open.incarnation());
      !meant.ok())
    return meant;
  absl::StatusOr<engine::StreamSpec> spec = messages::ToStreamSpec(open);
  if (!spec.ok()) return spec.status();
  const kernels::DType dtype = spec->hidden_dtype;
  const int64_t rows_before = StepRows(open.head());
  RegionOnHeap region(Values({}, kMostFilledBytes, dtype));
  rpc::SlicePlaces places;
  if (!open.region().empty()) places.Use(region.region());
  const auto results = std::make_shared<StreamResults>(&places);
  const auto stream = engine_->Open(*std::move(spec), results);
  if (!stream.ok()) return stream.status();
  *opened = true;
  (*stream)->Start();
  for (const Slice& slice : call.slices()) {
    const auto range = messages::ToRowRange(slice.rows(), "slice.rows", std::numeric_limits<int64_t>::max());
    if (!range.ok()) {
      (*stream)->Cancel(range.status());
      break;
    }
    const int64_t width = (*stream)->hidden_size() + TeacherWidth(open);
    const int64_t row_bytes = width * static_cast<int64_t>(kernels::SizeOf(dtype));
    const int64_t bytes = range->size() > kMostFilledBytes ? -1 : range->size() * row_bytes;
    if (!slice.has_in_region()) {
      const int64_t brought = (*stream)->brings_rows() ? bytes : 0;
      SendSlice(**stream, SliceOf(*range, Values(slice.payload(), brought, dtype)));
      continue;
    }
    v1::SliceHeader header;
    *header.mutable_in_region() = slice.in_region();
    if (slice.in_region().bytes() == 0 && bytes > 0)
      header.mutable_in_region()->set_bytes(static_cast<uint64_t>(bytes));
    auto in_region = places.Take(header, *range, {});
    if (!in_region.ok()) {
      (*stream)->Cancel(in_region.status());
      break;
    }
    region.Allow(header.in_region());
    SendSlice(**stream, *std::move(in_region));
  }
  (*stream)->HalfClose();
  const absl::Status status = results->Wait();
  region.CheckRest();
  if (!status.ok()) return status;
  FUZZ_CHECK(results->rows() <= static_cast<int64_t>(rows), "more rows come back than were sent");
  CheckSummary(results->summary(), open.head(), rows_before, open.accumulate_gradients());
  return status;
}

absl::Status ServiceInMemory::Backward(const v1::OpenBackward& open, bool* opened) {
  if (absl::Status meant =
          CheckIncarnation(open.has_incarnation(), "backward.incarnation", open.incarnation());
      !meant.ok())
    return meant;
  absl::StatusOr<engine::BackwardSpec> spec = messages::ToBackwardSpec(open);
  if (!spec.ok()) return spec.status();
  const int64_t rows_before = StepRows(open.head());
  RegionOnHeap region("gradients");
  rpc::SlicePlaces places;
  if (open.has_in_region()) {
    if (absl::Status used = places.UseForGradients(region.region(), open.in_region(), spec->rows.begin);
        !used.ok())
      return used;
    region.Allow(open.in_region());
  }
  const auto results = std::make_shared<StreamResults>(&places);
  const auto stream = engine_->OpenBackward(*std::move(spec), results);
  if (!stream.ok()) return stream.status();
  *opened = true;
  (*stream)->Start();
  for (const engine::RowRange& rows : (*stream)->RetainedSlices()) {
    absl::Notification queued;
    auto over = std::shared_ptr<void>(nullptr, [&](void*) { queued.Notify(); });
    (*stream)->Receive(
        {.rows = rows, .on_queued = [over = std::move(over)](int64_t) mutable { over.reset(); }});
    queued.WaitForNotification();
  }
  const absl::Status status = results->Wait();
  region.CheckRest();
  if (status.ok()) CheckSummary(results->summary(), open.head(), rows_before, open.accumulate_gradients());
  return status;
}

absl::Status ServiceInMemory::CheckIncarnation(bool has, absl::string_view field, uint64_t meant) const {
  return has ? messages::CheckIncarnation(field, meant, kIncarnation) : absl::OkStatus();
}

}  // namespace lossd::fuzz
