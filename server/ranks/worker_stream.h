// SPDX-License-Identifier: Apache-2.0
// The leader's end of the connection to one worker. WorkerStream sends requests and chunks, and takes answers
// and results. PendingRequests has the requests that wait for an answer. RankReport is the leader's
// information about a rank. WorkerTransport is the stream of messages, which gRPC or a test implements.
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

// The requests to one worker that wait for an answer, with the progress that the worker reports meanwhile.
//
// Thread-safe.
class PendingRequests {
 public:
  explicit PendingRequests(int rank) : rank_(rank) {}

  // Adds a request and returns its id; ids count up from 1. Call Await or Forget for it once.
  uint64_t Add();
  // Waits for the answer. If the answer reports an error, returns that error. If Fail was called, returns its
  // error. DEADLINE_EXCEEDED: there is no answer yet, and Await may be called again.
  absl::StatusOr<v1::Answer> Await(uint64_t request, absl::Time deadline);
  // The answer to this request is not wanted any more.
  void Forget(uint64_t request);

  // The last progress that the worker has reported of a request that works on files.
  v1::FilesProgress Progress(uint64_t request) const;
  // Waits until `enough` returns true for the reported progress, the request has its answer, or Fail was
  // called. False at the deadline.
  bool AwaitProgress(uint64_t request, absl::FunctionRef<bool(const v1::FilesProgress&)> enough,
                     absl::Time deadline) const;
  // Whether the answer reports an error, or Fail was called.
  bool HasFailed(uint64_t request) const;

  // Handle a message of the worker. INTERNAL if there is no such request.
  absl::Status OnAnswer(v1::Answer& answer);
  absl::Status OnProgress(v1::FilesProgress& progress);
  // The worker is lost. All requests, also later ones, fail with `status`.
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

// The leader's information about a rank. Plain data.
struct RankReport {
  kernels::RankState state;
  v1::Metrics metrics;  // the last metrics that a worker has sent
};

// When a collective takes too long, each rank notices it. Then the ranks may take this long to report the
// cause.
inline constexpr absl::Duration kLastWords = absl::Seconds(5);

// The most bytes of one message of metrics.
inline constexpr size_t kMostMetricsBytes = 64 << 10;

// The stream of messages, which gRPC or a test implements.
class WorkerTransport {
 public:
  virtual ~WorkerTransport() = default;
  // Both return false once the stream is broken. Write is called by one thread at a time.
  virtual bool Read(v1::FromWorker* message) = 0;
  virtual bool Write(const v1::ToWorker& message) = 0;
  // Breaks the stream: Read and Write return false soon.
  virtual void Cancel() = 0;
};

// A head on a worker.
struct RemoteHeadId {
  uint64_t id = 0;
  size_t hidden_size = 0;
  // A part of a head that is split by vocabulary. Another part delivers the results.
  bool is_part = false;
};

// The heads with which a chunk is computed.
struct RemoteHeads {
  RemoteHeadId head;
  RemoteHeadId teacher;  // id 0: there is no teacher
};

// Sends requests and chunks to one worker, and takes their answers and results.
//
// Thread-safe, except for Run, which belongs to the thread that reads the stream. Once the worker is lost,
// all requests and chunks, under way or later, fail with UNAVAILABLE naming the rank.
class WorkerStream {
 public:
  // `hello` is the first message of the worker.
  WorkerStream(v1::Hello hello, WorkerTransport* transport);
  WorkerStream(const WorkerStream&) = delete;
  WorkerStream& operator=(const WorkerStream&) = delete;

  int rank() const { return static_cast<int>(hello_.rank()); }
  const v1::Hello& hello() const { return hello_; }

  // Reads until the stream ends, and then fails all requests and chunks. After that it calls `on_end` with
  // the reason, unless the leader has ended the stream. `on_leaving` is called with the reason if the worker
  // wants to stop.
  void Run(absl::AnyInvocable<void(const absl::Status&)> on_end,
           absl::AnyInvocable<void(const std::string&)> on_leaving);

