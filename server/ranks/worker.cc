// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/worker.h"

#include <grpcpp/grpcpp.h>

#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "kernels/errors/status_macros.h"
#include "lossd/ranks/v1/ranks.grpc.pb.h"
#include "server/log/log.h"
#include "server/ranks/messages.h"
#include "server/ranks/worker_stream.h"

namespace lossd::ranks {
namespace {

// Between attempts to join.
constexpr absl::Duration kRetry = absl::Milliseconds(300);

// Whether a refusal will be the same the next time.
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

// One attempt, with what it needs.
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
               if (message.has_done()) busy_.End();
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

// UNAVAILABLE if it may be tried again.
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
    attempt.swap(attempt_);  // it is over
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
  return absl::UnavailableError(absl::StrCat("the leader at ", options_.leader, " is lost"));
}

void Worker::Write() {
  Attempt::Stream* stream = nullptr;
  {
    absl::MutexLock lock(&attempt_mutex_);
    stream = attempt_->stream.get();
  }
  // After a failed write, reading ends too.
  while (const std::optional<v1::FromWorker> message = answers_.Pop()) {
    stream->Write(*message);
    if (message->has_metrics()) metrics_wait_ = false;
  }
}

// Where writing takes long, metrics do not pile up.
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
  busy_.Begin();  // until it is done
  return heads_.Submit(start, std::exchange(slices_, {}));
}

// The leader has mostly noticed what this rank has waited for in vain, and says so; else it hears it from
// here.
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
  files_.End();
  if (writer_.joinable()) writer_.join();
  if (reporter_.joinable()) reporter_.join();
  absl::MutexLock lock(&attempt_mutex_);
  if (attempt_ != nullptr && attempt_->stream != nullptr) (void)attempt_->stream->Finish();
}

std::unique_ptr<Worker> Worker::Create(const WorkerOptions& options, kernels::CreatedBackend own) {
  return absl::WrapUnique(new Worker(options, std::move(own)));
}

}  // namespace lossd::ranks
