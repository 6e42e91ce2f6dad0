#include "server/engine/engine_impl.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {

struct EngineImpl::Flight {
  EntryPtr entry;
  std::vector<std::unique_ptr<SliceWork>> works;
  std::vector<kernels::Slice> slices;  // parallel to works
  kernels::Chunk chunk;
  absl::Time started;
  double compute_seconds = 0.0;
  bool results_ok = false;
};

// The caller's end of a stream.
class StreamHandle final : public Stream {
 public:
  StreamHandle(EngineImpl* engine, EngineImpl::EntryPtr entry, std::shared_ptr<StreamState> state)
      : engine_(engine), entry_(std::move(entry)), state_(std::move(state)) {}
  ~StreamHandle() override { Cancel(absl::CancelledError("the stream was dropped")); }

  HeadState state() const override { return state_->head_state(); }
  SliceLimits limits() const override { return state_->limits(); }
  int64_t hidden_size() const override { return state_->hidden_size(); }

  void Start() override {
    absl::MutexLock lock(&engine_->mutex_);
    state_->Start();
    engine_->FinishIfReady(*entry_, state_);
  }

  void Submit(RowRange rows, StagingBuffer buffer, int64_t bytes) override {
    auto work = std::make_unique<SliceWork>();  // outlives the lock if it is refused
    work->stream = state_;
    work->rows = rows;
    work->buffer = std::move(buffer);
    work->submitted = absl::Now();
    absl::MutexLock lock(&engine_->mutex_);
    if (state_->failed() || state_->finished()) return;
    if (absl::Status status = state_->AddSlice(rows, bytes); !status.ok()) {
      engine_->FailStream(*entry_, *state_, std::move(status));
      engine_->FinishIfReady(*entry_, state_);
      return;
    }
    entry_->queue.Push(std::move(work));
    engine_->work_.Signal();
  }

  void HalfClose() override {
    absl::MutexLock lock(&engine_->mutex_);
    if (state_->failed() || state_->finished()) return;
    if (absl::Status status = state_->HalfClose(); !status.ok()) {
      engine_->FailStream(*entry_, *state_, std::move(status));
    }
    engine_->FinishIfReady(*entry_, state_);
  }

  void Cancel(absl::Status why) override {
    absl::MutexLock lock(&engine_->mutex_);
    state_->Start();  // so that OnFinished comes even if the caller gave up before starting
    if (!state_->finished()) engine_->FailStream(*entry_, *state_, std::move(why));
    engine_->FinishIfReady(*entry_, state_);
  }

 private:
  EngineImpl* const engine_;
  const EngineImpl::EntryPtr entry_;
  const std::shared_ptr<StreamState> state_;
};

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options,
                                                       kernels::Backend* backend, uint64_t incarnation,
                                                       EngineObserver* observer) {
  if (incarnation == 0) return absl::InvalidArgumentError("incarnation must not be 0");
  if (options.slice_bytes <= 0)
    return InvalidField("slice_bytes", "must be positive", absl::StrCat(options.slice_bytes));
  const int64_t buffers = options.staging_bytes / options.slice_bytes;
  if (buffers < 2) {
    return InvalidField("staging_bytes",
                        absl::StrCat("must hold at least two slices of ", options.slice_bytes, " bytes"),
                        absl::StrCat(options.staging_bytes));
  }
  auto staging = StagingPool::Create(backend, options.slice_bytes, buffers);
  if (!staging.ok()) return staging.status();
  return std::make_unique<EngineImpl>(options, backend, incarnation, observer, *std::move(staging));
}

EngineImpl::EngineImpl(const EngineOptions& options, kernels::Backend* backend, uint64_t incarnation,
                       EngineObserver* observer, std::unique_ptr<StagingPool> staging)
    : options_(options),
      backend_(backend),
      incarnation_(incarnation),
      observer_(observer != nullptr ? observer : &default_observer_),
      staging_(std::move(staging)),
      device_thread_([this] { DeviceLoop(); }) {}

