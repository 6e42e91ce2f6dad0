// EngineImpl: deterministic mode. Rooms for slices, and groups on the device (sequencer.h has the order).
#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

// Results of all rows of a group; empty: nobody wants them.
struct RowResults {
  std::vector<float> loss, lse, entropy, logprob;
  std::vector<int32_t> argmax;
};

template <typename T>
T* At(std::vector<T>& values, size_t index) {
  return values.empty() ? nullptr : values.data() + index;
}

// Copies [index, index + rows) if that is wanted.
template <typename T>
void CopyIf(bool wanted, const std::vector<T>& from, size_t index, size_t rows, std::vector<T>& to) {
  const auto first = from.begin() + static_cast<std::ptrdiff_t>(index);
  if (wanted) to.assign(first, first + static_cast<std::ptrdiff_t>(rows));
}

RowResults MakeResults(const GroupAssembly& group) {
  RowResults results;
  const auto rows = static_cast<size_t>(group.rows().size());
  for (const auto& slice : group.slices()) {
    const RowWants& wants = slice->stream->spec().want_rows;
    if (wants.loss) results.loss.resize(rows);
    if (wants.lse) results.lse.resize(rows);
    if (wants.entropy) results.entropy.resize(rows);
    if (wants.logprob) results.logprob.resize(rows);
    if (wants.argmax) results.argmax.resize(rows);
  }
  return results;
}

void Add(const kernels::SliceSums& from, kernels::SliceSums& to) {
  to.loss += from.loss;
  to.z_loss += from.z_loss;
  to.entropy += from.entropy;
  to.dropped_mass += from.dropped_mass;
  to.valid_rows += from.valid_rows;
  to.correct_rows += from.correct_rows;
}

}  // namespace

// A piece of a group on the device: rows of slices, or of none (rows of zeros).
struct EngineImpl::GroupFlight {
  EntryPtr entry;
  std::unique_ptr<GroupAssembly> group;
  std::vector<GroupAssembly::Segment> segments;
  std::vector<kernels::Slice> slices;  // parallel to segments
  std::vector<uint8_t> accumulate;     // [group rows]
  RowValues declared;                  // [group rows]
  RowResults results;
  kernels::Chunk chunk;
  absl::Time started;
  double compute_seconds = 0.0;
  bool results_ok = false;

  size_t Index(int64_t row) const { return static_cast<size_t>(row - group->rows().begin); }
  bool IsGood(size_t i) const { return results_ok && slices[i].first_nonfinite_row < 0; }
  bool HasTargets(RowRange rows) const {
    const auto first = declared.targets.begin() + static_cast<std::ptrdiff_t>(Index(rows.begin));
    return std::any_of(first, first + rows.size(), [](int32_t t) { return t != kernels::kIgnoredTarget; });
  }
};

// ---- Rooms ----

int64_t EngineImpl::GroupRows(const kernels::HeadConfig& config, int64_t chunk_rows) const {
  if (!options_.deterministic || !config.trainable) return 0;
  const int64_t areas_rows = options_.staging_bytes / AreaRowBytes(config);
  return std::clamp<int64_t>(areas_rows / static_cast<int64_t>(Sequencer::kAreas), 1, chunk_rows);
}

SliceLimits EngineImpl::LimitsFor(const Entry& entry, bool accumulates) const {
  SliceLimits limits{.max_rows = entry.chunk_rows, .max_bytes = options_.slice_bytes};
  if (accumulates && entry.sequencer != nullptr) {
    limits.row_grid = entry.sequencer->group_rows();
    limits.max_rows = limits.row_grid;
  }
  return limits;
}

void EngineImpl::RequestRoom(const EntryPtr& entry, const std::shared_ptr<StreamState>& stream, RowRange rows,
                             int64_t bytes, RoomWaiter waiter) {
  absl::AnyInvocable<void()> granted;
  {
    absl::MutexLock lock(&mutex_);
    if (stream->failed() || stream->finished()) return;
    if (absl::Status status = stream->CheckSlice(rows, bytes); !status.ok()) {
      FailStream(*entry, *stream, std::move(status));
      FinishIfReady(*entry, stream);
      return;
    }
    entry->sequencer->Request(stream, rows, std::move(waiter));
    granted = GrantRooms(*entry, stream.get());
  }
  if (granted) granted();
}

