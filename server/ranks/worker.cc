// SPDX-License-Identifier: Apache-2.0
// Worker, a rank that is not the leader, with its heads and its files (worker.h).
//
// A message takes this way: the reading thread (Worker::Serve) puts it into requests_. The driving thread
// (Drive, Handle) takes it from there, calls the backend, and puts the answer into answers_. The writing
// thread (Write) sends it. A chunk comes as a ChunkStart and then its slices, one message each. It goes to
// the backend when its last slice has come (SubmitIfComplete), and callbacks of the backend send its results.
//
// A job on files (FileJob) has two stages. First it shows the leader that it can do its part: in a save it
// writes a proof file, in a load it opens the checkpoint. Then it waits for GoOn, writes or loads the files,
// and sends the one answer to its request.
#include "server/ranks/worker.h"

#include <grpcpp/grpcpp.h>

#include <random>

#include "absl/cleanup/cleanup.h"
#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "kernels/host_memory.h"
#include "kernels/validation.h"
#include "lossd/ranks/v1/ranks.grpc.pb.h"
#include "proto/tensorfile/file.h"
#include "server/log/log.h"
#include "server/ranks/messages.h"
#include "server/ranks/worker_stream.h"

namespace lossd::ranks {

// ---- WorkerFiles ----

WorkerFiles::WorkerFiles(const WorkerFilesOptions& options, Parts parts)
    : options_(options), parts_(std::move(parts)) {}

WorkerFiles::~WorkerFiles() { End(); }

bool WorkerFiles::IsFor(const v1::Request& request) {
  return request.has_save_files() || request.has_load_files() || request.has_go_on() ||
         request.has_cancel_files();
}

void WorkerFiles::Handle(const v1::Request& request) {
  JoinEnded();
  const absl::Status status = Do(request);
  if (status.ok() && (request.has_save_files() || request.has_load_files())) return;  // the job answers later
  v1::FromWorker message;
  message.mutable_answer()->set_request(request.id());
  *message.mutable_answer()->mutable_status() = ToProto(status);
  parts_.send(std::move(message));
}

absl::Status WorkerFiles::Do(const v1::Request& request) {
  if (request.has_save_files() || request.has_load_files()) return Begin(request);
  absl::MutexLock lock(&mutex_);
  FileJob* const job = Find(request.has_go_on() ? request.go_on().request() : request.cancel_files());
  if (request.has_go_on()) {
    return job == nullptr ? absl::NotFoundError("that work on files is over") : job->GoOn(request.go_on());
  }
  if (job != nullptr) job->Cancel();
  return absl::OkStatus();
}

absl::Status WorkerFiles::Begin(const v1::Request& request) {
  absl::MutexLock lock(&mutex_);
  if (ended_) return absl::UnavailableError("the worker ends");
  if (jobs_.size() >= kMostJobs) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", kMostJobs, " saves and loads under way already"));
  }
  auto& job = jobs_[request.id()];
  if (job != nullptr) return absl::InternalError("a request comes twice");
  job = std::make_unique<FileJob>(options_, parts_, request);
  return absl::OkStatus();
}

FileJob* WorkerFiles::Find(uint64_t request) {
  const auto found = jobs_.find(request);
  return found == jobs_.end() ? nullptr : found->second.get();
}

void WorkerFiles::JoinEnded() {
  absl::MutexLock lock(&mutex_);
  for (auto job = jobs_.begin(); job != jobs_.end();) {
    job = job->second->ended() ? jobs_.erase(job) : std::next(job);
  }
}

void WorkerFiles::End() {
  std::map<uint64_t, std::unique_ptr<FileJob>> jobs;
  {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
    jobs.swap(jobs_);
  }
  for (const auto& [request, job] : jobs) job->EndDriver();
}

// ---- FileJob ----

