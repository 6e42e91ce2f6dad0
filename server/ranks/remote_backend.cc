// SPDX-License-Identifier: Apache-2.0
// The leader's view of its workers: their heads, backends and files (remote_backend.h).
#include "server/ranks/remote_backend.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "kernels/validation.h"
#include "server/log/log.h"
#include "server/ranks/channel.h"
#include "server/ranks/messages.h"

namespace lossd::ranks {
namespace {

using kernels::DType;
using kernels::HeadConfig;
using kernels::Param;
using kernels::TensorId;

// The rows [first, first + rows) of a tensor.
struct Piece {
  int64_t first = 0;
  int64_t rows = 0;
};

// Sends the requests that `make` makes for pieces of the rows, kPiecesUnderWay at a time, and calls `take`
// with the answers in the same order. After the first error it sends no more requests and takes no more
// answers; it returns that error once no request is under way.
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
  // The answer does not matter: a lost worker has no head any more.
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
  RemoteHeads heads = {.head = id_};
  if (chunk->teacher != nullptr) heads.teacher = static_cast<const RemoteHead*>(chunk->teacher)->id_;
  worker_->Submit(heads, chunk, std::move(callbacks));
}

// Does not compare the classes of the two heads. The leader's own part compares them, and all ranks divide a
// head in the same way.
absl::Status RemoteHead::CheckTeacher(const kernels::HeadKernels& teacher) const {
  constexpr absl::string_view kField = "distillation.teacher";
  LOSSD_RETURN_IF_ERROR(ValidateTeacher(config_, teacher.config(), kField));
  const auto* const other = dynamic_cast<const RemoteHead*>(&teacher);
  if (other == nullptr || other->worker_ != worker_) {
    return errors::FieldError(kField, "be a head of the same ranks", "another one");
  }
  const int64_t most = kMostTeacherHidden * config_.hidden_size;
  if (other->config_.hidden_size <= most) return absl::OkStatus();
  return errors::FieldError(kField,
                            absl::StrCat("have a hidden_size of at most ", most, ", ", kMostTeacherHidden,
                                         " times the student's, on a server of several processes"),
                            absl::StrCat("one with hidden_size ", other->config_.hidden_size),
                            absl::StatusCode::kUnimplemented);
}

absl::Status RemoteHead::ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                    absl::Span<uint8_t> out) {
  LOSSD_RETURN_IF_ERROR(ValidateTensorAccess(config_, id, row_begin, rows, dtype, out.size()));
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

void RemoteHead::SkipWritesTo(absl::Span<const int> ranks) {
  skips_writes_ = std::find(ranks.begin(), ranks.end(), worker_->rank()) != ranks.end();
}

absl::Status RemoteHead::WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                     absl::Span<const uint8_t> in) {
  absl::Status valid = ValidateTensorAccess(config_, id, row_begin, rows, dtype, in.size());
  if (!valid.ok() || skips_writes_) return valid;
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
  LOSSD_RETURN_IF_ERROR(ValidateTensorAccess(config_, id, row_begin, rows, dtype, in.size()));
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
  LOSSD_TRY(const v1::Answer answer, worker_->Call(std::move(request)));
  return answer.grad_norm();
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
  LOSSD_TRY(kernels::BackendInfo info, FromProto(worker->hello().backend()));
  if (worker->hello().backend().max_chunks_in_flight() < 1) {
    return absl::InternalError("a worker takes no chunks");
  }
  return std::unique_ptr<RemoteBackend>(new RemoteBackend(std::move(info), std::move(worker)));
}

namespace {

absl::Status CheckResidency(const HeadConfig& config) {
  if (config.residency == kernels::Residency::kDevice) return absl::OkStatus();
  return errors::FieldError("residency", "be device on a server of several processes",
                            kernels::Name(config.residency), absl::StatusCode::kUnimplemented);
}

}  // namespace

absl::StatusOr<kernels::MemoryBytes> RemoteBackend::PlanHead(const HeadConfig& config) const {
  LOSSD_RETURN_IF_ERROR(CheckResidency(config));
  v1::Request request;
  *request.mutable_plan() = ToProto(config);
  LOSSD_TRY(const v1::Answer answer, worker_->Call(std::move(request)));
  return BytesOf(answer.plan());
}

