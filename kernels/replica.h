// SPDX-License-Identifier: Apache-2.0
// Which part of a head each of several devices has (Replica, Shard), how memory goes between the processes of
// one server (HostTransfers), and a part of a head that lies in another process (RemotePart).
//
// By rows, every device computes other rows: it has all values and accumulates gradients of all classes, but
// each parameter is updated by one of the devices, which alone keeps its optimizer state. By vocabulary, a
// device has all that belongs to its classes, and nothing of the other classes. A head by vocabulary may have
// several copies; each copy computes other rows, and each class is updated in one of the copies.
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

// Which of how many replicas (or, by vocabulary, parts, or parts of replicas) of its heads a backend holds.
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

// By rows: classes in order, each replica as many as the first, but for what alignment takes from the last
// ones: of few classes they may have none. The first replica also has the norm.
inline Shard ShardOf(int64_t vocab_size, Replica replica) {
  const int64_t even = (vocab_size + replica.count - 1) / replica.count;
  const int64_t each = (even + kShardAlignment - 1) / kShardAlignment * kShardAlignment;
  const int64_t first = each * replica.index < vocab_size ? each * replica.index : vocab_size;
  const int64_t left = vocab_size - first;
  return {.first_class = first, .classes = left < each ? left : each, .norm = replica.index == 0};
}

// Where shares of a head begin is a multiple of this many classes if there are many: a tile of the kernels.
inline constexpr int64_t kShareGrain = 256;

// Boundaries between so many devices are multiples of this.
inline int64_t GrainOfShares(int64_t vocab_size, size_t devices) {
  int64_t grain = kShareGrain;
  while (grain > 1 && vocab_size < grain * 8 * static_cast<int64_t>(devices)) grain /= 2;
  return grain;
}

// The first class of a device whose head is divided by `shares`, one for each device (HeadConfig::shares): a
// multiple of kShareGrain, or of less where the devices have few classes each. For device shares.size():
// vocab_size.
inline int64_t FirstClassOf(int64_t vocab_size, absl::Span<const int32_t> shares, size_t device) {
  int64_t before = 0, all = 0;
  size_t last = 0;  // the last device that has a share: what rounding leaves is its
  for (size_t i = 0; i < shares.size(); ++i) {
    if (i < device) before += shares[i];
    all += shares[i];
    if (shares[i] > 0) last = i;
  }
  if (device > last) return vocab_size;
  const int64_t grain = GrainOfShares(vocab_size, shares.size());
  // vocab_size < 2^31 and all < 2^31, so that the product fits.
  const int64_t exact = (vocab_size * before + all / 2) / all;
  return std::min((exact + grain / 2) / grain * grain, vocab_size);
}

// By vocabulary: classes in order. Without shares they are divided evenly, and the first devices have one
// more where they do not divide; vocab_size >= replica.count, so that every device has some. The norm's
// parameters are on every device, which all update them alike.
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

// Memory that goes to another rank, or is filled with what another rank sends; bytes > 0. The processes of
// one server are its ranks.
struct RankTransfer {
  int rank = 0;
  void* data = nullptr;
  size_t bytes = 0;
};

// Carries memory of the host between the processes of one server. Called by one thread at a time, but for
// Abort, which is thread-safe. After an error every call fails with it.
class HostTransfers {
 public:
  virtual ~HostTransfers() = default;

  virtual Replica replica() const = 0;  // this rank, of how many
  // What the other ranks have to know of this one to reach it. Called once.
  virtual absl::StatusOr<std::string> Address() = 0;
  // Connects this rank with the others. `addresses`: of all ranks, by rank. Blocks until all have called it;
  // called once, after Address. UNAVAILABLE if one cannot be reached in time.
  virtual absl::Status Connect(const std::vector<std::string>& addresses) = 0;
  // Sends and receives at the same time, and returns when all of it is done. Ranks pair off what they send
  // to each other in the order of the calls. UNAVAILABLE if another rank does not do its part in time.
  virtual absl::Status Exchange(absl::Span<const RankTransfer> send,
                                absl::Span<const RankTransfer> receive) = 0;
  // Whatever waits for another rank fails with `reason`, and all that comes.
  virtual void Abort(const absl::Status& reason) = 0;
};

// A part of a head that lies in another process.
struct RemotePart {
  int rank = 0;                // of the process
  uint64_t head = 0;           // what the head is called there
  Replica replica;             // which part of the head it is,
  Split split = Split::kRows;  // and by what the head is divided: never kAny
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_REPLICA_H_