EngineImpl::~EngineImpl() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    for (auto& [name, entry] : entries_) {
      const auto streams = entry->streams;
      for (const auto& stream : streams) {
        stream->Start();
        FailStream(*entry, *stream, absl::UnavailableError("the server is shutting down"));
        FinishIfReady(*entry, stream);
      }
    }
    work_.SignalAll();
  }
  device_thread_.join();
}

// ---- Device thread ----

void EngineImpl::DeviceLoop() {
  absl::MutexLock lock(&mutex_);
  while (true) {
    if (RunNext()) continue;
    if (stopping_ && chunks_in_flight_ == 0) break;
    work_.Wait(&mutex_);
  }
  // Heads are freed here, on the thread that owns the device, whoever else still holds their entries.
  for (auto& [name, entry] : entries_) entry->head.reset();
  entries_.clear();
}

// Runs one piece of work, if there is one; heads take turns.
bool EngineImpl::RunNext() {
  if (!tasks_.empty()) {
    DeviceTask* task = tasks_.front();
    tasks_.pop_front();
    mutex_.Unlock();
    task->run();
    task->done.Notify();
    mutex_.Lock();
    return true;
  }
  if (entries_.empty()) return false;
  auto it = entries_.upper_bound(last_served_);
  for (size_t i = 0; i < entries_.size(); ++i, ++it) {
    if (it == entries_.end()) it = entries_.begin();
    const EntryPtr entry = it->second;  // the map may change while the work runs
    if (!RunNextOf(entry)) continue;
    last_served_ = entry->name;
    return true;
  }
  return false;
}

bool EngineImpl::RunNextOf(const EntryPtr& entry) {
  if (entry->chunks_in_flight == 0) {
    if (Operation* operation = entry->queue.TakeOperation()) {
      RunOperation(*entry, operation);
      return true;
    }
  }
  if (chunks_in_flight_ >= backend_->max_chunks_in_flight()) return false;
  auto works = entry->queue.TakeChunk(entry->chunk_rows, entry->ledger);
  if (works.empty()) return false;
  LaunchChunk(entry, std::move(works));
  return true;
}

void EngineImpl::RunOperation(Entry& entry, Operation* operation) {
  head::Head* head = entry.head.get();
  mutex_.Unlock();
  operation->result = head != nullptr
                          ? operation->run(*head)
                          : absl::NotFoundError(absl::StrCat("head ", entry.name, " was deleted"));
  operation->done.Notify();
  mutex_.Lock();
}

void EngineImpl::LaunchChunk(const EntryPtr& entry, std::vector<std::unique_ptr<SliceWork>> works) {
  auto flight = std::make_shared<Flight>();
  flight->entry = entry;
  flight->works = std::move(works);
  flight->started = absl::Now();
  const StreamSpec& first = flight->works.front()->stream->spec();
  flight->chunk.options = first.options;
  flight->chunk.hidden_dtype = first.hidden_dtype;
  flight->chunk.accumulate_gradients = first.accumulate_gradients;
  for (const auto& work : flight->works) {
    const StreamSpec& spec = work->stream->spec();
    const size_t rows = static_cast<size_t>(work->rows.size());
    work->queue_seconds = absl::ToDoubleSeconds(flight->started - work->submitted);
    SliceOutput& out = work->output;
    const auto rows_if = [rows](bool wanted, auto& values) {
      values.resize(wanted ? rows : 0);
      return wanted ? values.data() : nullptr;
    };
    kernels::Slice slice;
    slice.rows = work->rows.size();
    slice.hidden = work->buffer.data();
    slice.targets = work->stream->targets(work->rows);
    slice.row_weights = work->stream->row_weights(work->rows);
    slice.accumulate = work->repeated_rows > 0 ? work->accumulate.data() : nullptr;
    slice.grad_scale = work->stream->grad_scale();
    slice.grad_hidden = spec.want_grad_hidden ? work->buffer.data() : nullptr;
    slice.out = {.loss = rows_if(spec.want_rows.loss, out.loss),
                 .lse = rows_if(spec.want_rows.lse, out.lse),
                 .entropy = rows_if(spec.want_rows.entropy, out.entropy),
                 .target_logprob = rows_if(spec.want_rows.logprob, out.logprob),
                 .argmax = rows_if(spec.want_rows.argmax, out.argmax)};
    flight->slices.push_back(slice);
  }
  flight->chunk.slices = absl::MakeSpan(flight->slices);
  ++entry->chunks_in_flight;
  ++chunks_in_flight_;
  kernels::HeadKernels& kernels = entry->head->kernels();
  mutex_.Unlock();
  kernels.Submit(&flight->chunk,
                 {.on_results = [this, flight](absl::Status s) { OnResults(*flight, std::move(s)); },
                  .on_done = [this, flight](absl::Status s) { OnDone(flight, std::move(s)); }});
  mutex_.Lock();
}

