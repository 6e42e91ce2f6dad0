// SPDX-License-Identifier: Apache-2.0
// GroupBackend: plans and creates heads on all members, split by rows or by vocabulary (group_backend.h).
#include "kernels/group/group_backend.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "kernels/group/group_head.h"
#include "kernels/group/members.h"
#include "kernels/group/vocabulary_head.h"
#include "kernels/validation.h"

namespace lossd::kernels {
namespace {

constexpr absl::string_view kOneReplica = "be 0 or 1 where a head lies on the devices of several processes";

void Add(const MemoryBytes& bytes, MemoryBytes& sum) {
  for (size_t kind = 0; kind < kMemoryKinds; ++kind) sum.by_kind[kind] += bytes.by_kind[kind];
}

// The member that has the device; -1 if there is none.
int MemberWith(const Members& members, absl::string_view device) {
  for (int i = 0; i < members.size(); ++i) {
    const std::vector<std::string> own = members.backend(i).SharingDevices();
    if (std::find(own.begin(), own.end(), device) != own.end()) return i;
  }
  return -1;
}

Split SplitOf(const GroupOptions& options, const HeadConfig& config) {
  if (config.residency == Residency::kHost) return Split::kRows;  // Validate allows no other split
  const bool of_vocabulary = !config.shares.empty() || ReplicasOf(config) > 1;
  if (config.split == Split::kAny && of_vocabulary) return Split::kVocabulary;
  return config.split == Split::kAny ? options.split : config.split;
}

// The config that the members use for a head that is split by vocabulary.
HeadConfig ByVocabulary(const GroupOptions& options, const HeadConfig& config) {
  HeadConfig split = config;
  split.split = Split::kVocabulary;
  if (config.replicas == 0 && options.replicas > 1) split.replicas = options.replicas;
  return split;
}

absl::string_view WhyByVocabulary(const GroupOptions& options, const HeadConfig& config) {
  const bool asked_for = SplitOf(options, config) == Split::kVocabulary;
  return asked_for ? "it was asked for" : "a copy on every device does not fit";
}

ReplicaLayout LayoutOf(const GroupOptions& options, const HeadConfig& config) {
  return {.least_rows = options.least_rows,
          .reason = std::string(WhyByVocabulary(options, config)),
          .member_of = options.member_of};
}

class GroupBackend final : public Backend {
 public:
  GroupBackend(std::vector<std::unique_ptr<Backend>> members, MakeReplicas make_replicas,
               const GroupOptions& options)
      : members_(std::move(members), options.check_members),
        options_(options),
        make_replicas_(std::move(make_replicas)) {}

  BackendInfo info() const override {
    BackendInfo info = first().info();
    std::vector<std::string> devices;
    info.uuids.clear();
    for (int i = 0; i < members_.size(); ++i) {
      const BackendInfo member = members_.backend(i).info();
      devices.push_back(member.device);
      info.uuids.insert(info.uuids.end(), member.uuids.begin(), member.uuids.end());
    }
    info.device = absl::StrJoin(devices, " + ");
    return info;
  }

  MemoryStats memory() const override {
    MemoryStats sum = first().memory();
    for (int i = 1; i < members_.size() && !options_.members_share_memory; ++i) {
      const MemoryStats stats = members_.backend(i).memory();
      Add(stats.current, sum.current);
      Add(stats.peak, sum.peak);
      sum.peak_total += stats.peak_total;
      sum.limit += stats.limit;
    }
    return sum;
  }

  // As many chunks as one member takes, plus one for each other member. So chunks of few rows, each of which
  // is computed by one member, keep all members busy.
  int max_chunks_in_flight() const override { return first().max_chunks_in_flight() + members_.size() - 1; }

  // If neither the config nor the options name a split, plans a split by rows.
  absl::StatusOr<MemoryBytes> PlanHead(const HeadConfig& config) const override {
    HeadConfig planned =
        SplitOf(options_, config) == Split::kVocabulary ? ByVocabulary(options_, config) : config;
    planned.split = SplitOf(options_, config);
    LOSSD_RETURN_IF_ERROR(CheckSplit(planned));
    MemoryBytes sum;
    for (int i = 0; i < members_.size(); ++i) {
      absl::StatusOr<MemoryBytes> plan = members_.backend(i).PlanHead(planned);
      if (!plan.ok()) return plan.status();
      Add(*plan, sum);
    }
    return sum;
  }

  absl::StatusOr<PlannedHead> PlanWholeHead(const HeadConfig& config,
                                            const MemoryBytes& beside) const override {
    return EitherWay<PlannedHead>(
        config, [&] { return PlanReplicas(config, config, beside); },
        [&] { return PlanByVocabulary(config, beside); });
  }

