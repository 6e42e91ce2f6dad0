// SPDX-License-Identifier: Apache-2.0
// Worker is a rank that is not the leader. It connects to the leader, and carries out the leader's requests
// and chunks until the worker or the leader ends. WorkerHeads has the worker's heads and computes on them;
// WorkerFiles handles the requests that concern files of checkpoints.
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

// Saving and loading of checkpoints by a worker. In a save, the worker writes the files with its classes; in
// a load, it reads the rows that its part of a head needs. Both happen below its own checkpoint directory.
// WorkerFiles takes the leader's requests, and a FileJob carries out one request. RankFiles
// (remote_backend.h) is the leader's end.
//
// The leader sends names of folders and heads, and the worker checks them. The worker creates files only in a
// temporary folder, and makes the names of the files itself.
//
// Threads. Each request has a thread of its own, which works on the files. For this thread, the worker's
// driving thread reads and writes the tensors, a few MiB at a time, between chunks. Both classes are
// thread-safe.

struct WorkerFilesOptions {
  int rank = 1;
  std::string directory;                    // the checkpoint directory; empty: there is none
  int64_t slice_bytes = int64_t{8} << 20;   // bytes that the driving thread copies at once
  int64_t buffer_bytes = int64_t{1} << 30;  // the most buffer memory of one request
  int64_t reserve_bytes = 0;                // host memory that buffers leave free for other programs
  int threads = 4;                          // threads that read in a load
  head::Disk* disk = head::Disk::Real();
};

class FileJob;

// Takes the leader's requests that concern files, and has a FileJob for each request under way. Thread-safe.
class WorkerFiles {
 public:
  struct Parts {
    // Queues a function for the driving thread, which runs such functions in order. If the driving thread
    // ends first, the function never runs.
    std::function<void(std::function<void()>)> on_driver;
    // Returns a head of the worker; null: there is no such head. Call it only on the driving thread.
    std::function<kernels::HeadKernels*(uint64_t head)> find;
    std::function<void(v1::FromWorker)> send;  // thread-safe
  };

  // The most requests under way at a time.
  static constexpr size_t kMostJobs = 16;

  WorkerFiles(const WorkerFilesOptions& options, Parts parts);
  ~WorkerFiles();

  // Whether WorkerFiles handles `request`, because the request concerns files.
  static bool IsFor(const v1::Request& request);
  // Begins, continues or cancels the work of a request. Call it on the driving thread; it does not block. It
  // answers at once, but a save or a load that has begun answers when it ends.
  void Handle(const v1::Request& request) ABSL_LOCKS_EXCLUDED(mutex_);
  // Call when the driving thread has ended. Ends all work.
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
// Thread-safe. The destructor cancels the work and waits for the thread.
class FileJob {
 public:
  // Begins the work. `options` and `parts` outlive the object.
  FileJob(const WorkerFilesOptions& options, const WorkerFiles::Parts& parts, const v1::Request& request);
  ~FileJob();

  // Lets the job's thread, which waits in AwaitGoOn, continue. INTERNAL if it does not wait there.
  absl::Status GoOn(const v1::GoOn& go_on) ABSL_LOCKS_EXCLUDED(mutex_);
  void Cancel() ABSL_LOCKS_EXCLUDED(mutex_);
  // Call when the driving thread has ended: cancels the work, and ends waits for the driving thread.
  void EndDriver() ABSL_LOCKS_EXCLUDED(mutex_);
  bool ended() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run();
  absl::Status Save(v1::Answer& answer);
  absl::Status Load();

  // ---- Saving ----
  // Reads the nonce file that the leader has written to the folder, and writes a proof file with a token of
  // its own. Puts nonce and token into `progress_`. From them the leader learns that both processes see the
  // same folder.
  absl::Status Prove(const head::FolderBelow& folder);
  absl::StatusOr<std::vector<head::PlannedFile>> FilesOf(const v1::GoOn& go_on,
                                                         const kernels::HeadConfig& config) const;
  absl::StatusOr<std::vector<head::ManifestShard>> Write(const head::FolderBelow& folder,
                                                         const kernels::HeadConfig& config,
                                                         const std::vector<head::PlannedFile>& files,
                                                         int threads);
  // ---- Loading ----
  absl::Status WriteRows(kernels::TensorId id, int64_t row_begin, int64_t rows, absl::Span<const uint8_t> in);

  // Tells the leader that the job is ready, and waits for GoOn. CANCELLED if the job is cancelled.
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
  v1::FilesProgress progress_;  // used only by the job's thread

  mutable absl::Mutex mutex_;
  bool waits_ ABSL_GUARDED_BY(mutex_) = false;  // the job waits for GoOn
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool driver_ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<v1::GoOn> go_on_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // declared last: it uses the other members
};

// The heads of a worker. WorkerHeads carries out the leader's requests and chunks on them. WorkerBuffers has
// memory for the rows of chunks that come in messages.
//
// WorkerHeads is called by one thread, the backend's driving thread. It may call Send on the backend's own
// threads.

// Staging memory for the chunks of a worker: one buffer for each chunk in flight, which later chunks use
// again.
//
// Thread-safe.
class WorkerBuffers {
 public:
  using Buffer = std::unique_ptr<kernels::StagingMemory>;

  explicit WorkerBuffers(kernels::Backend* backend)
      : backend_(backend), most_(static_cast<size_t>(backend->max_chunks_in_flight())) {}

