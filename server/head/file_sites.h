// SPDX-License-Identifier: Apache-2.0
// Saves and loads in which other processes write and read files. A server may consist of several processes,
// each with a part of a head. Such a process writes its own files of a checkpoint, or reads the rows that it
// needs. SaveSite, LoadSite and FileSites are the interface to these processes; server/ranks implements it
// (in remote_backend.h for the leader, in worker.h for a worker). SiteWriting and SiteLoading decide which
// processes take part in a save or a load, and wait for them.
//
// The objects are thread-compatible unless a class or function says more.
#ifndef LOSSD_SERVER_HEAD_FILE_SITES_H_
#define LOSSD_SERVER_HEAD_FILE_SITES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/replica.h"
#include "server/head/disk.h"
#include "server/head/manifest.h"
#include "server/head/shard_files.h"

namespace lossd::head {

// The proof that another process sees the same folder as this process: it has read `nonce` from the file
// kNonceFile in the folder, and created the file ProofFile(rank) with the content `token`.
struct FolderProof {
  std::string nonce;
  std::string token;
};

inline constexpr char kNonceFile[] = ".nonce";
inline constexpr size_t kNonceBytes = 32;
std::string ProofFile(int rank);  // e.g. ".proof-1"

// One other process's part in one save. It ends when Await has returned; destroying the object earlier
// cancels it.
class SaveSite {
 public:
  virtual ~SaveSite() = default;
  virtual int rank() const = 0;
  virtual const kernels::RemotePart& part() const = 0;

  // Asks the process for its proof of <head>/<folder> below its own checkpoint directory.
  virtual void StartProof(const std::string& head, const std::string& folder) = 0;
  virtual absl::StatusOr<FolderProof> AwaitProof(absl::Time deadline) = 0;
  // Notes the result of the proof, for the log. Not OK: the process takes no part in the save.
  virtual void NoteProof(const absl::Status& status) = 0;

  // Lets the process write these files. `first`: the number of the first of them among the checkpoint's
  // files; `all`: the number of files of the checkpoint.
  virtual void StartWriting(const std::vector<PlannedFile>& files, size_t first, size_t all, int threads) = 0;
  // True when the process has read its tensors or ended; false at the deadline.
  virtual bool AwaitRead(absl::Time deadline) = 0;
  // Waits for the end and returns the manifest's entries of the files, as the process reports them. The
  // process then writes nothing in the folder anymore.
  virtual absl::StatusOr<std::vector<ManifestShard>> Await() = 0;

  // ---- Thread-safe ----
  virtual SaveProgress progress() = 0;
  virtual bool failed() const = 0;  // the process has ended with an error
  virtual void Cancel() = 0;
};

// One other process's part in one load. It ends when Await has returned; destroying the object earlier
// cancels it.
class LoadSite {
 public:
  virtual ~LoadSite() = default;
  virtual int rank() const = 0;
  virtual const kernels::RemotePart& part() const = 0;

  // Lets the process open a checkpoint. `content_digest`: the ContentDigest that it must have. AwaitOpened is
  // not OK if the process sees another checkpoint, or none.
  virtual void StartOpening(const std::string& checkpoint, const std::string& content_digest) = 0;
  virtual absl::Status AwaitOpened(absl::Time deadline) = 0;
  virtual void NoteOpened(const absl::Status& status) = 0;