namespace {

constexpr int64_t kMostThreads = 64;

std::string RandomToken() {
  std::random_device random;
  std::string token;
  for (int i = 0; i < 4; ++i) absl::StrAppend(&token, absl::Hex(random(), absl::kZeroPad8));
  return token;
}

// Returns `status` with the folder's name as the leader knows it, instead of the path by which this process
// has opened the folder.
absl::Status Named(const absl::Status& status, const head::FolderBelow& folder) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrReplaceAll(status.message(), {{folder.path(), folder.name()}}));
}

}  // namespace

FileJob::FileJob(const WorkerFilesOptions& options, const WorkerFiles::Parts& parts,
                 const v1::Request& request)
    : options_(options), parts_(parts), request_(request), thread_([this] { Run(); }) {}

FileJob::~FileJob() {
  Cancel();
  thread_.join();
}

// ---- FileJob: other threads ----

absl::Status FileJob::GoOn(const v1::GoOn& go_on) {
  absl::MutexLock lock(&mutex_);
  if (!waits_ || go_on_.has_value()) return absl::InternalError("the work on files does not wait for that");
  go_on_ = go_on;
  return absl::OkStatus();
}

void FileJob::Cancel() {
  absl::MutexLock lock(&mutex_);
  cancelled_ = true;
}

void FileJob::EndDriver() {
  absl::MutexLock lock(&mutex_);
  cancelled_ = true;
  driver_ended_ = true;
}

bool FileJob::ended() const {
  absl::MutexLock lock(&mutex_);
  return ended_;
}

bool FileJob::cancelled() const {
  absl::MutexLock lock(&mutex_);
  return cancelled_;
}

// ---- FileJob: the job's thread ----

void FileJob::Run() {
  progress_.set_request(request_.id());
  v1::FromWorker message;
  v1::Answer& answer = *message.mutable_answer();
  *answer.mutable_status() = ToProto(request_.has_save_files() ? Save(answer) : Load());
  answer.set_request(request_.id());
  parts_.send(std::move(message));
  absl::MutexLock lock(&mutex_);
  ended_ = true;
}

void FileJob::SendProgress() {
  v1::FromWorker message;
  *message.mutable_files() = progress_;
  parts_.send(std::move(message));
}

absl::StatusOr<v1::GoOn> FileJob::AwaitGoOn() {
  {
    absl::MutexLock lock(&mutex_);
    waits_ = true;
  }
  progress_.set_ready(true);
  SendProgress();
  absl::MutexLock lock(&mutex_);
  const auto over = [this] {
    mutex_.AssertHeld();
    return cancelled_ || go_on_.has_value();
  };
  mutex_.Await(absl::Condition(&over));
  if (cancelled_) return absl::CancelledError("the work on files was cancelled");
  return *go_on_;
}

absl::Status FileJob::OnDriver(absl::FunctionRef<absl::Status(kernels::HeadKernels& head)> fn) {
  bool done = false;
  absl::Status status;
  parts_.on_driver([&] {
    kernels::HeadKernels* const head = parts_.find(request_.head());
    absl::Status result = head == nullptr ? absl::NotFoundError("the head was deleted meanwhile") : fn(*head);
    absl::MutexLock lock(&mutex_);
    status = std::move(result);
    done = true;
  });
  absl::MutexLock lock(&mutex_);
  const auto over = [&] {
    mutex_.AssertHeld();
    return done || driver_ended_;
  };
  mutex_.Await(absl::Condition(&over));
  return done ? status : absl::CancelledError("the worker ends");
}

