// SPDX-License-Identifier: Apache-2.0
// Several backends as one: heads lie on all of them, and the rows of a chunk, or the classes of a head, are
// divided among them (docs/scaling.md). To the engine it is a device like any other.
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

// Connects the heads of the members, of the same config and in the order of the members. How they divide the
// head is what PlacesOf says of the config.
using MakeReplicas =
    std::function<absl::StatusOr<std::unique_ptr<Replicas>>(absl::Span<HeadKernels* const> heads)>;

// Joins the heads of the members, which have the same config, whose split is kVocabulary, in the order of the
// members.
using JoinClasses = std::function<absl::Status(absl::Span<HeadKernels* const> heads)>;

// INVALID_ARGUMENT: the devices cannot share the classes of a head.
absl::Status RefuseToSplitVocabulary(absl::Span<HeadKernels* const> heads);

// Where the staging memory of a group comes from. Thread-safe.
class GroupStaging {
 public:
  virtual ~GroupStaging() = default;
  // As Backend::AllocateStaging and Backend::AdoptStaging; `first` is member 0.
  virtual absl::StatusOr<std::unique_ptr<StagingMemory>> Allocate(Backend* first, int64_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<StagingMemory>> Adopt(Backend* first, absl::Span<uint8_t> memory,
                                                               const AdoptOptions& options) = 0;
};

struct GroupOptions {
  // Chunks of fewer rows are computed by one member. With 512 rows a pass over the fp32 weight gradient costs
  // about as much as the products of the rows; two members would each make the pass for half of the rows.
  int64_t least_rows = 512;
  // The members count their memory together, as those of CreateCpuMembers do: what one of them says is said
  // of all.
  bool members_share_memory = false;
  Split split = Split::kAny;  // of heads whose config names none
  int replicas = 1;           // of heads split by vocabulary whose config names none; it divides the members
  JoinClasses join_classes = RefuseToSplitVocabulary;
  // Where the exchanges of members of one process are counted: those of a step by the group, those of chunks
  // by what `join_classes` makes. Null: they are not.
  std::shared_ptr<MemberExchanges> exchanges = nullptr;
  GroupStaging* staging = nullptr;  // outlives the backend; null: member 0
  // Whether a head that is split by vocabulary may have several replicas: `join_classes` then joins the
  // members of each among themselves, and MakeReplicas connects those that have the same classes.
  bool may_have_replicas = true;
  // The member on whose device the memory lies, -1: it lies elsewhere, or that is not known; so that rows are
  // computed by the replica that has them. Thread-safe. Null: it is never known.
  std::function<int(const void* memory)> member_of = nullptr;
  // Asked when a chunk comes, on the driving thread; an error refuses it. For members that may still write to
  // the memory of a chunk that they have failed: once there is one, no other chunk is computed.
  std::function<absl::Status()> check_members = [] { return absl::OkStatus(); };
};

// A head whose config names no split, nor the options, is split by rows if that fits the members' memory, and
// else by vocabulary. Replicas by vocabulary that have one member each are a head that is split by rows.
//
// Staging memory, unless the options have it come from elsewhere, and the memory of deferred microbatches is
// that of member 0; all members read and write both. `members`: >= 1, all alike, member i made as replica
// {i, members}. INVALID_ARGUMENT naming what is wrong.
//
// A limit of workspace holds for each member. Figures of memory are sums over the members, and peaks sums of
// their peaks.
absl::StatusOr<std::unique_ptr<Backend>> CreateGroupBackend(std::vector<std::unique_ptr<Backend>> members,
                                                            MakeReplicas make_replicas,
                                                            const GroupOptions& options);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_GROUP_BACKEND_H_
