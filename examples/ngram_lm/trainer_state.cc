// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/trainer_state.h"

#include <filesystem>
#include <map>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "proto/tensorfile/safetensors.h"

namespace lossd::ngram_lm {
namespace {

constexpr char kParameters[] = "parameters";
constexpr char kMoment1[] = "adam.moment1";
constexpr char kMoment2[] = "adam.moment2";

absl::Span<const uint8_t> Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)};
}

absl::Status WriteFile(const TrainerState& state, const std::string& path) {
  const std::pair<const char*, const std::vector<float>*> tensors[] = {
      {kParameters, &state.parameters}, {kMoment1, &state.adam.moment1}, {kMoment2, &state.adam.moment2}};
  std::vector<formats::SafetensorsSpec> specs;
  for (const auto& [name, values] : tensors) {
    specs.push_back({name, formats::DType::kFloat32, {static_cast<int64_t>(values->size())}});
  }
  auto file = formats::CreateSafetensors(path, specs,
                                         {{"seed", absl::StrCat(state.seed)},
                                          {"tokens_per_step", absl::StrCat(state.tokens_per_step)},
                                          {"train_tokens", absl::StrCat(state.train_tokens)},
                                          {"steps", absl::StrCat(state.adam.steps)},
                                          {"checkpoint", state.checkpoint}});
  if (!file.ok()) return file.status();
  for (const auto& [name, values] : tensors) {
    if (absl::Status status = (*file)->Append(Bytes(*values)); !status.ok()) return status;
  }
  return (*file)->Finish();
}

absl::StatusOr<std::vector<float>> ReadTensor(const formats::SafetensorsReader& file, const char* name) {
  const auto tensor = file.Find(name);
  if (!tensor.ok()) return tensor.status();
  std::vector<float> values(static_cast<size_t>((*tensor)->rows()));
  const absl::Status read =
      file.ReadBytes(**tensor, 0, {reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(float)});
  if (!read.ok()) return read;
  return values;
}

template <typename T>
absl::Status ReadNumber(const formats::SafetensorsReader& file, const char* name, T* out) {
  const auto entry = file.metadata().find(name);
  if (entry != file.metadata().end() && absl::SimpleAtoi(entry->second, out)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(file.name(), ": no number \"", name, "\" in the metadata"));
}

}  // namespace

absl::Status SaveState(const TrainerState& state, const std::string& path) {
  const std::string temporary = path + ".tmp";
  std::error_code error;
  std::filesystem::remove(temporary, error);  // a leftover
  if (absl::Status status = WriteFile(state, temporary); !status.ok()) return status;
  std::filesystem::rename(temporary, path, error);
  if (error) return formats::FileError(path, "rename to", error.value());
  const std::string folder = std::filesystem::path(path).parent_path();
  return formats::SyncFolder(folder.empty() ? "." : folder);
}

absl::StatusOr<TrainerState> LoadState(const std::string& path) {
  const auto file = formats::SafetensorsReader::Open(path);
  if (!file.ok()) return file.status();
  TrainerState state;
  absl::Status numbers = ReadNumber(**file, "seed", &state.seed);
  numbers.Update(ReadNumber(**file, "tokens_per_step", &state.tokens_per_step));
  numbers.Update(ReadNumber(**file, "train_tokens", &state.train_tokens));
  numbers.Update(ReadNumber(**file, "steps", &state.adam.steps));
  if (!numbers.ok()) return numbers;
  for (const auto& [name, values] :
       {std::pair(kParameters, &state.parameters), std::pair(kMoment1, &state.adam.moment1),
        std::pair(kMoment2, &state.adam.moment2)}) {
    absl::StatusOr<std::vector<float>> read = ReadTensor(**file, name);
    if (!read.ok()) return read.status();
    *values = *std::move(read);
  }
  const auto checkpoint = (*file)->metadata().find("checkpoint");
  if (checkpoint != (*file)->metadata().end()) state.checkpoint = checkpoint->second;
  return state;
}

}  // namespace lossd::ngram_lm