void EngineImpl::OnResults(Flight& flight, absl::Status status) {
  flight.compute_seconds = absl::ToDoubleSeconds(absl::Now() - flight.started);
  flight.results_ok = status.ok();
  if (!status.ok()) observer_->OnDeviceError(status);
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < flight.works.size(); ++i) {
    SliceWork& work = *flight.works[i];
    StreamState& stream = *work.stream;
    if (!status.ok()) {
      FailStream(*flight.entry, stream,
                 absl::InternalError(absl::StrCat(
                     "the device failed; nothing of this slice was accumulated: ", status.message())));
    } else if (flight.slices[i].first_nonfinite_row >= 0) {
      const int64_t row = work.rows.begin + flight.slices[i].first_nonfinite_row;
      FailStream(*flight.entry, stream,
                 FieldError(absl::StatusCode::kOutOfRange, absl::StrCat("row ", row),
                            "must have a finite loss; nothing of its slice was accumulated",
                            "a loss that is not finite"));
    } else if (!stream.failed()) {
      work.output.rows = work.rows;
      work.output.queue_seconds = work.queue_seconds;
      work.output.compute_seconds = flight.compute_seconds;
      if (stream.spec().want_grad_hidden) {
        work.output.grad_bytes = work.rows.size() * stream.hidden_size() *
                                 static_cast<int64_t>(kernels::SizeOf(stream.spec().hidden_dtype));
        work.output.grad_hidden = std::move(work.buffer);
      }
      notifier_.Post([stream = work.stream, output = std::move(work.output)]() mutable {
        stream->observer().OnSlice(std::move(output));
      });
    }
  }
}

// Books one slice of a finished chunk.
void EngineImpl::SettleSlice(Flight& flight, size_t index, bool accumulated) {
  SliceWork& work = *flight.works[index];
  StreamState& stream = *work.stream;
  const uint64_t id = stream.spec().microbatch_id;
  const bool good = flight.results_ok && flight.slices[index].first_nonfinite_row < 0;
  int64_t committed = 0;
  if (work.reserved && good && accumulated) committed = flight.entry->ledger.Commit(id, work.rows);
  if (work.reserved && !(good && accumulated)) flight.entry->ledger.Release(id, work.rows);
  if (good) {
    stream.FinishSlice(flight.slices[index].sums, committed, work.repeated_rows, work.queue_seconds,
                       flight.compute_seconds);
    flight.entry->total_rows += work.rows.size();
  }
  stream.AddOutstanding(-1);
}