  absl::StatusOr<std::unique_ptr<HeadKernels>> CreateHead(const HeadConfig& config) override {
    return EitherWay<std::unique_ptr<HeadKernels>>(
        config, [&] { return CreateReplicas(config, config); }, [&] { return CreateByVocabulary(config); });
  }

  absl::StatusOr<std::unique_ptr<StagingMemory>> AllocateStaging(int64_t bytes) override {
    if (options_.staging != nullptr) return options_.staging->Allocate(&first(), bytes);
    return first().AllocateStaging(bytes);
  }
  absl::StatusOr<std::unique_ptr<StagingMemory>> AdoptStaging(absl::Span<uint8_t> memory,
                                                              const AdoptOptions& options) override {
    if (options_.staging != nullptr) return options_.staging->Adopt(&first(), memory, options);
    return first().AdoptStaging(memory, options);
  }
  // Every member computes rows in this memory, so all members must be able to share memory.
  std::vector<std::string> SharingDevices() const override {
    std::vector<std::string> devices;
    for (int i = 0; i < members_.size(); ++i) {
      const std::vector<std::string> own = members_.backend(i).SharingDevices();
      if (own.empty()) return {};
      devices.insert(devices.end(), own.begin(), own.end());
    }
    return devices;
  }
  absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> ShareDeviceMemory(absl::string_view device,
                                                                        int64_t bytes) override {
    const std::vector<std::string> devices = SharingDevices();
    if (devices.empty()) return absl::UnimplementedError("these devices share no memory");
    const int owner = MemberWith(members_, device);
    if (owner < 0)
      return errors::FieldError("device", absl::StrCat("be one of ", absl::StrJoin(devices, ", ")), device);
    auto memory = members_.backend(owner).ShareDeviceMemory(device, bytes);
    if (!memory.ok()) return memory;
    for (int i = 0; i < members_.size(); ++i) {
      if (i == owner) continue;
      const absl::Status reached = members_.backend(i).ReachDeviceMemory((*memory)->bytes());
      if (reached.ok()) continue;
      return absl::Status(reached.code(),
                          absl::StrCat("the server's GPU ", members_.backend(i).SharingDevices().front(),
                                       " does not reach memory of ", device, ": ", reached.message()));
    }
    return memory;
  }
  absl::Status ReachDeviceMemory(absl::Span<uint8_t> memory) override {
    for (int i = 0; i < members_.size(); ++i) {
      absl::Status reached = members_.backend(i).ReachDeviceMemory(memory);
      if (!reached.ok()) return reached;
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::unique_ptr<RetainedMemory>> AllocateRetained(int64_t bytes) override {
    return first().AllocateRetained(bytes);
  }
  absl::Status PlanHostMemory(MemoryKind kind, int64_t bytes) override {
    return first().PlanHostMemory(kind, bytes);
  }

  std::vector<MemberState> MemberStates() const override {
    std::vector<MemberState> states;
    for (int i = 0; i < members_.size(); ++i) {
      const Backend& backend = members_.backend(i);
      const bool counts = i == 0 || !options_.members_share_memory;
      states.push_back({.device = backend.info().device,
                        .memory = counts ? backend.memory() : MemoryStats(),
                        .work = members_.thread(i).work(),
                        .exchanges = options_.exchanges ? options_.exchanges->Totals(i) : ExchangeTimes()});
    }
    return states;
  }

 private:
  Backend& first() const { return members_.backend(0); }
  // Calls one of the two functions, depending on the split. With kAny, first calls `make_by_rows`; if the
  // head does not fit by rows, calls `make_by_vocabulary`.
  template <typename Result, typename ByRows, typename ByVocabulary>
  absl::StatusOr<Result> EitherWay(const HeadConfig& config, const ByRows& make_by_rows,
                                   const ByVocabulary& make_by_vocabulary) const {
    const Split split = SplitOf(options_, config);
    if (split == Split::kVocabulary) return make_by_vocabulary();
    absl::StatusOr<Result> by_rows = make_by_rows();
    const bool may_split = split == Split::kAny && config.vocab_size >= members_.size();
    if (!absl::IsResourceExhausted(by_rows.status()) || !may_split) return by_rows;
    absl::StatusOr<Result> by_vocabulary = make_by_vocabulary();
    if (by_vocabulary.ok()) return by_vocabulary;
    if (!absl::IsResourceExhausted(by_vocabulary.status())) return by_rows;
    return absl::ResourceExhaustedError(absl::StrCat("split by rows, ", by_rows.status().message(),
                                                     "; by vocabulary, on each of ", members_.size(),
                                                     " devices, ", by_vocabulary.status().message()));
  }

  // Plans the heads of all members one after the other, as CreateHeads creates them. The result has the
  // choices of member `described`; its chunk_rows is the smallest slice_rows of all members.
  absl::StatusOr<PlannedHead> PlanHeads(const HeadConfig& config, const MemoryBytes& beside,
                                        int described) const {
    PlannedHead all;
    for (int i = 0; i < members_.size(); ++i) {
      MemoryBytes taken = beside;
      if (options_.members_share_memory) Add(all.memory, taken);
      absl::StatusOr<PlannedHead> one = members_.backend(i).PlanWholeHead(config, taken);
      if (!one.ok()) return one.status();
      Add(one->memory, all.memory);
      if (i == described) {
        all.compute_dtype = one->compute_dtype;
        all.choices = std::move(one->choices);
      }
      // A member whose plan has no slice_rows does not count.
      const bool says = one->slice_rows > 0;
      if (says && (all.chunk_rows == 0 || one->slice_rows < all.chunk_rows)) all.chunk_rows = one->slice_rows;
    }
    return all;
  }

  // Plans what CreateReplicas creates.
  absl::StatusOr<PlannedHead> PlanReplicas(const HeadConfig& config, const HeadConfig& divided,
                                           const MemoryBytes& beside) const {
    absl::StatusOr<PlannedHead> all = PlanHeads(divided, beside, WithMostClasses(divided, members_.size()));
    if (!all.ok()) return all;
    all->slice_rows = all->chunk_rows;
    all->chunk_rows *= members_.size() / PlacesOf(divided, members_.size());
    all->choices = GroupHead::Describe(std::move(all->choices), divided, members_.size(), all->slice_rows,
                                       LayoutOf(options_, config));
    return all;
  }

  absl::StatusOr<PlannedHead> PlanByVocabulary(const HeadConfig& config, const MemoryBytes& beside) const {
    const HeadConfig split = ByVocabulary(options_, config);
    LOSSD_RETURN_IF_ERROR(CheckSplit(split));
    if (ReplicasOf(split) > 1) return PlanReplicas(config, split, beside);
    absl::StatusOr<PlannedHead> all = PlanHeads(split, beside, WithMostClasses(split, members_.size()));
    if (!all.ok()) return all;
    all->slice_rows = all->chunk_rows;
    all->choices = VocabularyHead::Describe(std::move(all->choices), config, members_.size(),
                                            WhyByVocabulary(options_, config));
    return all;
  }

  absl::Status CheckSplit(const HeadConfig& config) const {
    LOSSD_RETURN_IF_ERROR(ValidateOn(config, members_.size()));
    if (ReplicasOf(config) > 1 && !options_.may_have_replicas) {
      return errors::FieldError("replicas", kOneReplica, config.replicas);
    }
    const int places = PlacesOf(config, members_.size());
    if (!config.shares.empty() || config.vocab_size >= places) return absl::OkStatus();
    return errors::FieldError("vocab_size",
                              absl::StrCat("be at least ", places, ", the devices that it is split over"),
                              config.vocab_size);
  }

  // `divided`: the config that the members use for a head whose config is `config`.
  absl::StatusOr<std::unique_ptr<HeadKernels>> CreateReplicas(const HeadConfig& config,
                                                              const HeadConfig& divided) {
    std::vector<std::unique_ptr<HeadKernels>> heads(static_cast<size_t>(members_.size()));
    std::unique_ptr<Replicas> replicas;
    absl::Status status = CreateHeads(divided, heads);
    if (status.ok() && PlacesOf(divided, members_.size()) > 1) status = Join(heads);
    if (status.ok()) status = Connect(heads, replicas);
    if (!status.ok()) {
      DestroyHeads(heads);
      return status;
    }
    return std::make_unique<GroupHead>(config, LayoutOf(options_, config), &members_, std::move(heads),
                                       std::move(replicas));
  }

  absl::StatusOr<std::unique_ptr<HeadKernels>> CreateByVocabulary(const HeadConfig& config) {
    const HeadConfig split = ByVocabulary(options_, config);
    LOSSD_RETURN_IF_ERROR(CheckSplit(split));
    if (ReplicasOf(split) > 1) return CreateReplicas(config, split);
    return CreateDivided(config);
  }

  // Creates a head with one copy. Its config has passed CheckSplit.
  absl::StatusOr<std::unique_ptr<VocabularyHead>> CreateDivided(const HeadConfig& config) {
    std::vector<std::unique_ptr<HeadKernels>> heads(static_cast<size_t>(members_.size()));
    absl::Status status = CreateHeads(ByVocabulary(options_, config), heads);
    if (status.ok()) status = Join(heads);
    if (!status.ok()) {
      DestroyHeads(heads);
      return status;
    }
    return std::make_unique<VocabularyHead>(
        config, WhyByVocabulary(options_, config), &members_, std::move(heads),
        [this](const HeadConfig& other) -> absl::StatusOr<std::unique_ptr<VocabularyHead>> {
          LOSSD_RETURN_IF_ERROR(CheckSplit(ByVocabulary(options_, other)));
          return CreateDivided(other);
        });
  }

  static std::vector<HeadKernels*> Pointers(const std::vector<std::unique_ptr<HeadKernels>>& heads) {
    std::vector<HeadKernels*> all;
    for (const auto& head : heads) all.push_back(head.get());
    return all;
  }

  // Creates the members' heads one after the other. So if the heads do not fit, it is always the same member
  // that fails.
  absl::Status CreateHeads(const HeadConfig& config, std::vector<std::unique_ptr<HeadKernels>>& heads) {
    for (int i = 0; i < members_.size(); ++i) {
      absl::Status status = members_.On(i, [&] {
        absl::StatusOr<std::unique_ptr<HeadKernels>> head = members_.backend(i).CreateHead(config);
        if (head.ok()) heads[static_cast<size_t>(i)] = *std::move(head);
        return head.status();
      });
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Join(const std::vector<std::unique_ptr<HeadKernels>>& heads) {
    const std::vector<HeadKernels*> all = Pointers(heads);
    return members_.WithAll([&] { return options_.join_classes(all); });
  }

  absl::Status Connect(const std::vector<std::unique_ptr<HeadKernels>>& heads,
                       std::unique_ptr<Replicas>& replicas) {
    const std::vector<HeadKernels*> all = Pointers(heads);
    return members_.WithAll([&]() -> absl::Status {
      absl::StatusOr<std::unique_ptr<Replicas>> made = make_replicas_(all);
      if (!made.ok()) return made.status();
      replicas = *std::move(made);
      if (options_.exchanges) {
        replicas = std::make_unique<TimedReplicas>(std::move(replicas), options_.exchanges->All());
      }
      return absl::OkStatus();
    });
  }

  void DestroyHeads(std::vector<std::unique_ptr<HeadKernels>>& heads) {
    members_
        .ForEach([&](int i) {
          heads[static_cast<size_t>(i)].reset();
          return absl::OkStatus();
        })
        .IgnoreError();
  }

  Members members_;
  // The next two may own the connection between the members, so they are destroyed before the members.
  const GroupOptions options_;
  const MakeReplicas make_replicas_;
};

absl::Status CheckReplicas(const GroupOptions& options, int members) {
  if (options.replicas > 1 && !options.may_have_replicas) {
    return errors::FieldError("replicas", kOneReplica, options.replicas);
  }
  if (options.replicas >= 1 && members % options.replicas == 0) return absl::OkStatus();
  return errors::FieldError("replicas", absl::StrCat("be at least 1 and divide the devices, ", members),
                            options.replicas);
}

}  // namespace

absl::Status RefuseToSplitVocabulary(absl::Span<HeadKernels* const>) {
  return errors::FieldError("split", "be rows: these devices cannot share the classes of a head",
                            Name(Split::kVocabulary));
}

absl::StatusOr<std::unique_ptr<Backend>> CreateGroupBackend(std::vector<std::unique_ptr<Backend>> members,
                                                            MakeReplicas make_replicas,
                                                            const GroupOptions& options) {
  if (members.empty()) return errors::FieldError("members", "not be empty", 0);
  if (options.least_rows < 0) return errors::FieldError("least_rows", "be >= 0", options.least_rows);
  LOSSD_RETURN_IF_ERROR(CheckReplicas(options, static_cast<int>(members.size())));
  const BackendInfo first = members.front()->info();
  for (size_t i = 1; i < members.size(); ++i) {
    const BackendInfo info = members[i]->info();
    if (info.name == first.name && info.default_compute_dtype == first.default_compute_dtype) continue;
    return errors::FieldError(absl::StrCat("members[", i, "]"), absl::StrCat("be like ", first.device),
                              info.device);
  }
  return std::make_unique<GroupBackend>(std::move(members), std::move(make_replicas), options);
}

}  // namespace lossd::kernels