  // ---- Rendezvous ----
  void Refuse(const absl::Status& reason);
  void Prepare(v1::Prepare prepare);
  // Waits for the worker's answer to Prepare.
  absl::StatusOr<v1::Prepared> AwaitPrepared(absl::Time deadline);
  // From now on, messages name places in these regions instead of bringing rows. `regions` outlives the
  // stream's chunks. Call before the first chunk.
  void ShareRows(const RowRegions* regions);

  // ---- Requests ----
  // Sends a request and returns its id, which is set here. Call Await for it once.
  uint64_t Start(v1::Request request);
  uint64_t StartConnect(const std::vector<std::string>& addresses);
  // Waits for the answer, as PendingRequests::Await.
  absl::StatusOr<v1::Answer> Await(uint64_t request, absl::Time deadline = absl::InfiniteFuture()) {
    return requests_.Await(request, deadline);
  }
  absl::StatusOr<v1::Answer> Call(v1::Request request) { return Await(Start(std::move(request))); }
  PendingRequests& requests() { return requests_; }
  // As HeadKernels::Submit. The callbacks run on the reading thread, or on the calling thread if the worker
  // is lost already.
  void Submit(const RemoteHeads& heads, kernels::Chunk* chunk, kernels::ChunkCallbacks callbacks);

  // The memory of the worker's backend, from the worker's last report.
  kernels::MemoryStats memory() const;
  RankReport report() const;
  bool lost() const;

  // Tells the worker to end. This does not count as a loss.
  void End();
  // Gives the worker up: all requests and chunks fail soon, with `reason`.
  void GiveUp(const absl::Status& reason);

 private:
  struct Flight {
    kernels::Chunk* chunk = nullptr;
    kernels::ChunkCallbacks callbacks;
    size_t row_bytes = 0;  // bytes of a row of hidden states
    bool is_part = false;
    // For each slice: whether the message has named the place of the slice's gradients.
    std::vector<bool> in_place;
    // All slices have been read for sending. Results may arrive only after that.
    bool is_read = false;
    size_t slices = 0;         // the slices that have results
    int64_t rows = 0;          // the rows of all slices
    bool has_results = false;  // the chunk has its results
  };

  bool Send(const v1::ToWorker& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_);
  void SendAlone(const v1::ToWorker& message) ABSL_LOCKS_EXCLUDED(write_mutex_);
  void SendChunk(uint64_t id, const RemoteHeads& heads, const kernels::Chunk& chunk)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mutex_);
  void NoteRead(uint64_t chunk, std::vector<bool> in_place) ABSL_LOCKS_EXCLUDED(mutex_);

  // Called on the reading thread. They return an error if the worker has sent a message that is not allowed.
  absl::Status OnMessage(v1::FromWorker& message);
  absl::Status OnAnswer(v1::Answer& answer);
  absl::Status OnSlice(const v1::SliceResults& results);
  absl::Status OnResults(const v1::ChunkResults& results);
  absl::Status OnDone(const v1::ChunkDone& done);
  // The flight of a chunk whose results the worker may send; null: there is none.
  Flight* FindFlight(uint64_t chunk);
  void FailAll(const absl::Status& status);

  const v1::Hello hello_;
  PendingRequests requests_;
  // Held while a chunk is read for sending. Locked before mutex_.
  absl::Mutex write_mutex_;
  WorkerTransport* transport_ ABSL_GUARDED_BY(write_mutex_);  // null once the stream has ended
  const RowRegions* regions_ ABSL_GUARDED_BY(write_mutex_) = nullptr;
  absl::Mutex cancel_mutex_;
  // The same transport, to cancel while a write hangs with write_mutex_ held.
  WorkerTransport* cancelled_by_ ABSL_GUARDED_BY(cancel_mutex_);

  mutable absl::Mutex mutex_;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  absl::Status given_up_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // the leader has ended the stream
  bool prepared_ ABSL_GUARDED_BY(mutex_) = false;
  v1::Prepared preparation_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_chunk_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, std::unique_ptr<Flight>> flights_ ABSL_GUARDED_BY(mutex_);
  kernels::MemoryStats memory_ ABSL_GUARDED_BY(mutex_);
  v1::Metrics metrics_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int64_t> chunks_{0}, rows_{0}, sent_bytes_{0}, received_bytes_{0};  // for RankState
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_WORKER_STREAM_H_