absl::StatusOr<kernels::HeadConfig> FileJob::Config() {
  kernels::HeadConfig config;
  absl::Status status = OnDriver([&](kernels::HeadKernels& head) {
    config = head.config();
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return config;
}

int64_t FileJob::BufferBytes(int threads) const {
  const auto host = kernels::HostMemory().Available();
  if (!host.has_value()) return options_.buffer_bytes;
  const int64_t writing = threads * formats::kDirectBufferBytes;
  return std::clamp<int64_t>(host->bytes - options_.reserve_bytes - writing, 0, options_.buffer_bytes);
}

// ---- FileJob: saving ----

absl::Status FileJob::Save(v1::Answer& answer) {
  const v1::SaveFiles& save = request_.save_files();
  if (options_.directory.empty()) return absl::FailedPreconditionError("there is no checkpoint directory");
  LOSSD_RETURN_IF_ERROR(head::ValidateName("head", save.head_name()));
  LOSSD_RETURN_IF_ERROR(head::ValidateTemporaryName(save.folder()));
  LOSSD_TRY(const auto folder,
            head::FolderBelow::Open(options_.directory, {save.head_name(), save.folder()}));
  // While the folder is locked, a server that starts does not remove it as a leftover.
  const auto lock = head::FolderLock::Try(folder.path(), head::FolderLock::Kind::kShared);
  if (!lock.ok()) return Named(lock.status(), folder);
  const std::string proof = absl::StrCat(folder.path(), "/", head::ProofFile(options_.rank));
  // The leader reads the proof before it sends GoOn, so the file may be removed at the end.
  const auto remove = absl::MakeCleanup([&] { options_.disk->RemoveFile(proof).IgnoreError(); });
  if (absl::Status status = Prove(folder); !status.ok()) return Named(status, folder);
  LOSSD_TRY(const v1::GoOn go_on, AwaitGoOn());
  LOSSD_TRY(const kernels::HeadConfig config, Config());
  LOSSD_TRY(const auto files, FilesOf(go_on, config));
  const int threads = static_cast<int>(std::clamp<int64_t>(go_on.threads(), 1, kMostThreads));
  const auto lines = Write(folder, config, files, threads);
  if (!lines.ok()) return Named(lines.status(), folder);
  for (const head::ManifestShard& line : *lines) *answer.add_lines() = ToProto(line);
  return absl::OkStatus();
}

absl::Status FileJob::Prove(const head::FolderBelow& folder) {
  LOSSD_TRY(const auto nonce, head::ReadSmallFile(folder.path(), head::kNonceFile, head::kNonceBytes));
  progress_.set_nonce(nonce);
  progress_.set_token(RandomToken());
  return head::WriteSmallFile(options_.disk, absl::StrCat(folder.path(), "/", head::ProofFile(options_.rank)),
                              progress_.token());
}

absl::StatusOr<std::vector<head::PlannedFile>> FileJob::FilesOf(const v1::GoOn& go_on,
                                                                const kernels::HeadConfig& config) const {
  const auto count = static_cast<size_t>(go_on.files_size());
  if (count == 0 || go_on.all() > head::kMostShards || count > go_on.all() ||
      go_on.first() > go_on.all() - count) {
    return absl::InternalError(absl::StrCat("the leader wants ", count, " files from number ", go_on.first(),
                                            " on, of ", go_on.all()));
  }
  std::vector<head::PlannedFile> files;
  for (const v1::FileClasses& classes : go_on.files()) {
    if (classes.begin() < 0 || classes.begin() >= classes.end() || classes.end() > config.vocab_size) {
      return absl::InternalError(absl::StrCat("the leader wants classes [", classes.begin(), ", ",
                                              classes.end(), ") of ", config.vocab_size));
    }
    files.push_back(
        {head::ShardFile(go_on.first() + files.size(), go_on.all()), {classes.begin(), classes.end()}});
  }
  return files;
}

absl::StatusOr<std::vector<head::ManifestShard>> FileJob::Write(const head::FolderBelow& folder,
                                                                const kernels::HeadConfig& config,
                                                                const std::vector<head::PlannedFile>& files,
                                                                int threads) {
  const auto report = [this](const head::SaveProgress& progress) {
    progress_.set_read_bytes(progress.read_bytes);
    progress_.set_written_bytes(progress.written_bytes);
    SendProgress();
  };
  head::ShardFiles shards(config, files,
                          {.slice_bytes = options_.slice_bytes,
                           .buffer_bytes = BufferBytes(threads),
                           .threads = threads,
                           .disk = options_.disk,
                           .on_progress = report,
                           .cancelled = [this] { return cancelled(); }});
  absl::StatusOr<std::vector<head::ManifestShard>> lines;
  // Two threads work at the same time: this one reads the tensors (through the driving thread), and `disk`
  // writes them. `shards` holds the buffers between them.
  std::thread disk([&] {
    lines = shards.Write(folder.path());
    absl::Status status = lines.status();
    if (status.ok()) status = options_.disk->SyncFolder(folder.path());
    shards.End(status);
  });
  absl::Status status =
      shards.Read([this](kernels::TensorId id, int64_t row_begin, int64_t rows, absl::Span<uint8_t> out) {
        return OnDriver([&](kernels::HeadKernels& head) {
          return head.ReadTensor(id, row_begin, rows, kernels::DType::kFloat32, out);
        });
      });
  if (status.ok()) {
    // The leader may let the head change from now on.
    progress_.set_all_read(true);
    SendProgress();
  }
  shards.Close(status);
  status.Update(shards.AwaitEnd());
  disk.join();
  if (!status.ok()) return status;
  return lines;
}

// ---- FileJob: loading ----

absl::Status FileJob::Load() {
  const v1::LoadFiles& load = request_.load_files();
  if (options_.directory.empty()) return absl::FailedPreconditionError("there is no checkpoint directory");
  LOSSD_TRY(const auto reader, head::CheckpointReader::Open(options_.directory, load.checkpoint()));
  if (reader->content_digest() != load.content_digest()) {
    return absl::FailedPreconditionError("there is another checkpoint of that name");
  }
  if (load.replica() >= load.replicas()) return absl::InternalError("the leader names no part of a head");
  LOSSD_TRY(const v1::GoOn go_on, AwaitGoOn());
  LOSSD_TRY(const kernels::HeadConfig config, Config());
  LOSSD_RETURN_IF_ERROR(head::CheckLoadable(reader->subject().config, config));
  const kernels::Replica replica = {static_cast<int>(load.replica()), static_cast<int>(load.replicas())};
  const int threads = static_cast<int>(std::clamp<int64_t>(options_.threads, 1, kMostThreads));
  head::LoadOptions options;
  options.buffer_bytes = BufferBytes(0);  // a load has no threads that write
  options.threads = threads;
  options.verify_first = false;
  options.wanted = [&](const head::TensorPart& part) {
    return head::RowsOfReplica(config, part, replica).rows > 0;
  };
  return reader->Load(
      [&](kernels::TensorId id, int64_t row_begin, int64_t rows, absl::Span<const uint8_t> in) {
        if (cancelled()) return absl::CancelledError("the load was cancelled");
        // A file may also have rows of other ranks.
        const head::TensorPart own = head::RowsOfReplica(config, {id, row_begin, rows}, replica);
        if (own.rows <= 0) return absl::OkStatus();
        const size_t row_bytes = in.size() / static_cast<size_t>(rows);
        return WriteRows(id, own.row_begin, own.rows,
                         in.subspan(static_cast<size_t>(own.row_begin - row_begin) * row_bytes,
                                    static_cast<size_t>(own.rows) * row_bytes));
      },
      options);
}

absl::Status FileJob::WriteRows(kernels::TensorId id, int64_t row_begin, int64_t rows,
                                absl::Span<const uint8_t> in) {
  return OnDriver([&](kernels::HeadKernels& head) {
    return head.WriteTensor(id, row_begin, rows, kernels::DType::kFloat32, in);
  });
}

namespace {

// Slices begin at multiples of this many bytes in their buffer, as staging memory does.
constexpr size_t kAlignment = 64;
// The most bytes of one read of a tensor. A single row may have more.
constexpr int64_t kMostPayload = int64_t{64} << 20;

size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// A chunk while the backend computes it, with the messages that hold its inputs and its results.
struct WorkerChunk {
  kernels::Chunk chunk;
  std::vector<v1::ChunkSlice> messages;
  std::vector<v1::SliceResults> results;
  std::vector<kernels::Slice> slices;
  RowBytes row_bytes;
  bool is_part = false;                    // a part of a head that is split by vocabulary
  WorkerBuffers::Buffer buffer;            // null: no slice needs it
  std::vector<MappedRows::Rows> in_place;  // the places that the slices name
};

// The bytes of a buffer for `rows` rows in `slices` slices that are not empty.
int64_t BufferBytes(int64_t rows, size_t row_bytes, int64_t slices) {
  return rows * static_cast<int64_t>(row_bytes) + slices * static_cast<int64_t>(kAlignment);
}

size_t RowBytesOf(const kernels::HeadKernels& head, const kernels::Chunk& chunk) {
  return static_cast<size_t>(head.config().hidden_size) * SizeOf(chunk.hidden_dtype);
}

bool IsPart(const kernels::HeadKernels& head) { return head.config().split == kernels::Split::kVocabulary; }

// The memory at a place that a slice names. `chunk` keeps it mapped.
absl::StatusOr<void*> FindRows(const MappedRows* rows, const v1::RowsPlace& place, size_t bytes,
                               WorkerChunk& chunk) {
  if (rows == nullptr) return absl::InternalError("the leader named memory, and shares none");
  LOSSD_TRY(MappedRows::Rows found, rows->Find(place, bytes));
  chunk.in_place.push_back(std::move(found));
  return chunk.in_place.back().data;
}

absl::StatusOr<SliceMemory> MemoryOf(const v1::ChunkSlice& message, const MappedRows* rows,
                                     WorkerChunk& chunk) {
  const auto count = static_cast<size_t>(message.rows());
  const size_t bytes = count * chunk.row_bytes.hidden;
  SliceMemory memory;
  if (message.has_hidden_at()) {
    LOSSD_TRY(memory.hidden, FindRows(rows, message.hidden_at(), bytes, chunk));
  }
  if (message.has_grad_hidden_at()) {
    LOSSD_TRY(memory.grad_hidden, FindRows(rows, message.grad_hidden_at(), bytes, chunk));
  }
  if (message.has_teacher_hidden_at()) {
    const size_t of_teacher = count * chunk.row_bytes.teacher;
    LOSSD_TRY(memory.teacher_hidden, FindRows(rows, message.teacher_hidden_at(), of_teacher, chunk));
  }
  return memory;
}

// Checks that the slices together have at most `most` rows.
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
    const size_t bytes = static_cast<size_t>(message.rows()) * chunk.row_bytes.hidden;
    LOSSD_TRY(SliceMemory memory, MemoryOf(message, rows, chunk));
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
      SetResults(chunk.slices[i], chunk.row_bytes.hidden, chunk.messages[i].has_grad_hidden_at(),
                 chunk.results[i]);
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

absl::Status WorkerHeads::Join(kernels::HeadKernels* head, std::unique_ptr<kernels::Replicas>& replicas) {
  LOSSD_RETURN_IF_ERROR(ReserveBuffers(*head));
  if (IsPart(*head)) return link_->JoinClasses(head);
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

// Reserves buffers for the chunks of a new head, so that no chunk fails for lack of memory. Not needed if
// rows lie in shared memory. But a part of a head that is split by vocabulary needs buffers in any case,
// because its gradients have no place there, and its chunks must not fail: the other parts wait for them.
absl::Status WorkerHeads::ReserveBuffers(const kernels::HeadKernels& head) {
  if (!IsPart(head) && rows_ != nullptr) return absl::OkStatus();
  // A chunk has at most as many slices with rows as it has rows; float is the widest dtype of hidden states.
  const int64_t rows = head.chunk_rows();
  const size_t row_bytes = static_cast<size_t>(head.config().hidden_size) * sizeof(float);
  return buffers_->Reserve(BufferBytes(rows, row_bytes, rows));
}

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
  chunk->row_bytes.hidden = RowBytesOf(kernels, made);
  if (start.teacher() != 0) {
    kernels::HeadKernels* const teacher = Find(start.teacher());
    if (teacher == nullptr) return absl::InternalError(absl::StrCat("there is no head ", start.teacher()));
    chunk->chunk.teacher = teacher;
    chunk->row_bytes.teacher = RowBytesOf(*teacher, made);
  }
  chunk->is_part = IsPart(kernels);
  LOSSD_RETURN_IF_ERROR(CheckRows(chunk->messages, start.rows()));
  const auto need_memory = std::count_if(chunk->messages.begin(), chunk->messages.end(), NeedsOwnMemory);
  if (need_memory > 0) {
    absl::StatusOr<WorkerBuffers::Buffer> buffer =
        buffers_->Take(BufferBytes(start.rows(), chunk->row_bytes.hidden, need_memory));
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
                        // The backend does not access the rows any more, so the chunk no longer keeps their
                        // memory mapped.
                        chunk->in_place.clear();
                        SendResults(*chunk, id, status, send);
                        if (chunk->buffer != nullptr) buffers->Return(std::move(chunk->buffer));
                      },
                  .on_done = [chunk, id, backend = backend_, send = send_](
                                 const absl::Status& status) { SendDone(id, status, *backend, send); }});
  return absl::OkStatus();
}

namespace {

// The pause between attempts to join.
constexpr absl::Duration kRetry = absl::Milliseconds(300);

// Whether another attempt would be refused in the same way.
bool IsFinal(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::UNIMPLEMENTED:
      return true;
    default:
      return false;
  }
}

WorkerFilesOptions FilesOptions(const WorkerOptions& options) {
  WorkerFilesOptions files = options.files;
  files.rank = options.rank;
  return files;
}

}  // namespace

