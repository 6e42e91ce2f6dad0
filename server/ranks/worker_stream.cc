// SPDX-License-Identifier: Apache-2.0
// The leader's end of the connection to one worker (worker_stream.h). Errors about messages say what "it",
// the worker, did; Run puts the name of the rank before them.
//
// A chunk that was sent to the worker is a Flight. The worker answers with the results of each slice in order
// (OnSlice), then those of the chunk (OnResults), and at last ChunkDone (OnDone), which ends the flight.
#include "server/ranks/worker_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"
#include "server/ranks/messages.h"

namespace lossd::ranks {

// ---- PendingRequests ----

uint64_t PendingRequests::Add() {
  absl::MutexLock lock(&mutex_);
  const uint64_t id = next_++;
  pending_[id];
  return id;
}

absl::StatusOr<v1::Answer> PendingRequests::Await(uint64_t request, absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  Pending& pending = pending_[request];
  const auto over = [&] {
    mutex_.AssertHeld();
    return pending.done || !failed_.ok();
  };
  if (!clocks::AwaitUntil(mutex_, absl::Condition(&over), deadline)) {
    return absl::DeadlineExceededError(absl::StrCat("rank ", rank_, " does not answer"));
  }
  v1::Answer answer = std::move(pending.answer);
  const bool answered = pending.done;
  pending_.erase(request);
  if (!answered) return failed_;
  LOSSD_RETURN_IF_ERROR(FromProto(answer.status()));
  return answer;
}

void PendingRequests::Forget(uint64_t request) {
  absl::MutexLock lock(&mutex_);
  const auto found = pending_.find(request);
  if (found == pending_.end()) return;
  found->second.forgotten = true;
  if (found->second.done || !failed_.ok()) pending_.erase(found);
}

v1::FilesProgress PendingRequests::Progress(uint64_t request) const {
  absl::MutexLock lock(&mutex_);
  const auto found = pending_.find(request);
  return found == pending_.end() ? v1::FilesProgress() : found->second.progress;
}

bool PendingRequests::AwaitProgress(uint64_t request,
                                    absl::FunctionRef<bool(const v1::FilesProgress&)> enough,
                                    absl::Time deadline) const {
  absl::MutexLock lock(&mutex_);
  const auto over = [&] {
    mutex_.AssertHeld();
    const auto found = pending_.find(request);
    return !failed_.ok() || found == pending_.end() || found->second.done || enough(found->second.progress);
  };
  return clocks::AwaitUntil(mutex_, absl::Condition(&over), deadline);
}

bool PendingRequests::HasFailed(uint64_t request) const {
  absl::MutexLock lock(&mutex_);
  const auto found = pending_.find(request);
  if (!failed_.ok()) return true;
  return found != pending_.end() && found->second.done && found->second.answer.status().code() != 0;
}

absl::Status PendingRequests::OnAnswer(v1::Answer& answer) {
  absl::MutexLock lock(&mutex_);
  const auto found = pending_.find(answer.request());
  if (found == pending_.end()) {
    return absl::InternalError(
        absl::StrCat("it answered request ", answer.request(), ", which there is not"));
  }
  if (found->second.forgotten) {
    pending_.erase(found);
    return absl::OkStatus();
  }
  found->second.answer.Swap(&answer);
  found->second.done = true;
  return absl::OkStatus();
}

absl::Status PendingRequests::OnProgress(v1::FilesProgress& progress) {
  absl::MutexLock lock(&mutex_);
  const auto found = pending_.find(progress.request());
  if (found == pending_.end()) {
    return absl::InternalError(
        absl::StrCat("it works on the files of request ", progress.request(), ", which there is not"));
  }
  found->second.progress.Swap(&progress);
  return absl::OkStatus();
}

void PendingRequests::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  failed_ = status;
}

// ---- WorkerStream ----

using kernels::Chunk;
using kernels::ChunkCallbacks;

namespace {

int64_t RowsOf(const Chunk& chunk) {
  int64_t rows = 0;
  for (const kernels::Slice& slice : chunk.slices) rows += slice.rows;
  return rows;
}

RowBytes RowBytesOf(const RemoteHeads& heads, const Chunk& chunk) {
  const size_t element = kernels::SizeOf(chunk.hidden_dtype);
  return {.hidden = heads.head.hidden_size * element, .teacher = heads.teacher.hidden_size * element};
}

}  // namespace