  // Returns a buffer of at least `bytes` bytes. RESOURCE_EXHAUSTED if there is no memory.
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
  // Allocates a buffer of `bytes` bytes for each chunk that can be in flight. Then Take never fails for up to
  // `bytes` bytes. RESOURCE_EXHAUSTED if there is no memory; then nothing changes.
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
  // Keeps a buffer for later chunks. Frees the smallest free buffer if there are more than `most_`.
  void Keep(Buffer buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    free_.push_back(std::move(buffer));
    if (free_.size() <= most_) return;
    free_.erase(std::min_element(free_.begin(), free_.end(),
                                 [](const Buffer& a, const Buffer& b) { return SizeOf(a) < SizeOf(b); }));
  }

  kernels::Backend* const backend_;
  const size_t most_;  // the most chunks in flight
  absl::Mutex mutex_;
  std::vector<Buffer> free_ ABSL_GUARDED_BY(mutex_);  // at most most_ buffers
  // At least most_ buffers, free or in use, have this many bytes.
  int64_t reserved_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Carries out the leader's requests and chunks on the worker's heads. The comment above WorkerBuffers
// describes its threads.
class WorkerHeads {
 public:
  using Send = std::function<void(v1::FromWorker)>;  // thread-safe

  // The arguments outlive the object. All chunks in flight must end before it is destroyed.
  WorkerHeads(kernels::Backend* backend, kernels::RankLink* link, Send send);
  // Maps the memory that the leader shares. UNAVAILABLE, saying why, if the worker cannot map it, so that all
  // slices must bring their rows in messages. Call before the first chunk.
  absl::Status UseRowsOf(const v1::Prepare& prepare);

  v1::Answer Execute(const v1::Request& request);
  kernels::HeadKernels* Find(uint64_t head) const;  // null: no such head
  // Submits a chunk with all its slices to the backend. INTERNAL if the messages are not a valid chunk.
  absl::Status Submit(const v1::ChunkStart& start, std::vector<v1::ChunkSlice> slices);

 private:
  struct Head {
    std::unique_ptr<kernels::HeadKernels> kernels;
    // Destroyed before `kernels`. Null for a head that is split by vocabulary.
    std::unique_ptr<kernels::Replicas> replicas;
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
  std::unique_ptr<MappedRows> rows_;  // null: all slices bring their rows in messages
  std::map<uint64_t, Head> heads_;
};

struct WorkerOptions {
  int rank = 1;
  std::string leader;  // "host:port", or Leader::local_address
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::string secret;
  ChannelLimits limits;
  Settings settings;                          // without the settings of the backend
  WorkerFilesOptions files = {};              // `rank` is not used here
  absl::Duration timeout = absl::Minutes(5);  // how long the leader may take to admit the worker
  // Called once on the driving thread, when joined() becomes true. It must not call into the worker.
  std::function<void()> on_joined = [] {};
  // Returns the metrics of this rank, as a scrape would. The leader shows them beside its own. Once the
  // worker has joined, a thread of it calls this every `metrics_interval`. The result has at most
  // kMostMetricsBytes (worker_stream.h).
  std::function<v1::Metrics()> metrics = nullptr;
  absl::Duration metrics_interval = absl::Seconds(2);
};

class Worker {
 public:
  static std::unique_ptr<Worker> Create(const WorkerOptions& options, kernels::CreatedBackend own);
  // Closes the worker. Run must have returned before; Leave makes it return.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Connects, serves the leader, and returns when the connection is over:
  // - OK: the leader has ended the ranks, or this rank left before it had joined.
  // - INVALID_ARGUMENT: the leader has refused this rank, because settings or secret differ.
  // - DEADLINE_EXCEEDED: the leader was not reached, or did not admit this rank in time.
  // - UNAVAILABLE: the connection has ended, because the leader, another rank or this rank's device is lost.
  //   If joined() is true, the backend may then hang: end the process without destroying the backend.
  // - Other codes, which the leader sends if the ranks could not be connected.
  absl::Status Run();

  // Call after Run. Closes the stream (the leader may wait for this), and ends the worker's threads. If Run
  // has failed, exchanges that wait for other ranks are aborted.
  void Close();

  // Asks the leader to end all ranks, or stops trying to join. Does not wait.
  void Leave(const std::string& reason);
  // Tells the leader that this rank's device is lost.
  void ReportLoss(const absl::Status& status);

  // Whether all ranks are connected.
  bool joined() const { return joined_; }
  // How long the driving thread has been busy with its current task: the creation of a head, a step, a sum
  // with other ranks, the submission of a chunk. 0 while it has no task. Takes no lock.
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
  // A task of the driving thread: a message of the leader, or a part of the work on files.
  struct Work {
    v1::ToWorker message = {};
    std::function<void()> task = nullptr;
  };

  // Bounded, because the leader waits for answers and limits the chunks in flight.
  ThreadQueue<Work> requests_;
  ThreadQueue<v1::FromWorker> answers_;  // bounded for the same reason
  kernels::BusyClock busy_;              // the time with chunks or requests under way
  WorkerHeads heads_;
  WorkerFiles files_;
  absl::Status failure_;                 // the error of Run
  std::string refusal_;                  // the last refusal because another process had this rank
  std::optional<v1::ChunkStart> chunk_;  // the chunk of which some slices have not arrived yet
  std::vector<v1::ChunkSlice> slices_;
  std::atomic<bool> joined_{false};
  std::atomic<Clock::time_point> busy_since_{kIdle};  // when the driving thread began its task
  std::atomic<bool> leaving_{false};
  std::atomic<bool> metrics_wait_{false};  // metrics wait to be written
  clocks::Event stopping_;
  absl::Mutex attempt_mutex_;
  std::unique_ptr<Attempt> attempt_ ABSL_GUARDED_BY(attempt_mutex_);
  std::thread driver_;
  std::thread writer_;
  std::thread reporter_;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_WORKER_H_
