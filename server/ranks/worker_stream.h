// SPDX-License-Identifier: Apache-2.0
// The leader's end of one worker's stream. WorkerStream sends requests and chunks and takes answers and
// results; PendingRequests has the requests that wait for an answer; RankReport is what the leader knows of a
// rank. WorkerTransport is the stream itself, of gRPC or of a test.
#ifndef LOSSD_SERVER_RANKS_WORKER_STREAM_H_
#define LOSSD_SERVER_RANKS_WORKER_STREAM_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/rank_link.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "server/ranks/rows.h"

namespace lossd::ranks {

// The requests of one worker that have no answer yet, and what the worker says of them meanwhile.
//
// Thread-safe.
class PendingRequests {
 public:
  explicit PendingRequests(int rank) : rank_(rank) {}

  // A new one, to be awaited or forgotten once. Numbers count up from 1.
  uint64_t Add();
  // DEADLINE_EXCEEDED: the answer has not come, and may be awaited again. An error that the answer reports is
  // returned, or what the requests failed with.
  absl::StatusOr<v1::Answer> Await(uint64_t request, absl::Time deadline);
  // Nobody will ask for it any more.
  void Forget(uint64_t request);

  // What the worker has said last of a request that works on files.
  v1::FilesProgress Progress(uint64_t request) const;
  // Waits until it has said enough, or has answered, or all have failed. False at the deadline.
  bool AwaitProgress(uint64_t request, absl::FunctionRef<bool(const v1::FilesProgress&)> enough,
                     absl::Time deadline) const;
  // There is an answer that reports an error, or all have failed.
  bool HasFailed(uint64_t request) const;

  // INTERNAL if there is no such request.
  absl::Status OnAnswer(v1::Answer& answer);
  absl::Status OnProgress(v1::FilesProgress& progress);
  // The worker is lost: from now on everything fails so.
  void Fail(const absl::Status& status);

 private:
  struct Pending {
    bool done = false;
    bool forgotten = false;
    v1::Answer answer;
    v1::FilesProgress progress;
  };

  const int rank_;
  mutable absl::Mutex mutex_;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, Pending> pending_ ABSL_GUARDED_BY(mutex_);
};

// What the leader knows of a rank. Plain data.
struct RankReport {
  kernels::RankState state;
  v1::Metrics metrics;  // of a worker, as it last said
};

// How long the other ranks may take to say what is wrong, after the time of a collective, in which each
// notices it.
inline constexpr absl::Duration kLastWords = absl::Seconds(5);

// The most bytes of one message of metrics.
inline constexpr size_t kMostMetricsBytes = 64 << 10;

// The stream itself, of gRPC or of a test.
class WorkerTransport {
 public:
  virtual ~WorkerTransport() = default;
  // False once the stream is broken. Write is called by one thread at a time.
  virtual bool Read(v1::FromWorker* message) = 0;
  virtual bool Write(const v1::ToWorker& message) = 0;
  // Breaks the stream: Read and Write return false soon.
  virtual void Cancel() = 0;
};

// A head on a worker.
struct RemoteHeadId {
  uint64_t id = 0;
  size_t hidden_size = 0;
  bool is_part = false;  // of a head that is split by vocabulary: another part delivers the results
};

// What a chunk is computed with.
struct RemoteHeads {
  RemoteHeadId head;
  RemoteHeadId teacher;  // id 0: there is none
};

// Requests and their answers, chunks and their results.
//
// Thread-safe, but for Run, which belongs to the thread that reads the stream. Once the worker is lost, all
// that is under way and all that comes later fails with UNAVAILABLE naming the rank.
class WorkerStream {
 public:
  // `hello` is what the worker has said first.
  WorkerStream(v1::Hello hello, WorkerTransport* transport);
  WorkerStream(const WorkerStream&) = delete;
  WorkerStream& operator=(const WorkerStream&) = delete;

  int rank() const { return static_cast<int>(hello_.rank()); }
  const v1::Hello& hello() const { return hello_; }

  // Reads until the stream ends, and then fails everything. `on_end` is told why, after that, unless the
  // leader ended it; `on_leaving` why the worker wants to stop.
  void Run(absl::AnyInvocable<void(const absl::Status&)> on_end,
           absl::AnyInvocable<void(const std::string&)> on_leaving);