WorkerStream::WorkerStream(v1::Hello hello, WorkerTransport* transport)
    : hello_(std::move(hello)),
      requests_(static_cast<int>(hello_.rank())),
      transport_(transport),
      cancelled_by_(transport) {}

// ---- WorkerStream: writing ----

bool WorkerStream::Send(const v1::ToWorker& message) {
  sent_bytes_ += static_cast<int64_t>(message.ByteSizeLong());
  return transport_ != nullptr && transport_->Write(message);
}

void WorkerStream::SendAlone(const v1::ToWorker& message) {
  absl::MutexLock lock(&write_mutex_);
  Send(message);  // if it fails, the reading thread also notices the end of the stream
}

void WorkerStream::Refuse(const absl::Status& reason) {
  v1::ToWorker message;
  *message.mutable_refusal()->mutable_status() = ToProto(reason);
  SendAlone(message);
}

void WorkerStream::Prepare(v1::Prepare prepare) {
  v1::ToWorker message;
  *message.mutable_prepare() = std::move(prepare);
  SendAlone(message);
}

void WorkerStream::End() {
  {
    absl::MutexLock lock(&mutex_);
    ended_ = true;
  }
  v1::ToWorker message;
  message.mutable_end();
  SendAlone(message);
}

void WorkerStream::GiveUp(const absl::Status& reason) {
  {
    absl::MutexLock lock(&mutex_);
    given_up_.Update(reason);
  }
  absl::MutexLock lock(&cancel_mutex_);
  if (cancelled_by_ != nullptr) cancelled_by_->Cancel();
}

// ---- WorkerStream: rendezvous and requests ----

absl::StatusOr<v1::Prepared> WorkerStream::AwaitPrepared(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  const auto over = [this] {
    mutex_.AssertHeld();
    return prepared_ || !lost_.ok();
  };
  if (!clocks::AwaitUntil(mutex_, absl::Condition(&over), deadline)) {
    return absl::UnavailableError(absl::StrCat("rank ", rank(), " does not get ready"));
  }
  if (!lost_.ok()) return lost_;
  return preparation_;
}

void WorkerStream::ShareRows(const RowRegions* regions) {
  absl::MutexLock lock(&write_mutex_);
  regions_ = regions;
}

uint64_t WorkerStream::Start(v1::Request request) {
  const uint64_t id = requests_.Add();
  request.set_id(id);
  v1::ToWorker message;
  *message.mutable_request() = std::move(request);
  SendAlone(message);
  return id;
}

uint64_t WorkerStream::StartConnect(const std::vector<std::string>& addresses) {
  const uint64_t id = requests_.Add();
  v1::ToWorker message;
  message.mutable_connect()->set_request(id);
  for (const std::string& address : addresses) message.mutable_connect()->add_addresses(address);
  SendAlone(message);
  return id;
}

// ---- WorkerStream: chunks ----

void WorkerStream::Submit(const RemoteHeads& heads, Chunk* chunk, ChunkCallbacks callbacks) {
  absl::MutexLock writing(&write_mutex_);
  uint64_t id = 0;
  absl::Status lost;
  {
    absl::MutexLock lock(&mutex_);
    lost = lost_;
    if (lost.ok()) {
      id = next_chunk_++;
      flights_[id] = std::make_unique<Flight>(Flight{.chunk = chunk,
                                                     .callbacks = std::move(callbacks),
                                                     .row_bytes = RowBytesOf(heads, *chunk).hidden,
                                                     .is_part = heads.head.is_part,
                                                     .rows = RowsOf(*chunk)});
    }
  }
  if (lost.ok()) {
    // If sending fails, the stream has ended or ends, and Run calls FailAll once this function has released
    // write_mutex_.
    SendChunk(id, heads, *chunk);
    return;
  }
  callbacks.on_results(lost);
  callbacks.on_done(lost);
}