absl::AnyInvocable<void()> EngineImpl::GrantRooms(Entry& entry, const StreamState* stream) {
  absl::AnyInvocable<void()> own;
  for (Sequencer::Grant& grant : entry.sequencer->TakeGrants()) {
    uint8_t* const area = entry.areas->bytes().data() + static_cast<int64_t>(grant.area) * entry.area_bytes();
    // The buffer may outlive the head, so it keeps the memory; the engine waits for nothing but the return.
    StagingBuffer room(area + grant.stream->RowBytes(grant.rows.begin),
                       grant.stream->RowBytes(grant.rows.size()),
                       [this, entry = entry.weak_from_this(), memory = entry.areas, area_index = grant.area,
                        id = grant.room]() mutable {
                         memory.reset();
                         ReturnRoom(entry, area_index, id);
                       });
    ++rooms_lent_;
    auto call = [waiter = std::move(grant.waiter), room = std::move(room)]() mutable {
      waiter(std::move(room));
    };
    if (grant.stream.get() == stream) {
      own = std::move(call);
    } else {
      notifier_.Post(std::move(call));
    }
  }
  CallTurns(entry);
  return own;
}

void EngineImpl::ReturnRoom(const std::weak_ptr<Entry>& entry, size_t area, uint64_t room) {
  if (const EntryPtr locked = entry.lock()) {
    absl::MutexLock lock(&mutex_);
    locked->sequencer->Return(area, room);
    GrantRooms(*locked);
    work_.Signal();
  }
  absl::MutexLock lock(&mutex_);
  --rooms_lent_;  // last: then the engine may be destroyed
}

void EngineImpl::SubmitInOrder(Entry& entry, std::unique_ptr<SliceWork>& work) {
  const std::shared_ptr<StreamState> stream = work->stream;
  if (!entry.sequencer->Attach(work, ++entry.arrivals)) {
    stream->AddOutstanding(-1);
    FailStream(entry, *stream, absl::FailedPreconditionError("Submit needs the room of RequestRoom"));
    FinishIfReady(entry, stream);
    return;
  }
  GrantRooms(entry);  // others may have waited for the same rows
}

// ---- Groups on the device ----

bool EngineImpl::LaunchNextGroup(const EntryPtr& entry) {
  if (entry->sequencer == nullptr) return false;
  std::unique_ptr<GroupAssembly> group = entry->sequencer->TakeReady();
  if (group == nullptr) return false;
  GrantRooms(*entry);  // the next group assembles while this one is computed
  entry->group_was_last = true;
  LaunchGroup(entry, std::move(group));
  return true;
}

void EngineImpl::LaunchGroup(const EntryPtr& entry, std::unique_ptr<GroupAssembly> group) {
  auto flight = std::make_shared<GroupFlight>();
  flight->entry = entry;
  flight->started = absl::Now();
  const auto rows = static_cast<size_t>(group->rows().size());
  flight->accumulate.resize(rows);
  const uint64_t id = group->key().microbatch_id;
  flight->declared = entry->ledger.Contents(id, group->rows());
  entry->ledger.Reserve(id, group->rows(), absl::MakeSpan(flight->accumulate));
  flight->results = MakeResults(*group);
  flight->segments = group->Segments();
  flight->group = std::move(group);
  std::erase_if(flight->segments, [&](const auto& segment) {
    return segment.slices.empty() && !flight->HasTargets(segment.rows);
  });
  for (const auto& slice : flight->group->slices())
    slice->queue_seconds = absl::ToDoubleSeconds(flight->started - slice->submitted);
  for (const auto& segment : flight->segments) flight->slices.push_back(MakeSlice(*flight, segment));
  mutex_.Unlock();
  FillGaps(*flight);
  mutex_.Lock();
  const StreamSpec& first = flight->group->slices().front()->stream->spec();
  flight->chunk = {.options = first.options,
                   .hidden_dtype = first.hidden_dtype,
                   .accumulate_gradients = true,
                   .independent = true,
                   .retained = retained_.get(),
                   .slices = absl::MakeSpan(flight->slices)};
  Launch(*entry, &flight->chunk,
         {.on_results = [this, flight](absl::Status s) { OnGroupResults(*flight, std::move(s)); },
          .on_done = [this, flight](absl::Status s) { OnGroupDone(flight, std::move(s)); }});
}