  // ---- Rendezvous ----
  void Refuse(const absl::Status& reason);
  void Prepare(v1::Prepare prepare);
  // What the worker has to say of itself; waits for it.
  absl::StatusOr<v1::Prepared> AwaitPrepared(absl::Time deadline);
  // Rows in these regions are named instead of sent. They outlive the stream's chunks. Before the first
  // chunk.
  void ShareRows(const RowRegions* regions);

  // ---- Requests ----
  // Sends a request, whose `id` is set here; Await waits for the answer. An error that the answer reports is
  // returned. Each is awaited once.
  uint64_t Start(v1::Request request);
  uint64_t StartConnect(const std::vector<std::string>& addresses);
  // DEADLINE_EXCEEDED: the answer has not come.
  absl::StatusOr<v1::Answer> Await(uint64_t request, absl::Time deadline = absl::InfiniteFuture()) {
    return requests_.Await(request, deadline);
  }
  absl::StatusOr<v1::Answer> Call(v1::Request request) { return Await(Start(std::move(request))); }
  PendingRequests& requests() { return requests_; }
  // As HeadKernels::Submit. The callbacks run on the reading thread, or on this one if the worker is lost.
  void Submit(const RemoteHeads& heads, kernels::Chunk* chunk, kernels::ChunkCallbacks callbacks);

  // The memory of the worker's backend, as the worker last said.
  kernels::MemoryStats memory() const;
  RankReport report() const;
  bool lost() const;

  // Has the worker end, without a loss.
  void End();
  // Gives it up: everything fails soon, with `reason`.
  void GiveUp(const absl::Status& reason);

 private:
  struct Flight {
    kernels::Chunk* chunk = nullptr;
    kernels::ChunkCallbacks callbacks;
    size_t row_bytes = 0;  // of hidden states
    bool is_part = false;
    std::vector<bool> in_place;  // of each slice: the worker knows where its gradients go
    bool is_read = false;        // for sending: only then may there be results
    size_t slices = 0;           // that have results
    int64_t rows = 0;            // of all slices
    bool has_results = false;    // of the chunk
  };

  bool Send(const v1::ToWorker& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_);
  void SendAlone(const v1::ToWorker& message) ABSL_LOCKS_EXCLUDED(write_mutex_);
  void SendChunk(uint64_t id, const RemoteHeads& heads, const kernels::Chunk& chunk)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_);
  void NoteRead(uint64_t chunk, std::vector<bool> in_place) ABSL_LOCKS_EXCLUDED(mutex_);

  // On the reading thread. An error if the worker has said what it must not.
  absl::Status OnMessage(v1::FromWorker& message);
  absl::Status OnAnswer(v1::Answer& answer);
  absl::Status OnSlice(const v1::SliceResults& results);
  absl::Status OnResults(const v1::ChunkResults& results);
  absl::Status OnDone(const v1::ChunkDone& done);
  // One that the worker may have results of; null: there is none.
  Flight* FindFlight(uint64_t chunk);
  void FailAll(const absl::Status& status);

  const v1::Hello hello_;
  PendingRequests requests_;
  absl::Mutex write_mutex_;  // held while a chunk is read for sending; before mutex_
  WorkerTransport* transport_ ABSL_GUARDED_BY(write_mutex_);  // null: the stream has ended
  const RowRegions* regions_ ABSL_GUARDED_BY(write_mutex_) = nullptr;
  absl::Mutex cancel_mutex_;
  WorkerTransport* cancelled_by_ ABSL_GUARDED_BY(cancel_mutex_);  // the same, for a write that hangs

  mutable absl::Mutex mutex_;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  absl::Status given_up_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // by the leader
  bool prepared_ ABSL_GUARDED_BY(mutex_) = false;
  v1::Prepared preparation_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_chunk_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, std::unique_ptr<Flight>> flights_ ABSL_GUARDED_BY(mutex_);
  kernels::MemoryStats memory_ ABSL_GUARDED_BY(mutex_);
  v1::Metrics metrics_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int64_t> chunks_{0}, rows_{0}, sent_bytes_{0}, received_bytes_{0};  // RankState
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_WORKER_STREAM_H_