void WorkerStream::SendChunk(uint64_t id, const RemoteHeads& heads, const Chunk& chunk) {
  const RowBytes row_bytes = RowBytesOf(heads, chunk);
  const absl::Span<const kernels::Slice> slices = chunk.slices;
  v1::ToWorker message;
  *message.mutable_chunk() = StartOf(chunk, id, heads.head.id, heads.teacher.id);
  if (slices.empty()) NoteRead(id, {});
  if (!Send(message)) return;
  std::vector<bool> in_place;
  // The place of rows in memory that the worker has mapped; nullopt: the rows travel in the message.
  const auto find = [&](const void* begin, size_t bytes) -> std::optional<v1::RowsPlace> {
    write_mutex_.AssertHeld();
    return regions_ == nullptr ? std::nullopt : regions_->Find(rank(), begin, bytes);
  };
  for (size_t i = 0; i < slices.size(); ++i) {
    absl::StatusOr<v1::ChunkSlice> of_slice =
        MessageOf(chunk, slices[i], row_bytes, heads.head.is_part, find);
    if (!of_slice.ok()) return GiveUp(of_slice.status());
    in_place.push_back(of_slice->has_grad_hidden_at());
    *message.mutable_slice() = *std::move(of_slice);
    // Before the last message leaves, because the worker may answer as soon as it has the message.
    if (i + 1 == slices.size()) NoteRead(id, in_place);
    if (!Send(message)) return;
  }
}

// All slices have been put into messages, so results may now be written over their rows.
void WorkerStream::NoteRead(uint64_t chunk, std::vector<bool> in_place) {
  absl::MutexLock lock(&mutex_);
  Flight& flight = *flights_.at(chunk);
  flight.in_place = std::move(in_place);
  flight.is_read = true;
}

// ---- WorkerStream: reading ----

void WorkerStream::Run(absl::AnyInvocable<void(const absl::Status&)> on_end,
                       absl::AnyInvocable<void(const std::string&)> on_leaving) {
  WorkerTransport* transport = nullptr;
  {
    absl::MutexLock lock(&write_mutex_);
    transport = transport_;
  }
  absl::Status status;
  v1::FromWorker message;
  while (status.ok() && transport->Read(&message)) {
    received_bytes_ += static_cast<int64_t>(message.ByteSizeLong());
    if (message.has_leaving()) {
      on_leaving(message.leaving().reason());
    } else {
      status = OnMessage(message);
    }
  }
  if (status.ok()) status = absl::UnavailableError("its stream has ended");
  transport->Cancel();  // a write that waits for the worker ends
  status = absl::UnavailableError(absl::StrCat("rank ", rank(), " (", hello_.host(), ", ",
                                               hello_.backend().device(), ") is lost: ", status.message()));
  bool ended = false;
  {
    absl::MutexLock lock(&mutex_);
    if (!given_up_.ok()) status = given_up_;
    lost_ = status;
    ended = ended_;
  }
  requests_.Fail(status);
  {
    // Waits for a Submit that has not seen lost_, so that FailAll finds its chunk. The transport is destroyed
    // after Run, so nothing may use it from here on.
    absl::MutexLock lock(&write_mutex_);
    transport_ = nullptr;
  }
  {
    absl::MutexLock lock(&cancel_mutex_);
    cancelled_by_ = nullptr;
  }
  FailAll(status);
  if (!ended) on_end(status);
}

absl::Status WorkerStream::OnMessage(v1::FromWorker& message) {
  switch (message.message_case()) {
    case v1::FromWorker::kPrepared: {
      absl::MutexLock lock(&mutex_);
      prepared_ = true;
      preparation_.Swap(message.mutable_prepared());
      return absl::OkStatus();
    }
    case v1::FromWorker::kAnswer:
      return OnAnswer(*message.mutable_answer());
    case v1::FromWorker::kFiles:
      return requests_.OnProgress(*message.mutable_files());
    case v1::FromWorker::kSlice:
      return OnSlice(message.slice());
    case v1::FromWorker::kResults:
      return OnResults(message.results());
    case v1::FromWorker::kDone:
      return OnDone(message.done());
    case v1::FromWorker::kMetrics: {
      if (message.metrics().ByteSizeLong() > kMostMetricsBytes)
        return absl::InternalError("it sent too many metrics");
      absl::MutexLock lock(&mutex_);
      metrics_.Swap(message.mutable_metrics());
      return absl::OkStatus();
    }
    case v1::FromWorker::kLost: {
      const absl::Status status = FromProto(message.lost().status());
      return status.ok() ? absl::InternalError("its device is lost, and it does not say why") : status;
    }
    default:
      return absl::InternalError(absl::StrCat("it sent message ", message.message_case()));
  }
}