absl::StatusOr<std::unique_ptr<kernels::HeadKernels>> RemoteBackend::CreateHead(const HeadConfig& config) {
  LOSSD_RETURN_IF_ERROR(CheckResidency(config));
  const uint64_t id = next_head_++;
  v1::Request request;
  request.set_head(id);
  *request.mutable_create() = ToProto(config);
  LOSSD_TRY(const v1::Answer answer, worker_->Call(std::move(request)));
  return std::make_unique<RemoteHead>(config, id, answer.head(), worker_);
}

absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> RemoteBackend::AllocateStaging(int64_t) {
  return OnlyAtTheLeader();
}
absl::StatusOr<std::unique_ptr<kernels::RetainedMemory>> RemoteBackend::AllocateRetained(int64_t) {
  return OnlyAtTheLeader();
}
absl::Status RemoteBackend::PlanHostMemory(kernels::MemoryKind, int64_t) { return OnlyAtTheLeader(); }

// ---- Operations that all ranks do together ----

namespace {

// The replicas of one head on all ranks: `own` is the leader's, `others` are the workers' heads. See
// MakeRankReplicas.
class RankReplicas final : public kernels::Replicas {
 public:
  RankReplicas(std::unique_ptr<kernels::Replicas> own, std::vector<RemoteHead*> others,
               absl::Duration timeout)
      : own_(std::move(own)), others_(std::move(others)), timeout_(timeout) {}

  absl::Status SumGradients() override {
    return Together(&RemoteHead::StartSumGradients, [this] { return own_->SumGradients(); });
  }
  absl::Status SpreadValues() override {
    return Together(&RemoteHead::StartSpreadValues, [this] { return own_->SpreadValues(); });
  }

 private:
  // Asks all workers with `start`, does the leader's part with `own`, and then awaits the workers' answers.
  absl::Status Together(uint64_t (RemoteHead::*start)(), absl::FunctionRef<absl::Status()> own) {
    std::vector<uint64_t> requests;
    for (RemoteHead* other : others_) requests.push_back((other->*start)());
    absl::Status status = own();
    // A rank that has not answered after the time of a collective will never answer. If the leader itself has
    // failed, it waits only for the workers' reasons.
    const absl::Time deadline =
        clocks::SteadyNow() + (status.ok() ? timeout_ + kLastWords : std::min(timeout_, kLastWords));
    // `silent`: the error of a worker that did not answer. It counts only if no worker reports another error.
    absl::Status of_others, silent;
    for (size_t i = 0; i < others_.size(); ++i) {
      absl::Status answer = AnswerOf(*others_[i], requests[i], deadline, status);
      (absl::IsDeadlineExceeded(answer) ? silent : of_others).Update(answer);
    }
    // An error of a worker takes precedence. If a rank is lost, the worker's error names the cause, but the
    // leader's own error only says that it has waited without success.
    of_others.Update(status);
    if (of_others.ok() && !silent.ok()) return absl::UnavailableError(silent.message());
    return of_others;
  }

  // Awaits a worker's answer. Gives up a worker that does not answer by the deadline.
  absl::Status AnswerOf(const RemoteHead& other, uint64_t request, absl::Time deadline,
                        const absl::Status& own) const {
    WorkerStream& worker = other.worker();
    const absl::Status answer = worker.Await(request, deadline).status();
    if (!absl::IsDeadlineExceeded(answer)) return answer;
    const std::string reason = absl::StrCat("rank ", worker.rank(), " (", worker.hello().host(),
                                            ") is lost: it has not done its part of a collective within ",
                                            absl::FormatDuration(timeout_), " (--collective_timeout)");
    worker.GiveUp(absl::UnavailableError(own.ok() ? reason : absl::StrCat(reason, "; ", own.message())));
    return absl::DeadlineExceededError(reason);
  }

