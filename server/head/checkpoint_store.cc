// SPDX-License-Identifier: Apache-2.0
#include "server/head/checkpoint_store.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/head/checkpoint_layout.h"
#include "server/head/paths.h"
#include "server/head/save_numbers.h"
#include "server/head/temporary_folder.h"

namespace lossd::head {
namespace {

namespace fs = std::filesystem;

// The names of folders in `path` that could be those of heads or checkpoints. Links are left out.
absl::StatusOr<std::vector<std::string>> NamedFolders(const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code gone;  // meanwhile: no folder
    const std::string name = entry->path().filename();
    if (fs::is_directory(entry->symlink_status(gone)) && ValidateName("", name).ok()) names.push_back(name);
  }
  if (error == std::errc::no_such_file_or_directory) return names;
  if (error) return formats::FileError(path, "list", error.value());
  return names;
}

// Whether a folder of a head's folder is a checkpoint.
bool HasManifest(const std::string& head_folder, const std::string& name) {
  std::error_code error;
  return fs::exists(fs::symlink_status(absl::StrCat(head_folder, "/", name, "/", kManifestFile), error));
}

absl::Status AppendHead(const std::string& directory, const std::string& head,
                        std::vector<CheckpointInfo>* list) {
  const std::string head_folder = absl::StrCat(directory, "/", head);
  const absl::StatusOr<std::vector<std::string>> names = NamedFolders(head_folder);
  if (!names.ok()) return names.status();
  std::vector<CheckpointInfo> of_head;
  for (const std::string& name : *names) {
    if (HasManifest(head_folder, name)) of_head.push_back(InfoOf(directory, absl::StrCat(head, "/", name)));
  }
  SortNewestFirst(&of_head);
  std::move(of_head.begin(), of_head.end(), std::back_inserter(*list));
  return absl::OkStatus();
}

// Sorts as SortNewestFirst does and leaves the `most` newest; of damaged ones, which are last, as many as fit
// into half of the places or beside those that can be read. Returns how many it took out.
size_t ShortenTo(size_t most, std::vector<CheckpointInfo>* infos) {
  SortNewestFirst(infos);
  if (infos->size() <= most) return 0;
  const size_t left_out = infos->size() - most;
  const auto damaged =
      std::find_if(infos->begin(), infos->end(), [](const auto& i) { return !i.status.ok(); });
  const auto readable = static_cast<size_t>(damaged - infos->begin());
  const size_t for_damaged = std::max(most / 2, most - std::min(most, readable));
  const size_t damaged_shown = std::min(infos->size() - readable, for_damaged);
  infos->erase(damaged + static_cast<std::ptrdiff_t>(damaged_shown), infos->end());
  infos->erase(infos->begin() + static_cast<std::ptrdiff_t>(most - damaged_shown),
               infos->begin() + static_cast<std::ptrdiff_t>(readable));
  return left_out;
}

}  // namespace

absl::Status PrepareCheckpointDirectory(const std::string& directory, Disk* disk) {
  std::error_code error;
  fs::create_directories(directory, error);
  if (error) return formats::FileError(directory, "create folder", error.value());
  const absl::StatusOr<std::vector<std::string>> heads = NamedFolders(directory);
  if (!heads.ok()) return heads.status();
  for (const std::string& head : *heads) RemoveLeftovers(disk, absl::StrCat(directory, "/", head));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<CheckpointInfo>> ListCheckpoints(const std::string& directory,
                                                            absl::string_view head) {
  std::vector<std::string> heads = {std::string(head)};
  if (head.empty()) {
    absl::StatusOr<std::vector<std::string>> all = NamedFolders(directory);
    if (!all.ok()) return all.status();
    heads = *std::move(all);
    std::sort(heads.begin(), heads.end());
  } else if (absl::Status status = ValidateName("head", head); !status.ok()) {
    return status;
  }
  std::vector<CheckpointInfo> list;
  for (const std::string& name : heads) {
    if (absl::Status status = AppendHead(directory, name, &list); !status.ok()) return status;
  }
  return list;
}

absl::StatusOr<NewestCheckpoints> ListNewest(const std::string& directory, absl::string_view head,
                                             size_t most, size_t most_folders) {
  if (absl::Status status = ValidateName("head", head); !status.ok()) return status;
  const std::string head_folder = absl::StrCat(directory, "/", head);
  NewestCheckpoints newest;
  size_t looked_at = 0;
  std::error_code error;
  for (fs::directory_iterator entry(head_folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (++looked_at > most_folders) {
      newest.and_more = true;
      break;
    }
    std::error_code gone;
    const std::string name = entry->path().filename();
    if (!fs::is_directory(entry->symlink_status(gone)) || !ValidateName("", name).ok()) continue;
    if (!HasManifest(head_folder, name)) continue;
    newest.checkpoints.push_back(InfoOf(directory, absl::StrCat(head, "/", name)));
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    return formats::FileError(head, "list", error.value());
  }
  newest.left_out = ShortenTo(most, &newest.checkpoints);
  return newest;
}

absl::StatusOr<std::vector<std::string>> PruneCheckpoints(const std::string& directory,
                                                          absl::string_view saved, int64_t keep, Disk* disk) {
  const std::string head(saved.substr(0, saved.find('/')));
  const absl::StatusOr<std::vector<CheckpointInfo>> list = ListCheckpoints(directory, head);
  if (!list.ok()) return list.status();
  const std::string head_folder = absl::StrCat(directory, "/", head);
  std::vector<std::string> removed;
  int64_t kept = 1;  // `saved`
  for (const CheckpointInfo& info : *list) {
    if (!info.automatic || info.name == saved || ++kept <= keep) continue;
    const absl::string_view name = absl::StripPrefix(info.name, absl::StrCat(head, "/"));
    const absl::StatusOr<TemporaryFolder> goes = TemporaryFolder::Adopt(disk, head_folder, name);
    if (absl::IsFailedPrecondition(goes.status())) continue;  // being read
    if (!goes.ok()) return goes.status();
    removed.push_back(info.name);
  }
  return removed;
}

}  // namespace lossd::head