// One attempt to join: the connection to the leader and the stream on it.
struct Worker::Attempt {
  using Stream = grpc::ClientReaderWriter<v1::FromWorker, v1::ToWorker>;

  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::RankService::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<Stream> stream;
};

Worker::Worker(const WorkerOptions& options, kernels::CreatedBackend own)
    : options_(options),
      backend_(std::move(own.backend)),
      link_(std::move(own.link)),
      heads_(backend_.get(), link_.get(),
             [this](v1::FromWorker message) {
               if (message.has_done()) busy_.End();  // SubmitIfComplete began it
               answers_.Push(std::move(message));
             }),
      files_(FilesOptions(options),
             {.on_driver = [this](std::function<void()> task) { requests_.Push({.task = std::move(task)}); },
              .find = [this](uint64_t head) { return heads_.Find(head); },
              .send = [this](v1::FromWorker message) { answers_.Push(std::move(message)); }}) {
  link_->WatchChunks([this](const absl::Status& failure) { return OnChunkFailure(failure); });
}

Worker::~Worker() { Close(); }

// ---- Joining ----

v1::FromWorker Worker::Hello() const {
  const kernels::BackendInfo info = backend_->info();
  v1::FromWorker message;
  v1::Hello* const hello = message.mutable_hello();
  hello->set_rank(static_cast<uint32_t>(options_.rank));
  hello->set_host(HostName());
  if (!info.uuids.empty()) hello->set_gpu_uuid(info.uuids.front());
  *hello->mutable_backend() = ToProto(info, backend_->max_chunks_in_flight());
  for (const std::string& collectives : link_->CollectivesOffered()) hello->add_collectives(collectives);
  const kernels::RankTraits traits = link_->Traits();
  hello->set_device_bytes(traits.device_bytes);
  hello->set_nccl_version(traits.nccl_version);
  for (const auto& [name, value] : SettingsOf(options_.settings, info)) {
    v1::Setting* const setting = hello->add_settings();
    setting->set_name(name);
    setting->set_value(value);
  }
  return message;
}