  const std::unique_ptr<kernels::Replicas> own_;
  const std::vector<RemoteHead*> others_;
  const absl::Duration timeout_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<kernels::Replicas>> MakeRankReplicas(
    kernels::RankLink* link, absl::Duration timeout, absl::Span<kernels::HeadKernels* const> heads) {
  LOSSD_TRY(std::unique_ptr<kernels::Replicas> own, link->Join(heads.front()));
  std::vector<RemoteHead*> others;
  for (kernels::HeadKernels* head : heads.subspan(1)) {
    auto* const remote = dynamic_cast<RemoteHead*>(head);
    if (remote == nullptr) return absl::InternalError("the head of a worker is none");
    others.push_back(remote);
  }
  return std::make_unique<RankReplicas>(std::move(own), std::move(others), timeout);
}

absl::Status JoinRankClasses(kernels::RankLink* link, bool same_chunks,
                             absl::Span<kernels::HeadKernels* const> heads) {
  const int64_t rows = heads.front()->chunk_rows();
  for (size_t rank = 1; same_chunks && rank < heads.size(); ++rank) {
    if (heads[rank]->chunk_rows() == rows) continue;
    return errors::FieldError(
        absl::StrCat("rank ", rank, ": rows of a chunk"),
        absl::StrCat("be as many as those of rank 0, ", rows, ": give all ranks the same --workspace_bytes"),
        heads[rank]->chunk_rows());
  }
  return link->JoinClasses(heads.front());
}

// ---- Files of checkpoints ----

namespace {

// A save or load of files on a worker, begun by one request. Used by RankSave and RankLoad, which call in
// this order: Start; AwaitReady, until the worker has proved that it can do its part; GoOn; in a save
// AwaitRead, until the worker has read all tensors; Await. Cancel is possible at any time. The worker's end
// is FileJob (worker.h).
class FileWork {
 public:
  FileWork(std::shared_ptr<WorkerStream> worker, const kernels::RemotePart& part)
      : worker_(std::move(worker)), part_(part) {}
  ~FileWork() {
    if (request_ == 0 || awaited_) return;  // not started, or ended
    Cancel();
    worker_->requests().Forget(request_);
  }
  FileWork(const FileWork&) = delete;
  FileWork& operator=(const FileWork&) = delete;

  int rank() const { return worker_->rank(); }
  const kernels::RemotePart& part() const { return part_; }

  void Start(v1::Request request) {
    request.set_head(part_.head);
    request_ = worker_->Start(std::move(request));
  }
  absl::StatusOr<v1::FilesProgress> AwaitReady(absl::Time deadline) {
    const bool in_time = worker_->requests().AwaitProgress(
        request_, [](const v1::FilesProgress& progress) { return progress.ready(); }, deadline);
    if (!in_time) return absl::DeadlineExceededError("it does not answer in time");
    v1::FilesProgress progress = worker_->requests().Progress(request_);
    if (progress.ready()) return progress;
    const absl::Status ended = Await().status();
    return ended.ok() ? absl::InternalError(absl::StrCat("rank ", rank(), " ends without having begun"))
                      : ended;
  }
  void GoOn(v1::GoOn with) {
    with.set_request(request_);
    v1::Request request;
    request.set_head(part_.head);
    *request.mutable_go_on() = std::move(with);
    Send(std::move(request));
  }
  bool AwaitRead(absl::Time deadline) const {
    return worker_->requests().AwaitProgress(
        request_, [](const v1::FilesProgress& progress) { return progress.all_read(); }, deadline);
  }
  // Waits for the end of the work. Errors name the rank.
  absl::StatusOr<v1::Answer> Await() {
    absl::StatusOr<v1::Answer> answer = worker_->Await(request_);
    awaited_ = true;
    if (answer.ok() || worker_->lost()) return answer;
    return absl::Status(answer.status().code(),
                        absl::StrCat("rank ", rank(), ": ", answer.status().message()));
  }
  // The last progress that the worker has reported. It remains available after the end of the work.
  head::SaveProgress progress() {
    const v1::FilesProgress progress = worker_->requests().Progress(request_);
    if (progress.read_bytes() > read_bytes_) read_bytes_ = progress.read_bytes();
    if (progress.written_bytes() > written_bytes_) written_bytes_ = progress.written_bytes();
    return {.read_bytes = read_bytes_, .written_bytes = written_bytes_};
  }
  bool failed() const { return worker_->requests().HasFailed(request_); }
  void Cancel() {
    if (cancelled_.exchange(true)) return;
    v1::Request request;
    request.set_head(part_.head);
    request.set_cancel_files(request_);
    Send(std::move(request));
  }

 private:
  void Send(v1::Request request) { worker_->requests().Forget(worker_->Start(std::move(request))); }

  const std::shared_ptr<WorkerStream> worker_;
  const kernels::RemotePart part_;
  uint64_t request_ = 0;
  bool awaited_ = false;
  std::atomic<bool> cancelled_{false};
  std::atomic<int64_t> read_bytes_{0}, written_bytes_{0};
};

class RankSave final : public head::SaveSite {
 public:
  RankSave(RankFiles* files, std::shared_ptr<WorkerStream> worker, const kernels::RemotePart& part)
      : files_(files), work_(std::move(worker), part) {}

