// SPDX-License-Identifier: Apache-2.0
// A worker: a rank that is not the leader. It joins the leader, and computes what the leader asks of it until
// one of the two ends. WorkerHeads carries out requests and chunks, WorkerFiles the requests that concern
// files of checkpoints.
//
// Worker and WorkerFiles are thread-safe.
#ifndef LOSSD_SERVER_RANKS_WORKER_H_
#define LOSSD_SERVER_RANKS_WORKER_H_

#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/clocks/clock.h"
#include "kernels/create_backend.h"
#include "kernels/errors/status_macros.h"
#include "kernels/exchange_times.h"
#include "kernels/rank_link.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "server/head/checkpoint.h"
#include "server/head/disk.h"
#include "server/ranks/channel.h"
#include "server/ranks/rows.h"
#include "server/ranks/start.h"

namespace lossd::ranks {

// The work of a worker on files of checkpoints: it writes the files of its classes, and reads what its part
// of a head needs, below its own checkpoint directory. WorkerFiles takes the leader's requests; a FileJob is
// one of them. RankFiles (remote_backend.h) is the leader's end.
//
// Names come from the leader and are checked here. The worker makes files only in a temporary folder, under
// names that it makes itself.
//
// Threads. Each request has a thread of its own, which works on the files. The worker's driving thread reads
// and writes the tensors for it, a slice at a time, between chunks. Both classes are thread-safe.

struct WorkerFilesOptions {
  int rank = 1;
  std::string directory;                    // of checkpoints; empty: none
  int64_t slice_bytes = int64_t{8} << 20;   // that the driving thread deals with at once
  int64_t buffer_bytes = int64_t{1} << 30;  // of one request, at most
  int64_t reserve_bytes = 0;                // of the host's memory, which stay to others
  int threads = 4;                          // that read at once in a load
  head::Disk* disk = head::Disk::Real();
};

class FileJob;

// Takes the leader's requests that concern files, and has a FileJob for each that is under way. Thread-safe.
class WorkerFiles {
 public:
  struct Parts {
    // Has the driving thread run it, after what it was given before; if that ends, never.
    std::function<void(std::function<void()>)> on_driver;
    // A head of the worker's, for the driving thread; null: there is none.
    std::function<kernels::HeadKernels*(uint64_t head)> find;
    std::function<void(v1::FromWorker)> send;  // thread-safe
  };

  // At most so many requests at a time.
  static constexpr size_t kMostJobs = 16;

  WorkerFiles(const WorkerFilesOptions& options, Parts parts);
  ~WorkerFiles();

  // Whether `request` is for this.
  static bool IsFor(const v1::Request& request);
  // On the driving thread; does not block. What has to be answered at once is answered.
  void Handle(const v1::Request& request) ABSL_LOCKS_EXCLUDED(mutex_);
  // The driving thread has ended: all work ends.
  void End() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::Status Do(const v1::Request& request) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Begin(const v1::Request& request) ABSL_LOCKS_EXCLUDED(mutex_);
  FileJob* Find(uint64_t request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void JoinEnded() ABSL_LOCKS_EXCLUDED(mutex_);

  const WorkerFilesOptions options_;
  const Parts parts_;
  absl::Mutex mutex_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<uint64_t, std::unique_ptr<FileJob>> jobs_ ABSL_GUARDED_BY(mutex_);
};

// One request that works on files of a checkpoint, with a thread of its own.
//
// Thread-safe. Ends when it is destroyed, which waits for its thread.
class FileJob {
 public:
  // Begins. All outlive it.
  FileJob(const WorkerFilesOptions& options, const WorkerFiles::Parts& parts, const v1::Request& request);
  ~FileJob();

  // INTERNAL if it does not wait for that.
  absl::Status GoOn(const v1::GoOn& go_on) ABSL_LOCKS_EXCLUDED(mutex_);
  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_);
  // What waits for the driving thread waits no longer.
  void EndDriver() ABSL_LOCKS_EXCLUDED(mutex_);
  bool ended() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run();
  absl::Status Save(v1::Answer& answer);
  absl::Status Load();

  // ---- Of a save ----
  // Reads the leader's file and writes its own: `progress_` has both.
  absl::Status Prove(const head::FolderBelow& folder);
  absl::StatusOr<std::vector<head::PlannedFile>> FilesOf(const v1::GoOn& go_on,
                                                         const kernels::HeadConfig& config) const;
  absl::StatusOr<std::vector<head::ManifestShard>> Write(const head::FolderBelow& folder,
                                                         const kernels::HeadConfig& config,
                                                         const std::vector<head::PlannedFile>& files,
                                                         int threads);
  // ---- Of a load ----
  absl::Status WriteRows(kernels::TensorId id, int64_t row_begin, int64_t rows, absl::Span<const uint8_t> in);

