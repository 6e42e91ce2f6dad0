#include "server/engine/engine_impl.h"

#include <algorithm>
#include <utility>

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

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options,
                                                       kernels::Backend* backend, uint64_t incarnation,
                                                       EngineObserver* observer) {
  if (incarnation == 0) return absl::InvalidArgumentError("incarnation must not be 0");
  if (options.slice_bytes <= 0)
    return InvalidField("slice_bytes", "must be positive", absl::StrCat(options.slice_bytes));
  if (options.staging_bytes / options.slice_bytes < 2) {
    return InvalidField("staging_bytes",
                        absl::StrCat("must hold at least two slices of ", options.slice_bytes, " bytes"),
                        absl::StrCat(options.staging_bytes));
  }
  auto staging = StagingPool::Create(backend, options.staging_bytes, options.slice_bytes);
  if (!staging.ok()) return staging.status();
  if (options.retained_bytes < 0) {
    return InvalidField("retained_bytes", "must not be negative", absl::StrCat(options.retained_bytes));
  }
  std::unique_ptr<kernels::RetainedMemory> retained;
  if (options.retained_bytes > 0) {
    auto allocated = backend->AllocateRetained(options.retained_bytes);
    if (!allocated.ok()) return allocated.status();
    retained = *std::move(allocated);
  }
  return std::make_unique<EngineImpl>(options, backend, incarnation, observer, *std::move(staging),
                                      std::move(retained));
}

EngineImpl::EngineImpl(const EngineOptions& options, kernels::Backend* backend, uint64_t incarnation,
                       EngineObserver* observer, std::unique_ptr<StagingPool> staging,
                       std::unique_ptr<kernels::RetainedMemory> retained)
    : options_(options),
      backend_(backend),
      incarnation_(incarnation),
      observer_(observer != nullptr ? observer : &default_observer_),
      staging_(std::move(staging)),
      retained_(std::move(retained)),
      retained_allocator_(retained_ == nullptr ? 0 : retained_->size()),
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
      CallTurns(*entry);
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
  if (const Operation* front = entry->queue.FrontOperation()) {
    const bool after_a_group = entry->sequencer != nullptr && entry->sequencer->HasReady(front->arrival);
    if (entry->chunks_in_flight == 0 && !after_a_group) {
      RunOperation(*entry, entry->queue.TakeOperation());
      return true;
    }
    if (!after_a_group) return false;
  }
  if (chunks_in_flight_ >= backend_->max_chunks_in_flight()) return false;
  if (entry->group_was_last) return LaunchNextChunk(entry) || LaunchNextGroup(entry);
  return LaunchNextGroup(entry) || LaunchNextChunk(entry);
}

bool EngineImpl::LaunchNextChunk(const EntryPtr& entry) {
  if (WaitsForRows(entry->queue.Next(entry->chunk_rows), chunks_without_results_)) return false;
  auto works = entry->queue.TakeChunk(entry->chunk_rows, entry->ledger);
  if (works.empty()) return false;
  entry->group_was_last = false;
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
  flight->chunk.independent = options_.deterministic;
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
    slice.hidden = work->stream->is_backward() ? nullptr : work->buffer.data();
    slice.retained_offset = work->stream->RetainedOffset(work->rows);
    slice.grad_loss = work->stream->grad_loss(work->rows);
    slice.grad_lse = work->stream->grad_lse(work->rows);
    slice.grad_entropy = work->stream->grad_entropy(work->rows);
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
  flight->chunk.retained = retained_.get();
  if (first.accumulate_gradients) ++chunks_without_results_;
  Launch(*entry, &flight->chunk,
         {.on_results = [this, flight](absl::Status s) { OnResults(*flight, std::move(s)); },
          .on_done = [this, flight](absl::Status s) { OnDone(flight, std::move(s)); }});
}

void EngineImpl::Launch(Entry& entry, kernels::Chunk* chunk, kernels::ChunkCallbacks callbacks) {
  ++entry.chunks_in_flight;
  ++chunks_in_flight_;
  kernels::HeadKernels& kernels = entry.head->kernels();
  mutex_.Unlock();
  kernels.Submit(chunk, std::move(callbacks));
  mutex_.Lock();
}