void EngineImpl::OnDone(std::shared_ptr<Flight> flight, absl::Status status) {
  Entry& entry = *flight->entry;
  int64_t rows = 0;
  int64_t valid_rows = 0;
  for (size_t i = 0; i < flight->works.size(); ++i) {
    rows += flight->works[i]->rows.size();
    valid_rows += flight->slices[i].sums.valid_rows;
    observer_->OnSlice(entry.name, flight->works[i]->queue_seconds);
  }
  observer_->OnChunk(entry.name, static_cast<int64_t>(flight->works.size()), rows, valid_rows,
                     flight->compute_seconds);
  const bool broken = flight->results_ok && !status.ok();
  if (broken) observer_->OnDeviceError(status);
  absl::MutexLock lock(&mutex_);
  if (broken) {
    entry.distrust = absl::InternalError(absl::StrCat(
        "the device failed while accumulating; the gradients of head ", entry.name, " at step ", entry.step,
        " are not to be trusted (zero the gradients and repeat the step): ", status.message()));
  }
  for (size_t i = 0; i < flight->works.size(); ++i) {
    SettleSlice(*flight, i, !broken);
    if (broken) FailStream(entry, *flight->works[i]->stream, entry.distrust);
  }
  for (const auto& work : flight->works) FinishIfReady(entry, work->stream);
  --entry.chunks_in_flight;
  --chunks_in_flight_;
  notifier_.Post([works = std::move(flight->works)]() mutable { works.clear(); });
  work_.SignalAll();
}

absl::Status EngineImpl::RunDeviceTask(absl::FunctionRef<void()> run) {
  DeviceTask task{.run = run};
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return absl::UnavailableError("the server is shutting down");
    tasks_.push_back(&task);
    work_.SignalAll();
  }
  task.done.WaitForNotification();
  return absl::OkStatus();
}

// ---- Heads ----

absl::StatusOr<EngineImpl::EntryPtr> EngineImpl::Find(absl::string_view name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end() || it->second->deleting) {
    absl::Status status = absl::NotFoundError(absl::StrCat("no head named '", name, "'"));
    status.SetPayload(kFieldPayload, absl::Cord("head"));
    status.SetPayload(kValuePayload, absl::Cord(name));
    return status;
  }
  return it->second;
}

absl::Status EngineImpl::CreateHead(absl::string_view name, const kernels::HeadConfig& config,
                                    uint64_t step) {
  if (auto status = kernels::Validate(config); !status.ok()) return status;
  if (config.hidden_size > options_.slice_bytes / 4) {
    return InvalidField(
        "hidden_size",
        absl::StrCat("must let one fp32 row fit into a slice of ", options_.slice_bytes, " bytes"),
        absl::StrCat(config.hidden_size));
  }
  EntryPtr entry = std::make_shared<Entry>(std::string(name), config, options_.max_ledger_rows);
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return absl::UnavailableError("the server is shutting down");
    if (static_cast<int64_t>(entries_.size()) >= options_.max_heads && !entries_.contains(name)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("there are ", entries_.size(), " heads, the most allowed"));
    }
    if (!entries_.emplace(entry->name, entry).second) {
      return FieldError(absl::StatusCode::kAlreadyExists, "spec.name", "is taken by another head", name);
    }
  }
  absl::Status status;
  absl::Status ran = RunDeviceTask([&] {
    auto kernels = backend_->CreateHead(config);
    absl::MutexLock lock(&mutex_);
    if (!kernels.ok()) {
      status = kernels.status();
      entries_.erase(entry->name);
      return;
    }
    entry->compute_dtype = (*kernels)->compute_dtype();
    entry->chunk_rows = (*kernels)->chunk_rows();
    entry->memory = (*kernels)->memory();
    entry->step = step;
    entry->head = std::make_unique<head::Head>(entry->name, *std::move(kernels));
  });
  return ran.ok() ? status : ran;
}

absl::Status EngineImpl::PublishHead(absl::string_view name) {
  absl::MutexLock lock(&mutex_);
  auto entry = Find(name);
  if (!entry.ok()) return entry.status();
  (*entry)->published = true;
  return absl::OkStatus();
}

