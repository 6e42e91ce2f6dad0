// SPDX-License-Identifier: Apache-2.0
// The division of a head among several devices (Replica, Shard), a part of a head in another process
// (RemotePart), and transfers of memory between the processes of one server (HostTransfers).
//
// In a head split by rows, the devices compute different rows. Every device has all values and accumulates
// gradients of all classes. But each parameter is updated by only one device, and only that device has the
// parameter's optimizer state. In a head split by vocabulary, a device has everything that belongs to its
// classes, and nothing of other classes. Such a head may have several copies: the copies compute different
// rows, and each class is updated in only one copy.
//
// Structs are plain data. Functions are stateless and thread-safe.
#ifndef LOSSD_KERNELS_REPLICA_H_
#define LOSSD_KERNELS_REPLICA_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/head_config.h"

namespace lossd::kernels {

// The heads of a backend are replica number `index` of `count` replicas. For a head that is split by
// vocabulary, the "replicas" are the parts of the head, or the parts of all copies of the head.
struct Replica {
  int index = 0;
  int count = 1;
};

// The parameters that one replica updates.
struct Shard {
  // Rows [first_class, first_class + classes) of the weight and the bias.
  int64_t first_class = 0;
  int64_t classes = 0;
  bool norm = true;  // whether the replica also updates the parameters of the norm

  int64_t end_class() const { return first_class + classes; }
};

// Shards begin at multiples of this many classes, so that their parts of tensors are aligned.
inline constexpr int64_t kShardAlignment = 8;

// The shards of a head split by rows: classes in order, the same number for each replica, rounded up for
// alignment. So the last replicas may have fewer classes, or none if there are few. The first replica also
// has the norm.
inline Shard ShardOf(int64_t vocab_size, Replica replica) {
  const int64_t even = (vocab_size + replica.count - 1) / replica.count;
  const int64_t each = (even + kShardAlignment - 1) / kShardAlignment * kShardAlignment;
  const int64_t first = each * replica.index < vocab_size ? each * replica.index : vocab_size;
  const int64_t left = vocab_size - first;
  return {.first_class = first, .classes = left < each ? left : each, .norm = replica.index == 0};
}

// If there are many classes, the share of each device begins at a multiple of this many classes, a tile of
// the kernels.
inline constexpr int64_t kShareGrain = 256;

// The boundaries between the shares of `devices` devices are multiples of this number.
inline int64_t GrainOfShares(int64_t vocab_size, size_t devices) {
  int64_t grain = kShareGrain;
  while (grain > 1 && vocab_size < grain * 8 * static_cast<int64_t>(devices)) grain /= 2;
  return grain;
}

// The first class of `device` in a head divided by `shares`, one for each device (HeadConfig::shares): a
// multiple of GrainOfShares. For device shares.size(): vocab_size.
inline int64_t FirstClassOf(int64_t vocab_size, absl::Span<const int32_t> shares, size_t device) {
  int64_t before = 0, all = 0;
  size_t last = 0;  // the last device that has a share; it gets the classes that rounding leaves over
  for (size_t i = 0; i < shares.size(); ++i) {
    if (i < device) before += shares[i];
    all += shares[i];
    if (shares[i] > 0) last = i;
  }
  if (device > last) return vocab_size;
  const int64_t grain = GrainOfShares(vocab_size, shares.size());
  // vocab_size < 2^31 and all < 2^31, so the product does not overflow.
  const int64_t exact = (vocab_size * before + all / 2) / all;
  return std::min((exact + grain / 2) / grain * grain, vocab_size);
}

// The parts of a head split by vocabulary: classes in order. Without shares they are divided evenly, and the
// first devices have one class more if the division has a remainder; vocab_size >= replica.count, so that
// every device has classes. Every device has the norm's parameters, and all devices update them in the same
// way.
inline Shard ClassShardOf(int64_t vocab_size, Replica replica, absl::Span<const int32_t> shares = {}) {
  if (!shares.empty()) {
    const auto device = static_cast<size_t>(replica.index);
    const int64_t first = FirstClassOf(vocab_size, shares, device);
    return {
        .first_class = first, .classes = FirstClassOf(vocab_size, shares, device + 1) - first, .norm = true};
  }
  const int64_t each = vocab_size / replica.count;
  const int64_t more = vocab_size % replica.count;
  return {.first_class = each * replica.index + std::min<int64_t>(replica.index, more),
          .classes = each + (replica.index < more ? 1 : 0),
          .norm = true};
}

// Memory to send to another rank, or to receive from that rank; bytes > 0. The processes of one server are
// its ranks.
struct RankTransfer {
  int rank = 0;
  void* data = nullptr;
  size_t bytes = 0;
};

// Transfers host memory between the processes of one server. Called by one thread at a time, except Abort,
// which is thread-safe. After an error every call fails with that error.
class HostTransfers {
 public:
  virtual ~HostTransfers() = default;

  virtual Replica replica() const = 0;  // the number of this rank, and how many ranks there are
  // The data by which the other ranks reach this rank. Called once.
  virtual absl::StatusOr<std::string> Address() = 0;
  // Connects this rank with the other ranks. `addresses`: Address() of all ranks, by rank. Called once, after
  // Address. Blocks until all ranks have called it. UNAVAILABLE if a rank cannot be reached in time.
  virtual absl::Status Connect(const std::vector<std::string>& addresses) = 0;
  // Sends and receives at the same time, and returns when everything is done. Between two ranks, sends and
  // receives are matched in the order of the calls. UNAVAILABLE if another rank does not do its part in time.
  virtual absl::Status Exchange(absl::Span<const RankTransfer> send,
                                absl::Span<const RankTransfer> receive) = 0;
  // Makes all calls that wait for another rank, and all later calls, fail with `reason`.
  virtual void Abort(const absl::Status& reason) = 0;
};

// A part of a head in another process.
struct RemotePart {
  int rank = 0;                // rank of that process
  uint64_t head = 0;           // number of the head in that process
  Replica replica;             // which part of the head it is
  Split split = Split::kRows;  // how the head is divided; never kAny
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_REPLICA_H_