// Sends the results of a slice on their way.
void EngineImpl::Deliver(SliceWork& work, double compute_seconds) {
  StreamState& stream = *work.stream;
  work.output.rows = work.rows;
  work.output.queue_seconds = work.queue_seconds;
  work.output.compute_seconds = compute_seconds;
  if (stream.spec().want_grad_hidden) {
    work.output.grad_bytes = stream.RowBytes(work.rows.size());
    work.output.grad_hidden = std::move(work.buffer);
  }
  notifier_.Post([stream = work.stream, output = std::move(work.output)]() mutable {
    stream->observer().OnSlice(std::move(output));
  });
}

void EngineImpl::OnResults(Flight& flight, absl::Status status) {
  flight.compute_seconds = absl::ToDoubleSeconds(absl::Now() - flight.started);
  flight.results_ok = status.ok();
  if (!status.ok()) observer_->OnDeviceError(status);
  absl::MutexLock lock(&mutex_);
  if (flight.chunk.accumulate_gradients) {
    --chunks_without_results_;
    work_.Signal();  // the next chunk need not wait any more
  }
  for (size_t i = 0; i < flight.works.size(); ++i) {
    SliceWork& work = *flight.works[i];
    StreamState& stream = *work.stream;
    if (!status.ok()) {
      FailStream(*flight.entry, stream, DeviceFailed(status));
    } else if (flight.slices[i].first_nonfinite_row >= 0) {
      const int64_t row = work.rows.begin + flight.slices[i].first_nonfinite_row;
      FailStream(*flight.entry, stream, RowNotFinite(row));
    } else if (!stream.failed()) {
      Deliver(work, flight.compute_seconds);
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

void EngineImpl::OnDone(const std::shared_ptr<Flight>& flight, absl::Status status) {
  Entry& entry = *flight->entry;
  int64_t rows = 0;
  int64_t valid_rows = 0;
  double dropped_mass = 0.0;
  for (size_t i = 0; i < flight->works.size(); ++i) {
    rows += flight->works[i]->rows.size();
    valid_rows += flight->slices[i].sums.valid_rows;
    dropped_mass += flight->slices[i].sums.dropped_mass;
    observer_->OnSlice(entry.name, flight->works[i]->queue_seconds);
  }
  observer_->OnChunk(entry.name, static_cast<int64_t>(flight->works.size()), rows, valid_rows,
                     flight->chunk.algorithm, flight->compute_seconds);
  if (dropped_mass > 0.0) observer_->OnDroppedMass(entry.name, dropped_mass);
  NoteChoices(entry, flight->chunk);
  const bool broken = flight->results_ok && !status.ok();
  if (broken) observer_->OnDeviceError(status);
  absl::MutexLock lock(&mutex_);
  if (broken) Distrust(entry, status);
  for (size_t i = 0; i < flight->works.size(); ++i) {
    SettleSlice(*flight, i, !broken);
    if (broken) FailStream(entry, *flight->works[i]->stream, entry.distrust);
  }
  LeaveDevice(entry, std::move(flight->works));
}

// Tells the observer if this chunk was computed in another way than the last one.
void EngineImpl::NoteChoices(Entry& entry, const kernels::Chunk& chunk) {
  if (chunk.choices.empty()) return;  // it was refused
  {
    absl::MutexLock lock(&mutex_);
    if (entry.last_chunk_choices == chunk.choices) return;
    entry.last_chunk_choices = chunk.choices;
  }
  observer_->OnChoices(entry.name, chunk.choices);
}

// The accumulators may be half-written.
void EngineImpl::Distrust(Entry& entry, const absl::Status& status) {
  entry.distrust = absl::InternalError(absl::StrCat(
      "the device failed while accumulating; the gradients of head ", entry.name, " at step ", entry.step,
      " are not to be trusted (zero the gradients and repeat the step): ", status.message()));
}

// A chunk of these slices is over.
void EngineImpl::LeaveDevice(Entry& entry, std::vector<std::unique_ptr<SliceWork>> works) {
  for (const auto& work : works) FinishIfReady(entry, work->stream);
  --entry.chunks_in_flight;
  --chunks_in_flight_;
  notifier_.Post([works = std::move(works)]() mutable { works.clear(); });
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

}  // namespace lossd::engine