  int rank() const override { return work_.rank(); }
  const kernels::RemotePart& part() const override { return work_.part(); }

  void StartProof(const std::string& head, const std::string& folder) override {
    v1::Request request;
    request.mutable_save_files()->set_head_name(head);
    request.mutable_save_files()->set_folder(folder);
    work_.Start(std::move(request));
  }
  absl::StatusOr<head::FolderProof> AwaitProof(absl::Time deadline) override {
    LOSSD_TRY(const v1::FilesProgress ready, work_.AwaitReady(deadline));
    return head::FolderProof{ready.nonce(), ready.token()};
  }
  void NoteProof(const absl::Status& status) override { files_->Note(rank(), "saved", status); }

  void StartWriting(const std::vector<head::PlannedFile>& files, size_t first, size_t all,
                    int threads) override {
    v1::GoOn go_on;
    for (const head::PlannedFile& file : files) {
      v1::FileClasses* const classes = go_on.add_files();
      classes->set_begin(file.classes.begin);
      classes->set_end(file.classes.end);
    }
    go_on.set_first(static_cast<uint32_t>(first));
    go_on.set_all(static_cast<uint32_t>(all));
    go_on.set_threads(static_cast<uint32_t>(threads));
    work_.GoOn(std::move(go_on));
  }
  bool AwaitRead(absl::Time deadline) override { return work_.AwaitRead(deadline); }
  absl::StatusOr<std::vector<head::ManifestShard>> Await() override {
    LOSSD_TRY(const v1::Answer answer, work_.Await());
    std::vector<head::ManifestShard> lines;
    for (const v1::FileLine& line : answer.lines()) lines.push_back(FromProto(line));
    return lines;
  }

  head::SaveProgress progress() override { return work_.progress(); }
  bool failed() const override { return work_.failed(); }
  void Cancel() override { work_.Cancel(); }

 private:
  RankFiles* const files_;
  FileWork work_;
};

class RankLoad final : public head::LoadSite {
 public:
  RankLoad(RankFiles* files, std::shared_ptr<WorkerStream> worker, const kernels::RemotePart& part)
      : files_(files), work_(std::move(worker), part) {}

  int rank() const override { return work_.rank(); }
  const kernels::RemotePart& part() const override { return work_.part(); }

  void StartOpening(const std::string& checkpoint, const std::string& content_digest) override {
    v1::Request request;
    v1::LoadFiles* const load = request.mutable_load_files();
    load->set_checkpoint(checkpoint);
    load->set_content_digest(content_digest);
    load->set_replica(static_cast<uint32_t>(part().replica.index));
    load->set_replicas(static_cast<uint32_t>(part().replica.count));
    work_.Start(std::move(request));
  }
  absl::Status AwaitOpened(absl::Time deadline) override { return work_.AwaitReady(deadline).status(); }
  void NoteOpened(const absl::Status& status) override { files_->Note(rank(), "loaded", status); }
  void StartLoading() override { work_.GoOn({}); }
  absl::Status Await() override { return work_.Await().status(); }
  void Cancel() override { work_.Cancel(); }