// Makes one attempt to join, and reads the leader's first message. UNAVAILABLE if another attempt may
// succeed.
absl::Status Worker::TryToJoin(v1::ToWorker* first) {
  auto attempt = std::make_unique<Attempt>();
  attempt->channel =
      grpc::CreateCustomChannel(options_.leader, options_.credentials, ArgumentsOf(options_.limits));
  attempt->stub = v1::RankService::NewStub(attempt->channel);
  AddSecret(options_.secret, &attempt->context);
  attempt->stream = attempt->stub->Join(&attempt->context);
  Attempt::Stream* const stream = attempt->stream.get();
  {
    absl::MutexLock lock(&attempt_mutex_);
    attempt_ = std::move(attempt);
    if (leaving_) attempt_->context.TryCancel();
  }
  if (stream->Write(Hello()) && stream->Read(first)) return absl::OkStatus();
  const grpc::Status status = stream->Finish();
  {
    absl::MutexLock lock(&attempt_mutex_);
    attempt.swap(attempt_);  // this attempt is over
  }
  const std::string message = absl::StrCat("the leader at ", options_.leader, ": ", status.error_message());
  if (IsFinal(status)) return absl::InvalidArgumentError(message);
  if (status.error_code() == grpc::StatusCode::ALREADY_EXISTS) refusal_ = message;
  return absl::UnavailableError(message);
}