absl::Status EngineImpl::DeleteHead(absl::string_view name) {
  {
    absl::MutexLock lock(&mutex_);
    auto entry = Find(name);
    if (!entry.ok()) return entry.status();
    if (!(*entry)->streams.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("head ", name, " has ", (*entry)->streams.size(), " open ComputeLoss calls"));
    }
    (*entry)->deleting = true;
  }
  return RunDeviceTask([&] {
    std::unique_ptr<head::Head> head;  // freed outside the lock
    absl::MutexLock lock(&mutex_);
    const auto it = entries_.find(name);
    if (it == entries_.end()) return;
    for (Operation* operation : it->second->queue.TakeOperations()) {
      operation->result = absl::NotFoundError(absl::StrCat("head ", name, " was deleted"));
      operation->done.Notify();
    }
    head = std::move(it->second->head);
    entries_.erase(it);
  });
}

HeadSnapshot EngineImpl::Snapshot(const Entry& entry) const {
  return {.name = entry.name,
          .config = entry.config,
          .compute_dtype = entry.compute_dtype,
          .state = {.incarnation = incarnation_, .step = entry.step},
          .limits = {.max_rows = entry.chunk_rows, .max_bytes = options_.slice_bytes},
          .chunk_rows = entry.chunk_rows,
          .memory = entry.memory,
          .open_streams = static_cast<int64_t>(entry.streams.size()),
          .queued_slices = entry.queue.slices(),
          .step_microbatches = entry.ledger.microbatches(),
          .step_rows = entry.ledger.accumulated_rows(),
          .total_rows = entry.total_rows};
}

absl::StatusOr<HeadSnapshot> EngineImpl::Describe(absl::string_view name) const {
  absl::MutexLock lock(&mutex_);
  auto entry = Find(name);
  if (!entry.ok()) return entry.status();
  return Snapshot(**entry);
}

std::vector<HeadSnapshot> EngineImpl::List() const {
  absl::MutexLock lock(&mutex_);
  std::vector<HeadSnapshot> heads;
  for (const auto& [name, entry] : entries_) {
    if (entry->published && !entry->deleting) heads.push_back(Snapshot(*entry));
  }
  return heads;
}

EngineStats EngineImpl::stats() const {
  EngineStats stats;
  stats.staging_buffers = staging_->buffers();
  stats.staging_buffers_free = staging_->free_buffers();
  absl::MutexLock lock(&mutex_);
  stats.open_streams = open_streams_;
  for (const auto& [name, entry] : entries_) {
    stats.queued_slices += entry->queue.slices();
    stats.queued_rows += entry->queue.rows();
    stats.heads += entry->published ? 1 : 0;
    stats.ledger_rows += entry->ledger.declared_rows();
    stats.ledger_bytes += entry->ledger.bytes();
  }
  return stats;
}

absl::Status EngineImpl::OnDevice(absl::string_view name,
                                  absl::FunctionRef<absl::Status(head::Head&)> operation) {
  Operation queued{.run = operation};
  {
    absl::MutexLock lock(&mutex_);
    auto entry = Find(name);
    if (!entry.ok()) return entry.status();
    if (stopping_) return absl::UnavailableError("the server is shutting down");
    if ((*entry)->head == nullptr)
      return absl::UnavailableError(absl::StrCat("head ", name, " is being created"));
    if ((*entry)->queue.operations() >= options_.max_queued_operations) {
      return absl::ResourceExhaustedError(absl::StrCat("head ", name, " has ", (*entry)->queue.operations(),
                                                       " operations waiting, the most allowed"));
    }
    (*entry)->queue.Push(&queued);
    work_.Signal();
  }
  queued.done.WaitForNotification();
  return queued.result;
}

absl::Status EngineImpl::RunOnHead(absl::string_view name,
                                   absl::FunctionRef<absl::Status(Entry&, head::Head&)> operation) {
  return OnDevice(name, [&](head::Head& head) -> absl::Status {
    EntryPtr entry;
    {
      absl::MutexLock lock(&mutex_);
      entry = entries_.find(name)->second;  // operations run before the entry goes
    }
    return operation(*entry, head);
  });
}

// ---- Steps ----