  // Tells the leader that this is ready, and waits. CANCELLED.
  absl::StatusOr<v1::GoOn> AwaitGoOn() ABSL_LOCKS_EXCLUDED(mutex_);
  bool cancelled() const ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<kernels::HeadConfig> Config();
  // Runs `fn` on the driving thread with the head.
  absl::Status OnDriver(absl::FunctionRef<absl::Status(kernels::HeadKernels& head)> fn)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void SendProgress();
  int64_t BufferBytes(int threads) const;

  const WorkerFilesOptions& options_;
  const WorkerFiles::Parts& parts_;
  const v1::Request request_;
  v1::FilesProgress progress_;  // of the job's thread

  mutable absl::Mutex mutex_;
  bool waits_ ABSL_GUARDED_BY(mutex_) = false;  // for GoOn
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool driver_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<v1::GoOn> go_on_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last
};

// The heads of a worker's backend. WorkerHeads carries out what the leader asks of them; WorkerBuffers has
// the memory for the rows of chunks that bring them in messages.
//
// WorkerHeads is called by one thread, the backend's driving thread. What it sends may come from the
// backend's own threads.

// Staging memory for the chunks of a worker: one buffer for each chunk in flight, used again by later ones.
//
// Thread-safe.
class WorkerBuffers {
 public:
  using Buffer = std::unique_ptr<kernels::StagingMemory>;

  explicit WorkerBuffers(kernels::Backend* backend)
      : backend_(backend), most_(static_cast<size_t>(backend->max_chunks_in_flight())) {}

  // One of at least so many bytes. RESOURCE_EXHAUSTED if there is no memory.
  absl::StatusOr<Buffer> Take(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      for (Buffer& buffer : free_) {
        if (SizeOf(buffer) < bytes) continue;
        std::swap(buffer, free_.back());
        Buffer taken = std::move(free_.back());
        free_.pop_back();
        return taken;
      }
    }
    return backend_->AllocateStaging(bytes);
  }
  // From now on chunks of so many bytes find their memory, as many as are in flight at a time.
  // RESOURCE_EXHAUSTED, which changes nothing.
  absl::Status Reserve(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      if (bytes <= reserved_) return absl::OkStatus();
    }
    std::vector<Buffer> buffers;
    while (buffers.size() < most_) {
      LOSSD_TRY(Buffer buffer, backend_->AllocateStaging(bytes));
      buffers.push_back(std::move(buffer));
    }
    absl::MutexLock lock(&mutex_);
    reserved_ = bytes;
    for (Buffer& buffer : buffers) Keep(std::move(buffer));
    return absl::OkStatus();
  }
  void Return(Buffer buffer) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    Keep(std::move(buffer));
  }

 private:
  static int64_t SizeOf(const Buffer& buffer) { return static_cast<int64_t>(buffer->bytes().size()); }
  // Keeps a buffer for later. If there are more than chunks in flight, the smallest one goes.
  void Keep(Buffer buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    free_.push_back(std::move(buffer));
    if (free_.size() <= most_) return;
    free_.erase(std::min_element(free_.begin(), free_.end(),
                                 [](const Buffer& a, const Buffer& b) { return SizeOf(a) < SizeOf(b); }));
  }

  kernels::Backend* const backend_;
  const size_t most_;  // chunks in flight
  absl::Mutex mutex_;
  std::vector<Buffer> free_ ABSL_GUARDED_BY(mutex_);  // at most so many
  int64_t reserved_ ABSL_GUARDED_BY(mutex_) = 0;      // so many buffers, free or in use, have these bytes
};

// Carries out the leader's requests and chunks on the worker's heads. See the head of this file for threads.
class WorkerHeads {
 public:
  using Send = std::function<void(v1::FromWorker)>;  // thread-safe

  // All outlive the object, and chunks in flight do too: they end before it.
  WorkerHeads(kernels::Backend* backend, kernels::RankLink* link, Send send);
  // Maps what the leader shares. UNAVAILABLE, saying why, if all slices have to bring their rows. Before the
  // first chunk.
  absl::Status UseRowsOf(const v1::Prepare& prepare);

  v1::Answer Execute(const v1::Request& request);
  kernels::HeadKernels* Find(uint64_t head) const;  // null: there is none
  // A chunk with all its slices. INTERNAL if it is not one.
  absl::Status Submit(const v1::ChunkStart& start, std::vector<v1::ChunkSlice> slices);

 private:
  struct Head {
    std::unique_ptr<kernels::HeadKernels> kernels;
    std::unique_ptr<kernels::Replicas> replicas;  // ends first; null of a head that is split by vocabulary
  };

  absl::Status Do(const v1::Request& request, v1::Answer& answer);
  absl::Status DoWith(Head& head, const v1::Request& request, v1::Answer& answer);
  absl::Status Plan(const v1::HeadConfig& config, v1::Answer& answer);
  absl::Status Create(uint64_t id, const v1::HeadConfig& config, v1::Answer& answer);
  absl::Status Join(kernels::HeadKernels* head, std::unique_ptr<kernels::Replicas>& replicas);
  absl::Status ReserveBuffers(const kernels::HeadKernels& head);
  absl::Status Read(Head& head, const v1::TensorAccess& access, v1::Answer& answer);
  absl::Status Write(Head& head, const v1::TensorAccess& access, bool add);

