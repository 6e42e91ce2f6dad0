// SPDX-License-Identifier: Apache-2.0
#include "server/head/file_sites.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/shard_rows.h"

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

}  // namespace lossd::head
