// SPDX-License-Identifier: Apache-2.0
// SiteLoading and SiteWriting: the other processes in a load or a save (file_sites.h).
#include "server/head/file_sites.h"

#include <algorithm>
#include <filesystem>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"
#include "kernels/validation.h"

namespace lossd::head {

std::string ProofFile(int rank) { return absl::StrCat(".proof-", rank); }

ClassRange ClassesOf(const kernels::HeadConfig& config, const kernels::RemotePart& part) {
  kernels::HeadConfig split = config;
  split.split = part.split;
  const kernels::ShardRows rows = kernels::ShardRowsOf(split, kernels::Param::kWeight, part.replica);
  return {rows.first, rows.end()};
}

TensorPart RowsOfReplica(const kernels::HeadConfig& config, const TensorPart& part,
                         kernels::Replica replica) {
  const kernels::ShardRows kept = kernels::StoredRowsOf(config, part.id, replica);
  const int64_t begin = std::max(part.row_begin, kept.first);
  const int64_t end = std::min(part.row_begin + part.rows, kept.end());
  return {part.id, begin, std::max<int64_t>(end - begin, 0)};
}

// ---- SiteLoading ----

SiteLoading::SiteLoading(const kernels::HeadConfig& config, std::vector<std::unique_ptr<LoadSite>> sites)
    : config_(config), sites_(std::move(sites)) {
  if (!sites_.empty()) config_.split = sites_.front()->part().split;
}

void SiteLoading::Open(const std::string& checkpoint, const std::string& content_digest) {
  for (const auto& site : sites_) site->StartOpening(checkpoint, content_digest);
  const absl::Time deadline = clocks::SteadyNow() + kProofTimeout;
  const int count = sites_.empty() ? 1 : sites_.front()->part().replica.count;
  for (int index = 0; index < count; ++index) own_.push_back({index, count});
  std::vector<std::unique_ptr<LoadSite>> seeing;
  for (std::unique_ptr<LoadSite>& site : sites_) {
    const absl::Status opened = site->AwaitOpened(deadline);
    site->NoteOpened(opened);
    if (!opened.ok()) continue;
    const int index = site->part().replica.index;
    own_.erase(std::remove_if(own_.begin(), own_.end(),
                              [index](const kernels::Replica& own) { return own.index == index; }),
               own_.end());
    seeing.push_back(std::move(site));
  }
  sites_ = std::move(seeing);
}

std::vector<int> SiteLoading::ranks() const {
  std::vector<int> ranks;
  for (const auto& site : sites_) ranks.push_back(site->rank());
  return ranks;
}

bool SiteLoading::Wants(const TensorPart& part) const {
  return std::any_of(own_.begin(), own_.end(),
                     [&](const kernels::Replica& own) { return RowsOfReplica(config_, part, own).rows > 0; });
}

void SiteLoading::Start() {
  started_ = true;
  for (const auto& site : sites_) site->StartLoading();
}

absl::Status SiteLoading::Await(absl::Status status) {
  for (const auto& site : sites_) {
    if (!status.ok() || !started_) site->Cancel();
    const absl::Status ended = site->Await();
    if (started_) status.Update(ended);
  }
  return status;
}

// ---- SiteWriting ----

namespace {

constexpr absl::Duration kLook = absl::Milliseconds(100);

std::string RandomNonce() {
  std::random_device random;
  std::string nonce;
  for (int i = 0; i < 4; ++i) absl::StrAppend(&nonce, absl::Hex(random(), absl::kZeroPad8));
  return nonce;
}

absl::Status RemoveIfThere(Disk* disk, const std::string& path) {
  absl::Status status = disk->RemoveFile(path);
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

}  // namespace

// ---- SiteWriting: which processes take part ----

absl::Status SiteWriting::Prove(const std::string& head, const TemporaryFolder& folder) {
  const std::string nonce = RandomNonce();
  const std::string nonce_path = folder.File(kNonceFile);
  LOSSD_RETURN_IF_ERROR(WriteSmallFile(disk_, nonce_path, nonce));
  const std::string name = std::filesystem::path(folder.path()).filename();
  for (const auto& site : sites_) site->StartProof(head, name);
  std::vector<std::unique_ptr<SaveSite>> seeing;
  absl::Status removed;
  for (std::unique_ptr<SaveSite>& site : sites_) {
    const absl::Status status = CheckProof(*site, folder, nonce);
    site->NoteProof(status);
    removed.Update(RemoveIfThere(disk_, folder.File(ProofFile(site->rank()))));
    if (status.ok()) seeing.push_back(std::move(site));
  }
  sites_ = std::move(seeing);
  removed.Update(disk_->RemoveFile(nonce_path));
  return removed;
}

absl::Status SiteWriting::CheckProof(SaveSite& site, const TemporaryFolder& folder,
                                     const std::string& nonce) {
  LOSSD_TRY(const FolderProof proof, site.AwaitProof(clocks::SteadyNow() + kProofTimeout));
  if (proof.nonce != nonce) return absl::FailedPreconditionError("it reads another file of that name");
  const absl::StatusOr<std::string> token =
      ReadSmallFile(folder.path(), ProofFile(site.rank()), proof.token.size());
  if (!token.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("what it writes cannot be read here: ", token.status().message()));
  }
  if (*token == proof.token) return absl::OkStatus();
  return absl::FailedPreconditionError("what it writes does not come here");
}

// ---- SiteWriting: which files ----

// Groups in order of their classes. Classes that no other process takes belong to this process; each run of
// them is one group.
std::vector<SiteWriting::Group> SiteWriting::Groups() const {
  std::vector<Group> groups;
  for (const auto& site : sites_) {
    const ClassRange classes = ClassesOf(config_, site->part());
    if (classes.size() > 0) groups.push_back({.site = site.get(), .classes = classes});
  }
  std::sort(groups.begin(), groups.end(),
            [](const Group& a, const Group& b) { return a.classes.begin < b.classes.begin; });
  std::vector<Group> all;
  int64_t next = 0;
  for (const Group& group : groups) {
    if (next < group.classes.begin) all.push_back({.classes = {next, group.classes.begin}});
    all.push_back(group);
    next = group.classes.end;
  }
  if (next < config_.vocab_size) all.push_back({.classes = {next, config_.vocab_size}});
  return all;
}

std::vector<PlannedFile> SiteWriting::Divide(const ShardRules& rules) {
  groups_ = Groups();
  const int count = static_cast<int>(groups_.size());
  threads_ = (std::max(rules.threads, 1) + count - 1) / count;
  const size_t most_files = std::max<size_t>(1, kMostShards / groups_.size());
  std::vector<ClassRange> ranges;
  for (Group& group : groups_) {
    group.first = ranges.size();
    for (const ClassRange& classes : DivideClasses(
             config_, group.classes, {.most_bytes = rules.most_bytes, .threads = threads_}, most_files)) {
      ranges.push_back(classes);
    }
    group.files = ranges.size() - group.first;
    for (size_t file = group.first; group.site == nullptr && file < ranges.size(); ++file)
      own_.push_back(file);
  }
  for (size_t i = 0; i < ranges.size(); ++i) files_.push_back({ShardFile(i, ranges.size()), ranges[i]});
  return files_;
}

// ---- SiteWriting: writing ----

void SiteWriting::Start() {
  for (const Group& group : groups_) {
    if (group.site == nullptr) continue;
    const auto begin = files_.begin() + static_cast<std::ptrdiff_t>(group.first);
    group.site->StartWriting({begin, begin + static_cast<std::ptrdiff_t>(group.files)}, group.first,
                             files_.size(), threads_);
  }
}

void SiteWriting::AwaitRead(const std::function<bool()>& stopped) const {
  for (const auto& site : sites_) {
    while (!site->AwaitRead(clocks::SteadyNow() + kLook) && !stopped()) {
    }
  }
}

absl::Status SiteWriting::Await(std::vector<ManifestShard>& lines) {
  absl::Status status;
  for (const Group& group : groups_) {
    if (group.site == nullptr) continue;
    absl::StatusOr<std::vector<ManifestShard>> written = group.site->Await();
    if (written.ok() && written->size() != group.files) {
      written = absl::InternalError(absl::StrCat("rank ", group.site->rank(), " tells of ", written->size(),
                                                 " files, and not of ", group.files));
    }
    if (!written.ok()) {
      if (status.ok() || absl::IsCancelled(status)) status = written.status();
      Cancel();  // the other processes have no reason to continue
      continue;
    }
    for (size_t i = 0; i < group.files; ++i) {
      ManifestShard& line = lines[group.first + i] = std::move((*written)[i]);
      // This process decides names and classes of files, so it does not take them from the other process.
      line.file = files_[group.first + i].name;
      line.classes = files_[group.first + i].classes;
    }
  }
  return status;
}

bool SiteWriting::failed() const {
  return std::any_of(sites_.begin(), sites_.end(), [](const auto& site) { return site->failed(); });
}

SaveProgress SiteWriting::progress() const {
  SaveProgress sum;
  for (const auto& site : sites_) {
    const SaveProgress one = site->progress();
    sum.read_bytes += one.read_bytes;
    sum.written_bytes += one.written_bytes;
  }
  return sum;
}

void SiteWriting::Cancel() const {
  for (const auto& site : sites_) site->Cancel();
}

}  // namespace lossd::head