  kernels::Backend* const backend_;
  kernels::RankLink* const link_;
  const Send send_;
  const std::shared_ptr<WorkerBuffers> buffers_;
  std::unique_ptr<MappedRows> rows_;  // null: all slices bring their rows
  std::map<uint64_t, Head> heads_;
};

struct WorkerOptions {
  int rank = 1;
  std::string leader;  // "host:port", or Leader::local_address
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::string secret;
  ChannelLimits limits;
  Settings settings;                          // but those of the backend
  WorkerFilesOptions files = {};              // but the rank
  absl::Duration timeout = absl::Minutes(5);  // for the leader to take this rank
  // Called once, when joined() becomes true, on the driving thread; must not call into the worker.
  std::function<void()> on_joined = [] {};
  // What a scrape of this rank would give, which the leader shows beside its own: asked for every
  // `metrics_interval` once joined, on a thread of the worker's. At most kMostMetricsBytes (worker_stream.h).
  std::function<v1::Metrics()> metrics = nullptr;
  absl::Duration metrics_interval = absl::Seconds(2);
};

class Worker {
 public:
  static std::unique_ptr<Worker> Create(const WorkerOptions& options, kernels::CreatedBackend own);
  // Leave first, or let Run end. Closes it.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Returns when the worker's part is over:
  // OK: the leader has ended the ranks, or this one left before it had joined.
  // INVALID_ARGUMENT: the ranks do not agree. DEADLINE_EXCEEDED: the leader was not reached; and other codes,
  // where the ranks did not come together. UNAVAILABLE once joined(): the leader or this rank's device is
  // lost. Then the backend may hang, and the process had better end without taking it down.
  absl::Status Run();

  // After Run: closes the stream, which the leader may wait for, and ends the worker's threads. Whatever this
  // rank waits for of others is given up if Run has failed.
  void Close();

  // Asks the leader to end all ranks. Does not wait.
  void Leave(const std::string& reason);
  // Has the leader hear that the device is lost.
  void ReportLoss(const absl::Status& status);

  // All ranks are connected.
  bool joined() const { return joined_; }
  // How long the driving thread has been at what the leader asked for last: the creation of a head, a step, a
  // sum with other ranks, the submission of a chunk. 0 while it waits to be asked. Takes no lock.
  absl::Duration Silence() const {
    const Clock::time_point since = busy_since_;
    return since == kIdle ? absl::ZeroDuration() : absl::FromChrono(Clock::now() - since);
  }
  kernels::RankTimes times() const { return {busy_.Total(), link_->Times()}; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr Clock::time_point kIdle = Clock::time_point::max();
  struct Attempt;

  Worker(const WorkerOptions& options, kernels::CreatedBackend own);

  absl::Status Join();
  absl::Status TryToJoin(v1::ToWorker* first);
  v1::FromWorker Hello() const;
  absl::Status Serve(v1::ToWorker message);
  // ---- On the driving thread ----
  void Drive();
  absl::Status Handle(v1::ToWorker& message);
  absl::Status OnSlice(v1::ChunkSlice* slice);
  absl::Status SubmitIfComplete();
  absl::Status OnChunkFailure(const absl::Status& failure);
  void Write();
  void ReportMetrics();

  const WorkerOptions options_;
  const std::unique_ptr<kernels::Backend> backend_;
  const std::unique_ptr<kernels::RankLink> link_;
  // What the driving thread does: what the leader asks for, or a part of the work on files.
  struct Work {
    v1::ToWorker message = {};
    std::function<void()> task = nullptr;
  };

  ThreadQueue<Work> requests_;           // bounded: the leader waits for answers, and sends so many chunks
  ThreadQueue<v1::FromWorker> answers_;  // likewise
  kernels::BusyClock busy_;              // of chunks and requests
  WorkerHeads heads_;
  WorkerFiles files_;
  absl::Status failure_;                 // of Run
  std::string refusal_;                  // the last time that another process had this rank
  std::optional<v1::ChunkStart> chunk_;  // of which slices are still to come
  std::vector<v1::ChunkSlice> slices_;
  std::atomic<bool> joined_{false};
  std::atomic<Clock::time_point> busy_since_{kIdle};  // of the driving thread
  std::atomic<bool> leaving_{false};
  std::atomic<bool> metrics_wait_{false};  // to be written
  clocks::Event stopping_;
  absl::Mutex attempt_mutex_;
  std::unique_ptr<Attempt> attempt_ ABSL_GUARDED_BY(attempt_mutex_);
  std::thread driver_;
  std::thread writer_;
  std::thread reporter_;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_WORKER_H_