absl::Status Worker::Join() {
  const absl::Time deadline = clocks::SteadyNow() + options_.timeout;
  v1::ToWorker first;
  while (true) {
    absl::Status status = TryToJoin(&first);
    if (status.ok()) return Serve(std::move(first));
    if (leaving_) return absl::OkStatus();
    if (!absl::IsUnavailable(status)) return status;
    if (clocks::SteadyNow() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat(
          "rank ", options_.rank, " was not taken within ", absl::FormatDuration(options_.timeout),
          " (--rank_timeout) by ", refusal_.empty() ? status.message() : refusal_));
    }
    absl::SleepFor(kRetry);
  }
}

// ---- Serving ----

absl::Status Worker::Run() {
  absl::Status status = Join();
  if (!status.ok()) failure_ = status;
  return status;
}

absl::Status Worker::Serve(v1::ToWorker message) {
  Attempt::Stream* stream = nullptr;
  {
    absl::MutexLock lock(&attempt_mutex_);
    stream = attempt_->stream.get();
  }
  writer_ = std::thread([this] { Write(); });
  driver_ = std::thread([this] { Drive(); });
  if (options_.metrics) reporter_ = std::thread([this] { ReportMetrics(); });
  do {
    if (message.has_end()) return absl::OkStatus();
    if (message.has_refusal()) return FromProto(message.refusal().status());
    requests_.Push({.message = std::move(message)});
    message = v1::ToWorker();
  } while (stream->Read(&message));
  if (leaving_ && !joined_) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("the leader at ", options_.leader,
                                             " has ended the connection: it, or another rank, is lost"));
}

