// Which rows of a parameter a replica updates and keeps the moments of (replica.h). Stateless; thread-safe.
#ifndef LOSSD_KERNELS_SHARD_ROWS_H_
#define LOSSD_KERNELS_SHARD_ROWS_H_

#include <cstdint>

#include "kernels/head_config.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// Rows [first, first + rows) of a parameter.
struct ShardRows {
  int64_t first = 0;
  int64_t rows = 0;

  int64_t end() const { return first + rows; }
  friend bool operator==(const ShardRows&, const ShardRows&) = default;
};

// Class weights are not trained; they count as the first replica's, like the norm.
inline ShardRows ShardRowsOf(const HeadConfig& config, Param param, Replica replica) {
  const Shard shard = ShardOf(config.vocab_size, replica);
  if (param == Param::kWeight || param == Param::kBias) return {shard.first_class, shard.classes};
  return {0, shard.norm ? ShapeOf(config, param).rows : 0};
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_SHARD_ROWS_H_
