// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/files.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kernels/errors/status_macros.h"
#include "kernels/host_memory.h"
#include "kernels/validation.h"
#include "proto/tensorfile/file.h"
#include "server/ranks/messages.h"

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
  if (status.ok() && (request.has_save_files() || request.has_load_files())) return;  // when it has ended
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

// The folder as the leader calls it instead of where this process has it open.
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
  // While it is locked no server that starts takes it for a leftover.
  const auto lock = head::FolderLock::Try(folder.path(), head::FolderLock::Kind::kShared);
  if (!lock.ok()) return Named(lock.status(), folder);
  const std::string proof = absl::StrCat(folder.path(), "/", head::ProofFile(options_.rank));
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
  if (reader->content_digest() != load.checksum()) {
    return absl::FailedPreconditionError("there is another checkpoint of that name");
  }
  if (load.replica() >= load.replicas()) return absl::InternalError("the leader names no part of a head");
  LOSSD_TRY(const v1::GoOn go_on, AwaitGoOn());
  LOSSD_TRY(const kernels::HeadConfig config, Config());
  LOSSD_RETURN_IF_ERROR(head::CheckLoadable(reader->subject().config, config));
  const kernels::Replica replica = {static_cast<int>(load.replica()), static_cast<int>(load.replicas())};
  const int threads = static_cast<int>(std::clamp<int64_t>(options_.threads, 1, kMostThreads));
  head::LoadOptions options;
  options.buffer_bytes = BufferBytes(0);
  options.threads = threads;
  options.verify_first = false;
  options.wanted = [&](const head::TensorPart& part) {
    return head::RowsOfReplica(config, part, replica).rows > 0;
  };
  return reader->Load(
      [&](kernels::TensorId id, int64_t row_begin, int64_t rows, absl::Span<const uint8_t> in) {
        if (cancelled()) return absl::CancelledError("the load was cancelled");
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

}  // namespace lossd::ranks