void Worker::Write() {
  Attempt::Stream* stream = nullptr;
  {
    absl::MutexLock lock(&attempt_mutex_);
    stream = attempt_->stream.get();
  }
  // The result of Write is ignored: after a failed write, the reading thread also notices the end of the
  // stream.
  while (const std::optional<v1::FromWorker> message = answers_.Pop()) {
    stream->Write(*message);
    if (message->has_metrics()) metrics_wait_ = false;
  }
}

// Sends no new metrics while older ones wait to be written, so that they do not pile up.
void Worker::ReportMetrics() {
  while (!stopping_.AwaitFor(options_.metrics_interval)) {
    if (!joined_ || metrics_wait_.exchange(true)) continue;
    v1::FromWorker message;
    *message.mutable_metrics() = options_.metrics();
    answers_.Push(std::move(message));
  }
}

void Worker::Drive() {
  while (std::optional<Work> work = requests_.Pop()) {
    busy_since_ = Clock::now();
    busy_.Begin();
    if (work->task != nullptr) {
      work->task();
    } else if (absl::Status status = Handle(work->message); !status.ok()) {
      ReportLoss(status);
    }
    busy_.End();
    busy_since_ = kIdle;
  }
}

absl::Status Worker::Handle(v1::ToWorker& message) {
  v1::FromWorker answer;
  switch (message.message_case()) {
    case v1::ToWorker::kPrepare: {
      const std::string& collectives = message.prepare().collectives();
      LOSSD_RETURN_IF_ERROR(link_->UseCollectives(collectives));
      LOSSD_TRY(std::string address, link_->Address());
      const absl::Status shared = heads_.UseRowsOf(message.prepare());
      log::Log(log::LogLevel::kInfo, "ranks exchange",
               {{"rank", options_.rank},
                {"collectives", collectives},
                {"rows", shared.ok() ? "shared memory" : shared.message()}});
      answer.mutable_prepared()->set_address(std::move(address));
      answer.mutable_prepared()->set_rows_refused(std::string(shared.message()));
      break;
    }
    case v1::ToWorker::kConnect: {
      const auto& addresses = message.connect().addresses();
      const absl::Status status = link_->Connect({addresses.begin(), addresses.end()});
      joined_ = status.ok();
      if (joined_) options_.on_joined();
      answer.mutable_answer()->set_request(message.connect().request());
      *answer.mutable_answer()->mutable_status() = ToProto(status);
      *answer.mutable_answer()->mutable_memory() = ToProto(backend_->memory());
      break;
    }
    case v1::ToWorker::kRequest: {
      const v1::Request& request = message.request();
      if (WorkerFiles::IsFor(request)) {
        files_.Handle(request);
        return absl::OkStatus();
      }
      *answer.mutable_answer() = heads_.Execute(request);
      break;
    }
    case v1::ToWorker::kChunk:
      chunk_ = std::move(*message.mutable_chunk());
      return SubmitIfComplete();
    case v1::ToWorker::kSlice:
      return OnSlice(message.mutable_slice());
    default:
      return absl::InternalError(absl::StrCat("the leader sent message ", message.message_case()));
  }
  answers_.Push(std::move(answer));
  return absl::OkStatus();
}