absl::Status WorkerStream::OnAnswer(v1::Answer& answer) {
  if (answer.has_memory()) {
    absl::MutexLock lock(&mutex_);
    memory_ = FromProto(answer.memory());
  }
  return requests_.OnAnswer(answer);
}

WorkerStream::Flight* WorkerStream::FindFlight(uint64_t chunk) {
  absl::MutexLock lock(&mutex_);
  const auto found = flights_.find(chunk);
  return found == flights_.end() || !found->second->is_read ? nullptr : found->second.get();
}

absl::Status WorkerStream::OnSlice(const v1::SliceResults& results) {
  Flight* const flight = FindFlight(results.chunk());
  // The results of slices come in the order of the slices.
  if (flight == nullptr || flight->has_results || flight->slices >= flight->chunk->slices.size() ||
      results.slice() != flight->slices) {
    return absl::InternalError("it sent results of a slice that it has not, or not now");
  }
  ++flight->slices;
  kernels::Slice& slice = flight->chunk->slices[results.slice()];
  if (!flight->is_part) {
    return TakeResults(results, flight->row_bytes, flight->in_place[results.slice()], slice);
  }
  TakePartResults(results, slice);
  return absl::OkStatus();
}

absl::Status WorkerStream::OnResults(const v1::ChunkResults& results) {
  Flight* const flight = FindFlight(results.chunk());
  if (flight == nullptr || flight->has_results) {
    return absl::InternalError("it sent results of a chunk that it has not");
  }
  const absl::Status status = FromProto(results.status());
  if (status.ok() && flight->slices < flight->chunk->slices.size()) {
    return absl::InternalError(absl::StrCat("it sent results of ", flight->slices, " of ",
                                            flight->chunk->slices.size(), " slices of a chunk"));
  }
  LOSSD_TRY(const auto gradients, GradientsOf(results.gradients()));
  flight->chunk->choices = ChoicesOf(results.choices());
  flight->chunk->gradients = gradients;
  flight->chunk->sample_threshold = results.sample_threshold();
  flight->has_results = true;
  flight->callbacks.on_results(status);
  return absl::OkStatus();
}

absl::Status WorkerStream::OnDone(const v1::ChunkDone& done) {
  std::unique_ptr<Flight> flight;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = flights_.find(done.chunk());
    if (found == flights_.end() || !found->second->has_results) {
      return absl::InternalError("it finished a chunk that has no results");
    }
    flight = std::move(found->second);
    flights_.erase(found);
    if (done.has_memory()) memory_ = FromProto(done.memory());
  }
  const absl::Status status = FromProto(done.status());
  if (status.ok()) {
    ++chunks_;
    rows_ += flight->rows;
  }
  flight->callbacks.on_done(status);
  return absl::OkStatus();
}

void WorkerStream::FailAll(const absl::Status& status) {
  std::map<uint64_t, std::unique_ptr<Flight>> flights;
  {
    absl::MutexLock lock(&mutex_);
    flights.swap(flights_);
  }
  for (auto& [id, flight] : flights) {
    if (!flight->has_results) flight->callbacks.on_results(status);
    flight->callbacks.on_done(status);
  }
}

kernels::MemoryStats WorkerStream::memory() const {
  absl::MutexLock lock(&mutex_);
  return memory_;
}

bool WorkerStream::lost() const {
  absl::MutexLock lock(&mutex_);
  return !lost_.ok();
}

RankReport WorkerStream::report() const {
  absl::MutexLock lock(&mutex_);
  return {.state = {.rank = rank(),
                    .host = hello_.host(),
                    .device = hello_.backend().device(),
                    .lost = !lost_.ok(),
                    .memory = memory_,
                    .chunks = chunks_,
                    .rows = rows_,
                    .traffic =
                        kernels::RankTraffic{.sent_bytes = sent_bytes_, .received_bytes = received_bytes_}},
          .metrics = metrics_};
}

}  // namespace lossd::ranks