 private:
  RankFiles* const files_;
  FileWork work_;
};

}  // namespace

void RankFiles::SetWorkers(const Workers& workers) {
  absl::MutexLock lock(&mutex_);
  workers_ = workers;
}

std::shared_ptr<WorkerStream> RankFiles::Find(int rank) const {
  absl::MutexLock lock(&mutex_);
  const auto found = workers_.find(rank);
  return found == workers_.end() ? nullptr : found->second;
}

std::vector<std::unique_ptr<head::SaveSite>> RankFiles::ForSave(absl::Span<const kernels::RemotePart> parts) {
  std::vector<std::unique_ptr<head::SaveSite>> sites;
  for (const kernels::RemotePart& part : parts) {
    if (auto worker = Find(part.rank)) {
      sites.push_back(std::make_unique<RankSave>(this, std::move(worker), part));
    }
  }
  return sites;
}

std::vector<std::unique_ptr<head::LoadSite>> RankFiles::ForLoad(absl::Span<const kernels::RemotePart> parts) {
  std::vector<std::unique_ptr<head::LoadSite>> sites;
  for (const kernels::RemotePart& part : parts) {
    if (auto worker = Find(part.rank)) {
      sites.push_back(std::make_unique<RankLoad>(this, std::move(worker), part));
    }
  }
  return sites;
}

void RankFiles::Note(int rank, const std::string& what, const absl::Status& status) {
  const std::string way = status.ok() ? "by itself" : "through rank 0";
  {
    absl::MutexLock lock(&mutex_);
    std::string& noted = noted_[{rank, what}];
    if (noted == way) return;
    noted = way;
  }
  const auto level = status.ok() ? log::LogLevel::kInfo : log::LogLevel::kWarning;
  log::Log(level, absl::StrCat("checkpoints of a rank are ", what),
           {{"rank", rank}, {"how", way}, {"reason", status.ok() ? "it sees the folder" : status.message()}});
}

// ---- The library that carries the sums and exchanges ----

namespace {

absl::Status CheckOffer(const std::string& collectives, const std::string& nccl_version,
                        const v1::Hello& worker) {
  const auto& offered = worker.collectives();
  if (std::find(offered.begin(), offered.end(), collectives) == offered.end()) {
    return errors::FieldError(absl::StrCat("rank ", worker.rank(), ": collectives"),
                              absl::StrCat("have ", collectives, ", as rank 0 has"),
                              absl::StrJoin(offered, ", "));
  }
  // Two versions of NCCL cannot exchange with each other.
  if (collectives != kernels::kNccl || worker.nccl_version() == nccl_version) return absl::OkStatus();
  return errors::FieldError(absl::StrCat("rank ", worker.rank(), ": version of NCCL"),
                            absl::StrCat("be what rank 0 has, ", nccl_version), worker.nccl_version());
}

}  // namespace

absl::Status CheckGpus(const std::string& why, const std::string& leader_gpu,
                       absl::Span<const v1::Hello> workers) {
  if (leader_gpu.empty()) return absl::OkStatus();
  std::map<std::string, uint32_t> taken = {{leader_gpu, 0}};
  for (const v1::Hello& worker : workers) {
    const auto [other, is_new] = taken.emplace(worker.gpu_uuid(), worker.rank());
    if (is_new) continue;
    return errors::FieldError(
        absl::StrCat("rank ", worker.rank(), ": device"),
        absl::StrCat("be a GPU of its own for ", why, ", and rank ", other->second, " has this one"),
        worker.gpu_uuid());
  }
  return absl::OkStatus();
}

absl::StatusOr<CollectivesChoice> ChooseCollectives(absl::Span<const std::string> offered,
                                                    const std::string& leader_gpu,
                                                    const std::string& nccl_version,
                                                    absl::Span<const v1::Hello> workers) {
  absl::Status in_the_way;  // the obstacle to the first library of `offered`
  for (const std::string& collectives : offered) {
    absl::Status status =
        collectives == kernels::kNccl ? CheckGpus("collectives nccl", leader_gpu, workers) : absl::OkStatus();
    for (const v1::Hello& worker : workers) {
      status.Update(CheckOffer(collectives, nccl_version, worker));
    }
    if (status.ok()) return CollectivesChoice{collectives, std::string(in_the_way.message())};
    in_the_way.Update(status);
  }
  if (in_the_way.ok()) return absl::InternalError("rank 0 has no collectives");
  return in_the_way;
}

absl::StatusOr<std::string> UseCollectives(kernels::RankLink* link, const std::string& leader_gpu,
                                           int devices, absl::Span<const v1::Hello> workers) {
  if (devices > 1) LOSSD_RETURN_IF_ERROR(CheckGpus("processes of several devices", leader_gpu, workers));
  LOSSD_TRY(const CollectivesChoice choice,
            ChooseCollectives(link->CollectivesOffered(), leader_gpu, link->Traits().nccl_version, workers));
  const std::string& collectives = choice.collectives;
  if (choice.reason.empty()) {
    log::Log(log::LogLevel::kInfo, "ranks exchange", {{"collectives", collectives}});
  } else {
    log::Log(log::LogLevel::kWarning, "ranks exchange, but not the fastest way",
             {{"collectives", collectives}, {"reason", choice.reason}});
  }
  LOSSD_RETURN_IF_ERROR(link->UseCollectives(collectives));
  return collectives;
}

}  // namespace lossd::ranks
