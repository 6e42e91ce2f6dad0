// Replicas: a head may lie on several devices, and each computes other rows. Every replica computes with all
// values and accumulates gradients of all classes, but each parameter is updated by one of them, which alone
// keeps its optimizer state. Plain data.
#ifndef LOSSD_KERNELS_REPLICA_H_
#define LOSSD_KERNELS_REPLICA_H_

#include <cstdint>

namespace lossd::kernels {

// Which of how many replicas of its heads a backend holds.
struct Replica {
  int index = 0;
  int count = 1;
};

// The parameters that a replica updates.
struct Shard {
  // Rows [first_class, first_class + classes) of the weight and the bias.
  int64_t first_class = 0;
  int64_t classes = 0;
  bool norm = true;  // also the parameters of the norm

  int64_t end_class() const { return first_class + classes; }
};

// Shards begin at multiples of this many classes, so that their parts of tensors are aligned.
inline constexpr int64_t kShardAlignment = 8;

// Classes in order, each replica as many as the first, but for what alignment takes from the last ones: of
// few classes they may have none. The first replica also has the norm.
inline Shard ShardOf(int64_t vocab_size, Replica replica) {
  const int64_t even = (vocab_size + replica.count - 1) / replica.count;
  const int64_t each = (even + kShardAlignment - 1) / kShardAlignment * kShardAlignment;
  const int64_t first = each * replica.index < vocab_size ? each * replica.index : vocab_size;
  const int64_t left = vocab_size - first;
  return {.first_class = first, .classes = left < each ? left : each, .norm = replica.index == 0};
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_REPLICA_H_
