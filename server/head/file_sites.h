// SPDX-License-Identifier: Apache-2.0
// The part of other processes in saves and loads. A server may consist of several processes; each has a part
// of a head, and writes its files of a checkpoint, or reads what it needs of one, by itself. SaveSite,
// LoadSite and FileSites are the interface to such processes; server/ranks implements it (in
// remote_backend.h for the leader, in worker.h for a worker). SiteWriting and SiteLoading decide who takes
// part in a save and in a load, and wait for it.
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

// A folder of a process shows that it is this one's: that process has read `nonce` from the file
// kNonceFile in it, and made a file ProofFile(rank) with `token`.
struct FolderProof {
  std::string nonce;
  std::string token;
};

inline constexpr char kNonceFile[] = ".nonce";
inline constexpr size_t kNonceBytes = 32;
std::string ProofFile(int rank);  // ".proof-1"

// One save of one process. It ends when Await has returned; an object that is destroyed before cancels it.
class SaveSite {
 public:
  virtual ~SaveSite() = default;
  virtual int rank() const = 0;
  virtual const kernels::RemotePart& part() const = 0;

  // Asks for the proof of <head>/<folder> below that process's checkpoint directory.
  virtual void StartProof(const std::string& head, const std::string& folder) = 0;
  virtual absl::StatusOr<FolderProof> AwaitProof(absl::Time deadline) = 0;
  // What became of the proof; not OK: the process takes no part. For the log.
  virtual void NoteProof(const absl::Status& status) = 0;

  // Has it write these files, out of `all` that the checkpoint has, of which `first` is the first's number.
  virtual void StartWriting(const std::vector<PlannedFile>& files, size_t first, size_t all, int threads) = 0;
  // True once its tensors have been read, or it has ended.
  virtual bool AwaitRead(absl::Time deadline) = 0;
  // Waits for its end: the lines of its files, as it says. The process has nothing in the folder that it
  // still writes to.
  virtual absl::StatusOr<std::vector<ManifestShard>> Await() = 0;

  // ---- Thread-safe ----
  virtual SaveProgress progress() = 0;
  virtual bool failed() const = 0;  // it has ended with an error
  virtual void Cancel() = 0;
};

// One load of one process. It ends when Await has returned; an object that is destroyed before cancels it.
class LoadSite {
 public:
  virtual ~LoadSite() = default;
  virtual int rank() const = 0;
  virtual const kernels::RemotePart& part() const = 0;

  // Has it open a checkpoint, whose manifest ends with `checksum`. Not OK: it sees another one, or none.
  virtual void StartOpening(const std::string& checkpoint, const std::string& checksum) = 0;
  virtual absl::Status AwaitOpened(absl::Time deadline) = 0;
  virtual void NoteOpened(const absl::Status& status) = 0;

  // Has it read its rows and write them to its part of the head.
  virtual void StartLoading() = 0;
  virtual absl::Status Await() = 0;
  virtual void Cancel() = 0;  // thread-safe
};

// Makes the sites of a save or a load, one for each process that has one of the parts. Thread-safe.
class FileSites {
 public:
  virtual ~FileSites() = default;
  virtual std::vector<std::unique_ptr<SaveSite>> ForSave(absl::Span<const kernels::RemotePart> parts) = 0;
  virtual std::vector<std::unique_ptr<LoadSite>> ForLoad(absl::Span<const kernels::RemotePart> parts) = 0;
};

// The classes of which a part has all that a checkpoint holds of them. May be none.
ClassRange ClassesOf(const kernels::HeadConfig& config, const kernels::RemotePart& part);

// Which of some rows of a tensor a replica of a head keeps; `rows` is 0 if it keeps none. `config`: as
// the head is divided.
TensorPart RowsOfReplica(const kernels::HeadConfig& config, const TensorPart& part, kernels::Replica replica);

// How long a process may take to show what it sees.
inline constexpr absl::Duration kProofTimeout = absl::Seconds(10);

// The part that other processes take in a load: which of them reads what its part of the head needs by
// itself.
class SiteLoading {
 public:
  // `config`: the head's.
  SiteLoading(const kernels::HeadConfig& config, std::vector<std::unique_ptr<LoadSite>> sites);

  // Lets go of the processes that do not see the checkpoint with this content.
  void Open(const std::string& checkpoint, const std::string& content_digest);
  // The ranks of the processes that take part.
  std::vector<int> ranks() const;
  // Whether this process has to bring any of these rows to the head.
  bool Wants(const TensorPart& part) const;

  // Has the processes load. The head waits for that only.
  void Start();
  // Waits until all have ended; `status`, if that is an error: and they have no reason to go on. Returns the
  // first error.
  absl::Status Await(absl::Status status);

 private:
  kernels::HeadConfig config_;
  std::vector<std::unique_ptr<LoadSite>> sites_;
  std::vector<kernels::Replica> own_;  // the parts of the head that this process brings rows to
  bool started_ = false;
};

// The part that other processes take in a save: which of them takes part, which files each writes, and
// whether the files lie there as those processes say.
//
// Thread-compatible, but for failed(), progress() and Cancel(), which are thread-safe once Divide has
// returned.
class SiteWriting {
 public:
  // `config` and `disk` outlive it.
  SiteWriting(const kernels::HeadConfig& config, Disk* disk, std::vector<std::unique_ptr<SaveSite>> sites)
      : config_(config), disk_(disk), sites_(std::move(sites)) {}

  // Lets go of the processes that do not prove that they see `folder` of the head.
  absl::Status Prove(const std::string& head, const TemporaryFolder& folder);
  // All files of the checkpoint, in order. Each is of classes of one process; without others, those of
  // DivideClasses.
  std::vector<PlannedFile> Divide(const ShardRules& rules);
  // The files that this process writes, by their places among all.
  const std::vector<size_t>& own() const { return own_; }
  // How many threads a process has for its files.
  int threads() const { return threads_; }

  // Has the processes write.
  void Start();
  // Waits until all have read their tensors, or one has failed, or `stopped` is true.
  void AwaitRead(const std::function<bool()>& stopped) const;
  // Waits until all have ended, after an error soon. Puts what they say of their files into `lines`, by
  // places among all files.
  absl::Status Await(std::vector<ManifestShard>& lines);

  bool failed() const;
  // The sum over all other processes, without total_bytes.
  SaveProgress progress() const;
  void Cancel() const;

 private:
  // The files [first, first + files) are those of one process; null: of this one.
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