absl::StatusOr<double> EngineImpl::GradNorm(absl::string_view name, std::optional<uint64_t> step) {
  double norm = 0.0;
  absl::Status status = RunOnHead(name, [&](Entry& entry, head::Head& head) -> absl::Status {
    {
      absl::MutexLock lock(&mutex_);
      if (step.has_value() && *step != entry.step) return StepNotOpen("step", *step, entry.step);
      if (!entry.distrust.ok()) return entry.distrust;
    }
    auto result = head.kernels().GradNorm();
    if (result.ok()) norm = *result;
    return result.status();
  });
  if (!status.ok()) return status;
  return norm;
}

absl::Status EngineImpl::CheckStepComplete(const Entry& entry, const StepRequest& request,
                                           std::vector<std::string>* missing) {
  if (request.step != entry.step) return StepNotOpen("step", request.step, entry.step);
  if (!entry.distrust.ok()) return entry.distrust;
  std::vector<std::string> lines = entry.ledger.Missing(request.expected_microbatches);
  const int64_t rows = entry.ledger.accumulated_rows();
  if (request.expected_rows.has_value() && *request.expected_rows != rows) {
    lines.push_back(absl::StrCat("rows: ", rows, " accumulated, ", *request.expected_rows, " expected"));
  }
  if (lines.empty()) return absl::OkStatus();
  absl::Status status = absl::FailedPreconditionError(
      absl::StrCat("step ", entry.step, " is not complete: ", lines.front(),
                   lines.size() > 1 ? absl::StrCat(" (and ", lines.size() - 1, " more)") : ""));
  status.SetPayload(kCurrentStepPayload, absl::Cord(absl::StrCat(entry.step)));
  if (missing != nullptr) *missing = std::move(lines);
  return status;
}

// Opens a step: forgets the ledger and ends the streams that accumulate for the old one.
void EngineImpl::EnterStep(Entry& entry, uint64_t step, const absl::Status& why) {
  const auto streams = entry.streams;
  for (const auto& stream : streams) {
    if (!stream->spec().accumulate_gradients) continue;
    FailStream(entry, *stream, why);
    FinishIfReady(entry, stream);
  }
  entry.ledger.Clear();
  entry.step = step;
  entry.distrust = absl::OkStatus();
}

// A device that fails half-way through an update leaves weights nobody can vouch for.
absl::Status EngineImpl::StepFailed(Entry& entry, const absl::Status& status) {
  if (absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status)) return status;
  observer_->OnDeviceError(status);
  absl::MutexLock lock(&mutex_);
  entry.distrust = absl::InternalError(
      absl::StrCat("the device failed while applying step ", entry.step, " to head ", entry.name,
                   "; its weights are not to be trusted (load a checkpoint): ", status.message()));
  return entry.distrust;
}

