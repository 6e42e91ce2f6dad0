// SPDX-License-Identifier: Apache-2.0
#include "server/head/save_numbers.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "server/head/checkpoint_store.h"

namespace lossd::head {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kNumberPrefix = ".save-number-";

std::string NumberFile(const std::string& head_folder, uint64_t number) {
  return absl::StrFormat("%s/%s%016d", head_folder, kNumberPrefix, number);
}

// nullopt: the file is none that keeps a number.
std::optional<uint64_t> NumberOf(const std::string& file) {
  absl::string_view digits = file;
  uint64_t number = 0;
  if (!absl::ConsumePrefix(&digits, kNumberPrefix) || !absl::SimpleAtoi(digits, &number)) return std::nullopt;
  if (number > kMostCounted) return std::nullopt;
  return number;
}

// The numbers of the files beside the checkpoints: one, or after a crash two.
absl::StatusOr<std::vector<uint64_t>> KeptNumbers(const std::string& head_folder) {
  std::vector<uint64_t> numbers;
  std::error_code error;
  for (fs::directory_iterator entry(head_folder, error), end; !error && entry != end;
       entry.increment(error)) {
    if (const auto number = NumberOf(entry->path().filename())) numbers.push_back(*number);
  }
  if (error) return formats::FileError(head_folder, "list", error.value());
  return numbers;
}

absl::Status KeepNumber(Disk* disk, const std::string& head_folder, uint64_t number,
                        const std::vector<uint64_t>& before) {
  absl::StatusOr<std::unique_ptr<formats::OutputFile>> file =
      disk->CreateFile(NumberFile(head_folder, number));
  if (absl::IsAlreadyExists(file.status())) return absl::OkStatus();
  if (!file.ok()) return file.status();
  absl::Status status = (*file)->Sync();
  if (status.ok()) status = (*file)->Close();
  if (status.ok()) status = disk->SyncFolder(head_folder);
  if (!status.ok()) return status;
  for (const uint64_t old : before) disk->RemoveFile(NumberFile(head_folder, old)).IgnoreError();
  return absl::OkStatus();
}

// A checkpoint beside the number after which it comes.
struct Placed {
  uint64_t number = 0;
  const CheckpointInfo* info = nullptr;
};

auto OrderOf(const Placed& placed) {
  const CheckpointInfo& info = *placed.info;
  const bool has_number = info.save_number != 0;
  return std::tuple(info.status.ok(), placed.number, !has_number, absl::ToUnixSeconds(info.saved_at),
                    info.subject.step);
}

bool ComesBefore(const Placed& a, const Placed& b) {
  const auto order_a = OrderOf(a);
  const auto order_b = OrderOf(b);
  return order_a != order_b ? order_a > order_b : a.info->name < b.info->name;
}

}  // namespace

absl::StatusOr<uint64_t> TakeSaveNumber(Disk* disk, const std::string& directory, const std::string& head) {
  const std::string head_folder = absl::StrCat(directory, "/", head);
  const absl::StatusOr<std::vector<uint64_t>> kept = KeptNumbers(head_folder);
  if (!kept.ok()) return kept.status();
  const absl::StatusOr<std::vector<CheckpointInfo>> there = ListCheckpoints(directory, head);
  if (!there.ok()) return there.status();
  uint64_t last = 0;
  for (const uint64_t number : *kept) last = std::max(last, number);
  for (const CheckpointInfo& info : *there) last = std::max(last, info.save_number);
  const uint64_t next = std::min(last + 1, kMostCounted);
  if (absl::Status status = KeepNumber(disk, head_folder, next, *kept); !status.ok()) return status;
  return next;
}

void SortNewestFirst(std::vector<CheckpointInfo>* infos) {
  std::vector<std::pair<absl::Time, uint64_t>> numbered;  // by time; then the largest number so far
  for (const CheckpointInfo& info : *infos) {
    if (info.status.ok() && info.save_number != 0) numbered.emplace_back(info.saved_at, info.save_number);
  }
  std::sort(numbered.begin(), numbered.end());
  for (size_t i = 1; i < numbered.size(); ++i) {
    numbered[i].second = std::max(numbered[i].second, numbered[i - 1].second);
  }
  std::vector<Placed> placed;
  for (const CheckpointInfo& info : *infos) {
    uint64_t number = info.save_number;
    if (number == 0) {
      const auto later =
          std::upper_bound(numbered.begin(), numbered.end(), std::pair(info.saved_at, kMostCounted));
      if (later != numbered.begin()) number = std::prev(later)->second;
    }
    placed.push_back({number, &info});
  }
  std::sort(placed.begin(), placed.end(), ComesBefore);
  std::vector<CheckpointInfo> sorted;
  sorted.reserve(infos->size());
  for (const Placed& one : placed) sorted.push_back(*one.info);
  *infos = std::move(sorted);
}

}  // namespace lossd::head
