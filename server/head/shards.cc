// SPDX-License-Identifier: Apache-2.0
#include "server/head/shards.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/head/checkpoint_layout.h"

namespace lossd::head {
namespace {

bool HasRowPerClass(kernels::Param param) {
  return param == kernels::Param::kWeight || param == kernels::Param::kBias ||
         param == kernels::Param::kClassWeights;
}

int64_t DividedUp(int64_t value, int64_t by) { return (value + by - 1) / by; }

}  // namespace

std::vector<kernels::TensorId> CheckpointTensors(const kernels::HeadConfig& config) {
  std::vector<kernels::TensorId> ids;
  for (const kernels::Param param : kernels::kAllParams) {
    for (const kernels::Role role :
         {kernels::Role::kValue, kernels::Role::kMoment1, kernels::Role::kMoment2}) {
      if (kernels::HasTensor(config, {param, role})) ids.push_back({param, role});
    }
  }
  return ids;
}

int64_t CheckpointBytes(const kernels::HeadConfig& config) {
  int64_t bytes = 0;
  for (const kernels::TensorId id : CheckpointTensors(config)) {
    bytes += Bytes(kernels::ShapeOf(config, id.param));
  }
  return bytes;
}

std::string ClassRange::Text() const { return absl::StrCat("classes [", begin, ", ", end, ")"); }

std::vector<ClassRange> DivideClasses(const kernels::HeadConfig& config, const ShardRules& rules) {
  return DivideClasses(config, {0, config.vocab_size}, rules, kMostShards);
}

std::vector<ClassRange> DivideClasses(const kernels::HeadConfig& config, const ClassRange& classes,
                                      const ShardRules& rules, size_t most) {
  int64_t bytes = 0;
  for (const TensorPart& part : PartsOf(config, classes)) {
    bytes += Bytes({part.rows, kernels::ShapeOf(config, part.id.param).cols});
  }
  const int64_t threads = std::max(rules.threads, 1);
  int64_t shards = DividedUp(bytes, std::max<int64_t>(rules.most_bytes, 1));
  shards = std::max(shards, std::min(threads, bytes / kLeastShardBytes));
  if (shards > threads) shards = DividedUp(shards, threads) * threads;
  shards = std::clamp<int64_t>(shards, 1, std::min<int64_t>(classes.size(), static_cast<int64_t>(most)));
  std::vector<ClassRange> ranges;
  const int64_t least = classes.size() / shards;
  const int64_t larger = classes.size() % shards;  // ranges that have one class more
  int64_t begin = classes.begin;
  for (int64_t shard = 0; shard < shards; ++shard) {
    const int64_t end = begin + least + (shard < larger ? 1 : 0);
    ranges.push_back({begin, end});
    begin = end;
  }
  return ranges;
}

std::vector<TensorPart> PartsOf(const kernels::HeadConfig& config, const ClassRange& classes) {
  std::vector<TensorPart> parts;
  for (const kernels::TensorId id : CheckpointTensors(config)) {
    if (HasRowPerClass(id.param)) {
      parts.push_back({id, classes.begin, classes.size()});
    } else if (classes.begin == 0) {
      parts.push_back({id, 0, kernels::ShapeOf(config, id.param).rows});
    }
  }
  return parts;
}

std::string ShardFile(size_t shard, size_t shards) {
  if (shards == 1) return kTensorFile;
  return absl::StrFormat("tensors-%05d-of-%05d.safetensors", shard + 1, shards);
}

std::map<std::string, std::string> ShardMetadata(const kernels::HeadConfig& config,
                                                 const ClassRange& classes) {
  if (classes == ClassRange{0, config.vocab_size}) return {};
  return {{"classes", absl::StrCat("[", classes.begin, ", ", classes.end, ") of ", config.vocab_size)}};
}

}  // namespace lossd::head