absl::StatusOr<StepResult> EngineImpl::ApplyStep(absl::string_view name, const StepRequest& request,
                                                 std::vector<std::string>* missing) {
  if (auto status = kernels::Validate(request.optimizer); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("optimizer.", status.message()));
  }
  StepResult result;
  absl::Status status = RunOnHead(name, [&](Entry& entry, head::Head& head) -> absl::Status {
    {
      absl::MutexLock lock(&mutex_);
      if (entry.last_result.has_value() && request.step == entry.last_request->step &&
          request.step + 1 == entry.step) {
        if (!(entry.last_request->optimizer == request.optimizer)) {
          return FieldError(absl::StatusCode::kFailedPrecondition, "optimizer",
                            "differs from what this step was applied with", "other settings");
        }
        result = *entry.last_result;
        result.repeated = true;
        return absl::OkStatus();
      }
      if (auto complete = CheckStepComplete(entry, request, missing); !complete.ok()) return complete;
    }
    auto norm = head.kernels().GradNorm();
    if (!norm.ok()) return norm.status();
    auto applied = head.kernels().ApplyStep(request.optimizer, static_cast<int64_t>(request.step) + 1);
    if (!applied.ok()) return StepFailed(entry, applied);
    absl::MutexLock lock(&mutex_);
    result = {.state = {.incarnation = incarnation_, .step = request.step + 1},
              .grad_norm = *norm,
              .microbatches = entry.ledger.microbatches(),
              .rows = entry.ledger.accumulated_rows()};
    EnterStep(entry, request.step + 1, StepNotOpen("open.step", request.step, request.step + 1));
    entry.last_request = request;
    entry.last_result = result;
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  if (!result.repeated) observer_->OnStep(name);
  return result;
}

absl::Status EngineImpl::ZeroGradients(absl::string_view name, uint64_t step) {
  return RunOnHead(name, [&](Entry& entry, head::Head& head) -> absl::Status {
    {
      absl::MutexLock lock(&mutex_);
      if (step != entry.step) return StepNotOpen("step", step, entry.step);
    }
    if (auto status = head.kernels().ZeroGradients(); !status.ok()) return status;
    absl::MutexLock lock(&mutex_);
    EnterStep(entry, entry.step, absl::AbortedError("the step's gradients were zeroed"));
    return absl::OkStatus();
  });
}

absl::Status EngineImpl::ResetStep(absl::string_view name, uint64_t step) {
  return RunOnHead(name, [&](Entry& entry, head::Head& head) -> absl::Status {
    if (entry.config.trainable) {
      if (auto status = head.kernels().ZeroGradients(); !status.ok()) return status;
    }
    absl::MutexLock lock(&mutex_);
    EnterStep(entry, step, absl::AbortedError("a checkpoint was loaded"));
    entry.last_request.reset();
    entry.last_result.reset();
    return absl::OkStatus();
  });
}

// ---- Streams ----

absl::StatusOr<std::unique_ptr<Stream>> EngineImpl::Open(StreamSpec spec,
                                                         std::shared_ptr<StreamObserver> observer) {
  absl::MutexLock lock(&mutex_);
  if (stopping_) return absl::UnavailableError("the server is shutting down");
  auto found = Find(spec.head);
  if (!found.ok()) return found.status();
  Entry& entry = **found;
  if (!entry.published) return absl::UnavailableError(absl::StrCat("head ", entry.name, " is being created"));
  if (open_streams_ >= options_.max_streams) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", open_streams_, " open ComputeLoss calls, the most allowed"));
  }
  auto state = StreamState::Create(
      std::move(spec), entry.config, {.incarnation = incarnation_, .step = entry.step},
      {.max_rows = entry.chunk_rows, .max_bytes = options_.slice_bytes}, std::move(observer));
  if (!state.ok()) return state.status();
  const StreamSpec& checked = (*state)->spec();
  if (checked.accumulate_gradients) {
    if (!entry.distrust.ok()) return entry.distrust;
    if (auto status = entry.ledger.Declare(checked.microbatch_id, (*state)->terms(), checked.rows,
                                           checked.targets, checked.row_weights);
        !status.ok()) {
      return status;
    }
  }
  entry.streams.push_back(*state);
  ++open_streams_;
  return std::make_unique<StreamHandle>(this, *found, *std::move(state));
}

// Fails a stream and drops its queued slices.
void EngineImpl::FailStream(Entry& entry, StreamState& stream, absl::Status why) {
  if (stream.failed() || stream.finished()) return;
  stream.Fail(std::move(why));
  DropFailed(entry);
}

void EngineImpl::DropFailed(Entry& entry) {
  auto dropped = entry.queue.TakeFailed();
  if (dropped.empty()) return;
  for (const auto& work : dropped) work->stream->AddOutstanding(-1);
  notifier_.Post([works = std::move(dropped)]() mutable { works.clear(); });
}

void EngineImpl::FinishIfReady(Entry& entry, const std::shared_ptr<StreamState>& stream) {
  if (!stream->ReadyToFinish()) return;
  stream->MarkFinished();
  std::erase(entry.streams, stream);
  --open_streams_;
  notifier_.Post([stream] { stream->observer().OnFinished(stream->status(), stream->summary()); });
}

}  // namespace lossd::engine
