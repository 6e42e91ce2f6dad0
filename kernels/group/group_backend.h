// SPDX-License-Identifier: Apache-2.0
// A group backend makes several backends, its members, one Backend: each head is on all members, and the
// members divide the rows of a chunk or the classes of a head (docs/scaling.md). To the engine a group is
// like any other device.
#ifndef LOSSD_KERNELS_GROUP_GROUP_BACKEND_H_
#define LOSSD_KERNELS_GROUP_GROUP_BACKEND_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/exchange_times.h"
#include "kernels/group/members.h"

namespace lossd::kernels {

// For a head of the group, each member has a head of its own. MakeReplicas connects these heads, given in the
// order of the members. They have the same config, and PlacesOf says how they divide the group's head.
using MakeReplicas =
    std::function<absl::StatusOr<std::unique_ptr<Replicas>>(absl::Span<HeadKernels* const> heads)>;

// Joins the members' heads of one head of the group, given in the order of the members, so that they can
// divide its classes. They have the same config, whose split is kVocabulary.
using JoinClasses = std::function<absl::Status(absl::Span<HeadKernels* const> heads)>;

// A JoinClasses for devices that cannot share the classes of a head: returns INVALID_ARGUMENT.
absl::Status RefuseToSplitVocabulary(absl::Span<HeadKernels* const> heads);

// A source of staging memory for a group. Thread-safe.
class GroupStaging {
 public:
  virtual ~GroupStaging() = default;
  // As Backend::AllocateStaging and Backend::AdoptStaging; `first` is member 0.
  virtual absl::StatusOr<std::unique_ptr<StagingMemory>> Allocate(Backend* first, int64_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<StagingMemory>> Adopt(Backend* first, absl::Span<uint8_t> memory,
                                                               const AdoptOptions& options) = 0;
};

struct GroupOptions {
  // A chunk of fewer rows than this is computed by one member. If two members shared it, each of them would
  // make a pass over the whole fp32 weight gradient for half of the rows. With 512 rows, that pass takes
  // about as long as the products of the rows.
  int64_t least_rows = 512;
  // The members count their memory together, as the members of CreateCpuMembers do. The statistics of one
  // member are then the statistics of all members.
  bool members_share_memory = false;
  Split split = Split::kAny;  // for heads whose config says kAny
  // The number of replicas of heads that are split by vocabulary and whose config says 0. The number of
  // members must be a multiple of it.
  int replicas = 1;
  JoinClasses join_classes = RefuseToSplitVocabulary;
  // The clocks that measure exchanges between members of one process. The group measures the exchanges of a
  // step. The object that `join_classes` makes measures the exchanges of chunks. Null: exchanges are not
  // measured.
  std::shared_ptr<MemberExchanges> exchanges = nullptr;
  GroupStaging* staging = nullptr;  // outlives the backend; null: member 0 allocates
  // Whether a head that is split by vocabulary may have several replicas. `join_classes` then joins the
  // members of each replica, and MakeReplicas connects the members that have the same classes.
  bool may_have_replicas = true;
  // Returns the member whose device has this memory, or -1 if no member's device has it or if it is not
  // known. Rows that lie in the memory of a device are then computed by the replica of that device.
  // Thread-safe. Null: the device is never known.
  std::function<int(const void* memory)> member_of = nullptr;
  // Called for each chunk, on the driving thread; an error refuses the chunk. It serves groups whose members
  // may still write to the memory of a chunk that has failed: after such a failure it returns an error, so no
  // more chunks are computed.
  std::function<absl::Status()> check_members = [] { return absl::OkStatus(); };
};

// Creates a group. If neither a head's config nor the options say how the head is split, the head is split by
// rows if that fits the members' memory, else by vocabulary. A head split by vocabulary with replicas of one
// member each is the same as a head split by rows.
//
// Member 0 allocates the memory of deferred microbatches and, without GroupOptions::staging, the staging
// memory; all members read and write both. `members`: at least one, all of the same kind, member i created as
// replica {i, number of members}. INVALID_ARGUMENT names what is wrong.
//
// A limit on workspace holds for each member. Memory statistics are sums over the members, and peaks are sums
// of the members' peaks.
absl::StatusOr<std::unique_ptr<Backend>> CreateGroupBackend(std::vector<std::unique_ptr<Backend>> members,
                                                            MakeReplicas make_replicas,
                                                            const GroupOptions& options);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_GROUP_BACKEND_H_