absl::Status Worker::OnSlice(v1::ChunkSlice* slice) {
  if (!chunk_.has_value()) return absl::InternalError("the leader sent a slice without a chunk");
  slices_.push_back(std::move(*slice));
  return SubmitIfComplete();
}

absl::Status Worker::SubmitIfComplete() {
  if (slices_.size() < chunk_->slices()) return absl::OkStatus();
  const v1::ChunkStart start = *std::exchange(chunk_, std::nullopt);
  busy_.Begin();  // until the chunk is done
  return heads_.Submit(start, std::exchange(slices_, {}));
}

// An exchange of this rank has failed. Mostly the leader has also noticed the cause, and ends this rank
// within kLastWords. Otherwise this rank reports the loss to the leader.
absl::Status Worker::OnChunkFailure(const absl::Status& failure) {
  if (!stopping_.AwaitFor(kLastWords)) ReportLoss(failure);
  return failure;
}

// ---- Ending ----

void Worker::Leave(const std::string& reason) {
  leaving_ = true;
  if (joined_) {
    v1::FromWorker message;
    message.mutable_leaving()->set_reason(reason);
    answers_.Push(std::move(message));
    return;
  }
  absl::MutexLock lock(&attempt_mutex_);
  if (attempt_ != nullptr) attempt_->context.TryCancel();
}

void Worker::ReportLoss(const absl::Status& status) {
  v1::FromWorker message;
  *message.mutable_lost()->mutable_status() = ToProto(status);
  answers_.Push(std::move(message));
}

void Worker::Close() {
  if (stopping_.happened()) return;
  stopping_.Notify();
  requests_.Close();
  answers_.Close();
  {
    absl::MutexLock lock(&attempt_mutex_);
    if (attempt_ != nullptr) attempt_->context.TryCancel();
  }
  if (!failure_.ok()) link_->Abort(failure_);
  if (driver_.joinable()) driver_.join();
  files_.End();  // only now: the driving thread may have run functions of the jobs
  if (writer_.joinable()) writer_.join();
  if (reporter_.joinable()) reporter_.join();
  absl::MutexLock lock(&attempt_mutex_);
  if (attempt_ != nullptr && attempt_->stream != nullptr) (void)attempt_->stream->Finish();
}

std::unique_ptr<Worker> Worker::Create(const WorkerOptions& options, kernels::CreatedBackend own) {
  return absl::WrapUnique(new Worker(options, std::move(own)));
}

}  // namespace lossd::ranks