  // Lets the process read its rows and write them to its part of the head.
  virtual void StartLoading() = 0;
  virtual absl::Status Await() = 0;
  virtual void Cancel() = 0;  // thread-safe
};

// Creates the sites of a save or a load, one for each process that has one of the parts. Thread-safe.
class FileSites {
 public:
  virtual ~FileSites() = default;
  virtual std::vector<std::unique_ptr<SaveSite>> ForSave(absl::Span<const kernels::RemotePart> parts) = 0;
  virtual std::vector<std::unique_ptr<LoadSite>> ForLoad(absl::Span<const kernels::RemotePart> parts) = 0;
};

// The classes for which a part has all values that a checkpoint holds. May be empty.
ClassRange ClassesOf(const kernels::HeadConfig& config, const kernels::RemotePart& part);

// The rows out of `part` that a replica of a head stores; `rows` is 0 if it stores none. `config`: the
// head's, with the split by which the head is divided.
TensorPart RowsOfReplica(const kernels::HeadConfig& config, const TensorPart& part, kernels::Replica replica);

// How long a process may take to prove that it sees the folder or the checkpoint.
inline constexpr absl::Duration kProofTimeout = absl::Seconds(10);

// The other processes in one load. It finds out which of them see the checkpoint; each of these reads the
// rows for its own part of the head.
class SiteLoading {
 public:
  // `config`: the head's.
  SiteLoading(const kernels::HeadConfig& config, std::vector<std::unique_ptr<LoadSite>> sites);

  // Drops the processes that do not see the checkpoint with this content.
  void Open(const std::string& checkpoint, const std::string& content_digest);
  // The ranks of the processes that take part.
  std::vector<int> ranks() const;
  // Whether this process has to bring any of these rows to the head, because no other process reads them.
  bool Wants(const TensorPart& part) const;

  // Lets the processes load. Called after the head has begun the load (Engine::BeginLoad) and skips writes to
  // these processes (HeadKernels::SkipWritesTo).
  void Start();
  // Waits until all processes have ended. If `status` is an error, cancels them first. Returns the first
  // error.
  absl::Status Await(absl::Status status);

 private:
  kernels::HeadConfig config_;
  std::vector<std::unique_ptr<LoadSite>> sites_;
  std::vector<kernels::Replica> own_;  // the parts of the head that this process brings rows to
  bool started_ = false;
};

// The other processes in one save. It decides which of them take part and which files each process writes,
// and waits for them.
//
// Thread-compatible, except failed(), progress() and Cancel(), which are thread-safe once Divide has
// returned.
class SiteWriting {
 public:
  // `config` and `disk` outlive it.
  SiteWriting(const kernels::HeadConfig& config, Disk* disk, std::vector<std::unique_ptr<SaveSite>> sites)
      : config_(config), disk_(disk), sites_(std::move(sites)) {}

  // Drops the processes that do not prove that they see `folder`, a temporary folder of the head.
  absl::Status Prove(const std::string& head, const TemporaryFolder& folder);
  // Plans all files of the checkpoint, in order. Each has classes of one process only. Without other
  // processes the files are those of DivideClasses.
  std::vector<PlannedFile> Divide(const ShardRules& rules);
  // The files that this process writes, as indexes into the files of Divide.
  const std::vector<size_t>& own() const { return own_; }
  // How many threads each process may use for its files.
  int threads() const { return threads_; }

  // Lets the processes write.
  void Start();
  // Waits until all processes have read their tensors or ended, or `stopped` returns true.
  void AwaitRead(const std::function<bool()>& stopped) const;
  // Waits until all processes have ended; after an error cancels the others. Stores the manifest's entries
  // that they report in `lines`, by the index of the file.
  absl::Status Await(std::vector<ManifestShard>& lines);

  bool failed() const;
  // The sum over all other processes, without total_bytes.
  SaveProgress progress() const;
  void Cancel() const;

 private:
  // The files [first, first + files), which one process writes; `site` null: this process.
  struct Group {
    SaveSite* site = nullptr;
    ClassRange classes;
    size_t first = 0;
    size_t files = 0;
  };

  absl::Status CheckProof(SaveSite& site, const TemporaryFolder& folder, const std::string& nonce);
  std::vector<Group> Groups() const;

  const kernels::HeadConfig& config_;
  Disk* const disk_;
  std::vector<std::unique_ptr<SaveSite>> sites_;
  std::vector<Group> groups_;
  std::vector<PlannedFile> files_;
  std::vector<size_t> own_;
  int threads_ = 1;
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_FILE_SITES_H_
