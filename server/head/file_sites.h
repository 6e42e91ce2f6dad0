// SPDX-License-Identifier: Apache-2.0
// Other processes of the server that have parts of a head, and write their files of a checkpoint, or read
// what they need of one, by themselves.
//
// The objects are thread-compatible unless a function says more.
#ifndef LOSSD_SERVER_HEAD_FILE_SITES_H_
#define LOSSD_SERVER_HEAD_FILE_SITES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/remote_parts.h"
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

// One load of one process, likewise.
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

// Thread-safe.
class FileSites {
 public:
  virtual ~FileSites() = default;
  virtual std::vector<std::unique_ptr<SaveSite>> ForSave(absl::Span<const kernels::RemotePart> parts) = 0;
  virtual std::vector<std::unique_ptr<LoadSite>> ForLoad(absl::Span<const kernels::RemotePart> parts) = 0;
};

// The classes of which a part has all that a checkpoint holds of them. May be none.
ClassRange ClassesOf(const kernels::HeadConfig& config, const kernels::RemotePart& part);

// Of some rows of a tensor, those that a replica of a head keeps; `rows` is 0 if there are none. `config`: as
// the head is divided.
TensorPart RowsOfReplica(const kernels::HeadConfig& config, const TensorPart& part, kernels::Replica replica);

// How long a process may take to show what it sees.
inline constexpr absl::Duration kProofTimeout = absl::Seconds(10);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_FILE_SITES_H_