// What the backend computes of a segment: rows in the group's area.
kernels::Slice EngineImpl::MakeSlice(GroupFlight& flight, const GroupAssembly::Segment& segment) const {
  const RowRange rows = segment.rows;
  const size_t index = flight.Index(rows.begin);
  // Whatever is agreed on in a microbatch, any of its streams can say.
  StreamState& stream =
      segment.slices.empty() ? *flight.group->slices().front()->stream : *segment.slices.front()->stream;
  uint8_t* const hidden = flight.entry->areas->bytes().data() +
                          static_cast<int64_t>(flight.group->area()) * flight.entry->area_bytes() +
                          stream.RowBytes(static_cast<int64_t>(index));
  kernels::Slice slice;
  slice.rows = rows.size();
  slice.accumulate = flight.accumulate.data() + index;
  slice.grad_scale = stream.grad_scale();
  slice.grad_hidden = stream.spec().want_grad_hidden ? hidden : nullptr;
  slice.out = {.loss = At(flight.results.loss, index),
               .lse = At(flight.results.lse, index),
               .entropy = At(flight.results.entropy, index),
               .target_logprob = At(flight.results.logprob, index),
               .argmax = At(flight.results.argmax, index)};
  if (segment.slices.empty()) {
    slice.hidden = hidden;
    slice.targets = At(flight.declared.targets, index);
    slice.row_weights = At(flight.declared.row_weights, index);
    slice.grad_loss = At(flight.declared.grad_loss, index);
    slice.grad_lse = At(flight.declared.grad_lse, index);
    slice.grad_entropy = At(flight.declared.grad_entropy, index);
    return slice;
  }
  slice.hidden = stream.is_backward() ? nullptr : hidden;
  slice.retained_offset = stream.RetainedOffset(rows);
  slice.targets = stream.targets(rows);
  slice.row_weights = stream.row_weights(rows);
  slice.grad_loss = stream.grad_loss(rows);
  slice.grad_lse = stream.grad_lse(rows);
  slice.grad_entropy = stream.grad_entropy(rows);
  return slice;
}

// Rows that have their place in the group but were not sent again are zeros. On the device thread.
void EngineImpl::FillGaps(GroupFlight& flight) {
  const size_t row_bytes = static_cast<size_t>(flight.group->slices().front()->stream->RowBytes(1));
  uint8_t* const area = flight.entry->areas->bytes().data() +
                        static_cast<int64_t>(flight.group->area()) * flight.entry->area_bytes();
  for (const GroupAssembly::Segment& segment : flight.segments) {
    if (!segment.slices.empty()) continue;
    std::memset(area + flight.Index(segment.rows.begin) * row_bytes, 0,
                static_cast<size_t>(segment.rows.size()) * row_bytes);
  }
}

void EngineImpl::OnGroupResults(GroupFlight& flight, absl::Status status) {
  flight.compute_seconds = absl::ToDoubleSeconds(absl::Now() - flight.started);
  flight.results_ok = status.ok();
  if (!status.ok()) observer_->OnDeviceError(status);
  absl::MutexLock lock(&mutex_);
  Entry& entry = *flight.entry;
  bool all_good = status.ok();
  for (size_t i = 0; i < flight.segments.size(); ++i) {
    if (flight.IsGood(i)) continue;
    const int64_t row = flight.segments[i].rows.begin + flight.slices[i].first_nonfinite_row;
    for (SliceWork* work : flight.segments[i].slices) {
      all_good = false;
      FailStream(entry, *work->stream, status.ok() ? RowNotFinite(row) : DeviceFailed(status));
    }
  }
  std::vector<StagingBuffer> unused;
  for (const auto& work : flight.group->slices()) {
    if (!work->stream->failed()) DeliverFromGroup(flight, *work);
    if (work->buffer) unused.push_back(std::move(work->buffer));
  }
  notifier_.Post([unused = std::move(unused)]() mutable { unused.clear(); });
  if (all_good) entry.sequencer->OnResultsGood(*flight.group);
  entry.sequencer->ReleaseArea(*flight.group);
  GrantRooms(entry);
  work_.SignalAll();
}

