// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/rank_files.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/log/log.h"
#include "server/ranks/messages.h"

namespace lossd::ranks {
namespace {

// Work on files that one request has begun.
class FileWork {
 public:
  FileWork(std::shared_ptr<WorkerStream> worker, const kernels::RemotePart& part)
      : worker_(std::move(worker)), part_(part) {}
  ~FileWork() {
    if (request_ == 0 || awaited_) return;
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
  // Errors name the rank.
  absl::StatusOr<v1::Answer> Await() {
    absl::StatusOr<v1::Answer> answer = worker_->Await(request_);
    awaited_ = true;
    if (answer.ok() || worker_->lost()) return answer;
    return absl::Status(answer.status().code(),
                        absl::StrCat("rank ", rank(), ": ", answer.status().message()));
  }
  // What it has said last, also once it has ended.
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
    const absl::StatusOr<v1::FilesProgress> ready = work_.AwaitReady(deadline);
    if (!ready.ok()) return ready.status();
    return head::FolderProof{ready->nonce(), ready->token()};
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
    const absl::StatusOr<v1::Answer> answer = work_.Await();
    if (!answer.ok()) return answer.status();
    std::vector<head::ManifestShard> lines;
    for (const v1::FileLine& line : answer->lines()) lines.push_back(FromProto(line));
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

  void StartOpening(const std::string& checkpoint, const std::string& checksum) override {
    v1::Request request;
    v1::LoadFiles* const load = request.mutable_load_files();
    load->set_checkpoint(checkpoint);
    load->set_checksum(checksum);
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

}  // namespace lossd::ranks
