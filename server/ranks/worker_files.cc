// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/worker_files.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/ranks/file_job.h"
#include "server/ranks/messages.h"

namespace lossd::ranks {

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

}  // namespace lossd::ranks