void EngineImpl::DeliverFromGroup(GroupFlight& flight, SliceWork& work) {
  const RowWants& wants = work.stream->spec().want_rows;
  const size_t index = flight.Index(work.rows.begin);
  const auto rows = static_cast<size_t>(work.rows.size());
  CopyIf(wants.loss, flight.results.loss, index, rows, work.output.loss);
  CopyIf(wants.lse, flight.results.lse, index, rows, work.output.lse);
  CopyIf(wants.entropy, flight.results.entropy, index, rows, work.output.entropy);
  CopyIf(wants.logprob, flight.results.logprob, index, rows, work.output.logprob);
  CopyIf(wants.argmax, flight.results.argmax, index, rows, work.output.argmax);
  Deliver(work, flight.compute_seconds);
}

// Books a group. A row that several slices hold is accumulated for the first of them and a repeat for the
// others.
void EngineImpl::SettleGroup(GroupFlight& flight, bool accumulated) {
  struct Tally {
    kernels::SliceSums sums;
    int64_t accumulated = 0;
    int64_t repeated = 0;
    bool good = true;
  };
  std::map<const SliceWork*, Tally> tallies;
  Entry& entry = *flight.entry;
  const uint64_t id = flight.group->key().microbatch_id;
  for (size_t i = 0; i < flight.segments.size(); ++i) {
    const GroupAssembly::Segment& segment = flight.segments[i];
    const bool good = flight.IsGood(i);
    int64_t committed = 0;
    if (good && accumulated) {
      committed = entry.ledger.Commit(id, segment.rows);
    } else {
      entry.ledger.Release(id, segment.rows);
    }
    for (const SliceWork* work : segment.slices) {
      Tally& tally = tallies[work];
      Add(flight.slices[i].sums, tally.sums);
      tally.accumulated += committed;
      tally.repeated += flight.slices[i].sums.valid_rows - committed;
      tally.good = tally.good && good;
      committed = 0;
    }
  }
  for (const auto& work : flight.group->slices()) {
    const Tally& tally = tallies[work.get()];
    if (tally.good) {
      work->stream->FinishSlice(tally.sums, tally.accumulated, tally.repeated, work->queue_seconds,
                                flight.compute_seconds);
      entry.total_rows += work->rows.size();
    }
    work->stream->AddOutstanding(-1);
  }
}

void EngineImpl::OnGroupDone(const std::shared_ptr<GroupFlight>& flight, absl::Status status) {
  Entry& entry = *flight->entry;
  int64_t rows = 0;
  int64_t valid_rows = 0;
  for (size_t i = 0; i < flight->segments.size(); ++i) {
    rows += flight->segments[i].rows.size();
    valid_rows += flight->slices[i].sums.valid_rows;
  }
  for (const auto& work : flight->group->slices()) observer_->OnSlice(entry.name, work->queue_seconds);
  observer_->OnChunk(entry.name, static_cast<int64_t>(flight->group->slices().size()), rows, valid_rows,
                     flight->chunk.algorithm, flight->compute_seconds);
  NoteChoices(entry, flight->chunk);
  const bool broken = flight->results_ok && !status.ok();
  if (broken) observer_->OnDeviceError(status);
  absl::MutexLock lock(&mutex_);
  if (broken) Distrust(entry, status);
  SettleGroup(*flight, !broken);
  entry.sequencer->OnLeft(*flight->group);
  if (broken) {
    FailStreams(
        entry, [](const StreamState& stream) { return stream.spec().accumulate_gradients; }, entry.distrust);
  }
  GrantRooms(entry);
  LeaveDevice(entry, std::move(flight->group->mutable_slices()));
}

}  // namespace lossd::engine
