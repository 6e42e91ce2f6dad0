// The implementation of Engine; see engine.h for the contract.
//
// Lock order: mutex_ is a leaf with respect to observers and staging waiters: neither is ever called with
// it held. Slices are destroyed (and their buffers given back) on the notifier's thread.
#ifndef LOSSD_SERVER_ENGINE_ENGINE_IMPL_H_
#define LOSSD_SERVER_ENGINE_ENGINE_IMPL_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/engine/contribution_ledger.h"
#include "server/engine/deferred.h"
#include "server/engine/engine.h"
#include "server/engine/ledger.h"
#include "server/engine/notifier.h"
#include "server/engine/range_allocator.h"
#include "server/engine/sequencer.h"
#include "server/engine/stream_state.h"
#include "server/engine/work_queue.h"

namespace lossd::engine {

class EngineImpl final : public Engine {
 public:
  EngineImpl(const EngineOptions& options, kernels::Backend* backend, uint64_t incarnation,
             EngineObserver* observer, std::unique_ptr<StagingPool> staging,
             std::unique_ptr<kernels::RetainedMemory> retained);
  ~EngineImpl() override;

  StagingPool& staging() override { return *staging_; }
  uint64_t incarnation() const override { return incarnation_; }
  EngineStats stats() const override;

  absl::Status CreateHead(absl::string_view name, const kernels::HeadConfig& config) override;
  absl::Status PublishHead(absl::string_view name) override;
  absl::Status DeleteHead(absl::string_view name) override;
  absl::StatusOr<HeadSnapshot> Describe(absl::string_view name) const override;
  std::vector<HeadSnapshot> List() const override;
  absl::Status OnDevice(absl::string_view name,
                        absl::FunctionRef<absl::Status(head::Head&)> operation) override;

  absl::StatusOr<double> GradNorm(absl::string_view name, std::optional<uint64_t> step) override;
  absl::StatusOr<StepResult> ApplyStep(absl::string_view name, const StepRequest& request,
                                       std::vector<std::string>* missing) override;
  absl::Status ZeroGradients(absl::string_view name, uint64_t step) override;
  absl::Status DistrustWeights(absl::string_view name, const absl::Status& why) override;
  absl::Status ResetStep(absl::string_view name, const head::Progress& progress,
                         const std::optional<head::AppliedStep>& last_step) override;

  absl::StatusOr<Contribution> OpenContribution(const ContributionSpec& spec) override;
  uint64_t AwaitTurn(const Contribution& contribution, absl::AnyInvocable<void()> ready) override;
  bool ForgetTurn(const Contribution& contribution, uint64_t ticket) override;
  absl::StatusOr<int64_t> AddRows(const Contribution& contribution, RowRange rows,
                                  absl::Span<const uint8_t> values) override;

  absl::StatusOr<std::unique_ptr<Stream>> Open(StreamSpec spec,
                                               std::shared_ptr<StreamObserver> observer) override;
  absl::StatusOr<std::unique_ptr<Stream>> OpenBackward(BackwardSpec spec,
                                                       std::shared_ptr<StreamObserver> observer) override;
  absl::StatusOr<bool> Release(absl::string_view name, uint64_t microbatch_id) override;
  int64_t ExpireRetained(absl::Time limit) override;

 private:
  friend class StreamHandle;

  // Bytes of a row in a group's area: of the widest dtype, so that groups have the same rows in all of them.
  static int64_t AreaRowBytes(const kernels::HeadConfig& config) {
    return config.hidden_size * static_cast<int64_t>(sizeof(float));
  }

  // A contribution that waits for its turn.
  struct TurnWaiter {
    uint64_t ticket = 0;
    uint64_t contribution_id = 0;
    uint64_t generation = 0;
    absl::AnyInvocable<void()> ready;
  };

  // One head and everything that is going on with it. Entries live until their head is deleted; `head`
  // itself belongs to the device thread, the rest to mutex_.
  struct Entry : std::enable_shared_from_this<Entry> {
    Entry(std::string head_name, const kernels::HeadConfig& head_config, const EngineOptions& options)
        : name(std::move(head_name)),
          config(head_config),
          ledger(options.max_ledger_rows, options.max_step_microbatches),
          contributions(options.max_ledger_rows, options.max_step_microbatches) {}

    const std::string name;
    const kernels::HeadConfig config;
    std::unique_ptr<head::Head> head;
    kernels::DType compute_dtype = kernels::DType::kFloat32;
    int64_t chunk_rows = 1;
    kernels::MemoryBytes memory;
    std::vector<kernels::Choice> choices;
    std::vector<kernels::Choice> last_chunk_choices;
    bool published = false;
    bool deleting = false;
    uint64_t step = 0;
    uint64_t updates = 0;     // head::Progress
    uint64_t generation = 0;  // of the gradients: another number whenever they were zeroed, over all heads
    // Set when accumulators may be half-written; streams are refused until ResetStep or ZeroGradients.
    absl::Status distrust;
    // Set when weights may be half-updated; streams and steps are refused until ResetStep.
    absl::Status weights_distrust;
    WorkQueue queue;
    Ledger ledger;
    ContributionLedger contributions;
    // Deterministic mode, unless frozen: the order of accumulation, and the areas it assigns.
    std::unique_ptr<Sequencer> sequencer;
    std::vector<TurnWaiter> turn_waiters;
    std::shared_ptr<kernels::StagingMemory> areas;
    int64_t area_bytes() const { return sequencer->group_rows() * AreaRowBytes(config); }
    uint64_t arrivals = 0;        // slices in order and operations so far
    bool group_was_last = false;  // groups and other chunks take turns
    DeferredMicrobatches deferred;
    std::vector<std::shared_ptr<StreamState>> streams;
    int64_t chunks_in_flight = 0;
    int64_t total_rows = 0;
    std::optional<head::AppliedStep> last_step;  // step - 1
    // The microbatches and contributions that were whole in it, ascending; nothing if another process applied
    // it.
    std::optional<std::vector<uint64_t>> last_ids;
  };
  using EntryPtr = std::shared_ptr<Entry>;

  // A chunk on the device.
  struct Flight;
  // The same of a group, in deterministic mode.
  struct GroupFlight;

  // Something to run on the device thread that is not bound to an existing head.
  struct DeviceTask {
    absl::FunctionRef<void()> run;
    absl::Notification done;
  };

  void DeviceLoop();
  bool RunNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool RunNextOf(const EntryPtr& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunOperation(Entry& entry, Operation* operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool LaunchNextChunk(const EntryPtr& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LaunchChunk(const EntryPtr& entry, std::vector<std::unique_ptr<SliceWork>> works)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnResults(Flight& flight, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDone(const std::shared_ptr<Flight>& flight, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  void SettleSlice(Flight& flight, size_t index, bool accumulated) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What chunks of both kinds have in common.
  void Launch(Entry& entry, kernels::Chunk* chunk, kernels::ChunkCallbacks callbacks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Deliver(SliceWork& work, double compute_seconds) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Distrust(Entry& entry, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaveDevice(Entry& entry, std::vector<std::unique_ptr<SliceWork>> works)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status RunDeviceTask(absl::FunctionRef<void()> run) ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- Deterministic mode (engine_groups.cc) ----
  // Rows of the groups of a head; 0: it has none.
  int64_t GroupRows(const kernels::HeadConfig& config, int64_t chunk_rows) const;
  void RequestRoom(const EntryPtr& entry, const std::shared_ptr<StreamState>& stream, RowRange rows,
                   int64_t bytes, RoomWaiter waiter) ABSL_LOCKS_EXCLUDED(mutex_);
  // Hands out rooms. That of `stream`, if there is one, goes to the caller, to be called without the lock.
  absl::AnyInvocable<void()> GrantRooms(Entry& entry, const StreamState* stream = nullptr)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReturnRoom(const std::weak_ptr<Entry>& entry, size_t area, uint64_t room) ABSL_LOCKS_EXCLUDED(mutex_);
  void SubmitInOrder(Entry& entry, std::unique_ptr<SliceWork>& work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool LaunchNextGroup(const EntryPtr& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LaunchGroup(const EntryPtr& entry, std::unique_ptr<GroupAssembly> group)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  kernels::Slice MakeSlice(GroupFlight& flight, const GroupAssembly::Segment& segment) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void FillGaps(GroupFlight& flight);
  void DeliverFromGroup(GroupFlight& flight, SliceWork& work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnGroupResults(GroupFlight& flight, absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  void OnGroupDone(const std::shared_ptr<GroupFlight>& flight, absl::Status status)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void SettleGroup(GroupFlight& flight, bool accumulated) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  SliceLimits LimitsFor(const Entry& entry, bool accumulates) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::StatusOr<EntryPtr> Find(absl::string_view name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  HeadSnapshot Snapshot(const Entry& entry) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status RunOnHead(absl::string_view name,
                         absl::FunctionRef<absl::Status(Entry&, head::Head&)> operation)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status CheckStepComplete(const Entry& entry, const StepRequest& request,
                                 std::vector<std::string>* missing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  StepResult ResultOf(const Entry& entry) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<std::string> MissingOf(const Entry& entry, absl::Span<const uint64_t> ids) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<std::string> HalvesOf(const Entry& entry, absl::Span<const uint64_t> ids) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static std::vector<uint64_t> CompleteIdsOf(const Entry& entry);
  static bool HasTurn(const Entry& entry, uint64_t contribution_id);
  // Calls those whose turn it is, or whose gradients are gone.
  void CallTurns(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckContribution(const Entry& entry, const Contribution& contribution) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status CheckRepeat(const Entry& entry, const StepRequest& request,
                                  std::vector<std::string>* missing);
  static absl::Status CheckTrusted(const Entry& entry);
  absl::Status ClearGradients(Entry& entry, head::Head& head) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status StepFailed(Entry& entry, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  void EnterStep(Entry& entry, uint64_t step, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Shared ends of Open and OpenBackward.
  absl::StatusOr<EntryPtr> FindForStream(absl::string_view name) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::unique_ptr<Stream>> Admit(const EntryPtr& entry, std::shared_ptr<StreamState> state)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ReserveRetained(Entry& entry, StreamState& state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void NoteChoices(Entry& entry, const kernels::Chunk& chunk) ABSL_LOCKS_EXCLUDED(mutex_);

  void FailStream(Entry& entry, StreamState& stream, absl::Status why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailStreams(Entry& entry, absl::FunctionRef<bool(const StreamState&)> wanted, const absl::Status& why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropFailed(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishIfReady(Entry& entry, const std::shared_ptr<StreamState>& stream)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const EngineOptions options_;
  kernels::Backend* const backend_;
  const uint64_t incarnation_;
  EngineObserver default_observer_;
  EngineObserver* const observer_;
  const std::unique_ptr<StagingPool> staging_;
  const std::unique_ptr<kernels::RetainedMemory> retained_;  // null: none
  RangeAllocator retained_allocator_;

  mutable absl::Mutex mutex_;
  absl::CondVar work_;  // something may be runnable, or a chunk finished
  std::map<std::string, EntryPtr, std::less<>> entries_ ABSL_GUARDED_BY(mutex_);
  std::string last_served_ ABSL_GUARDED_BY(mutex_);  // heads take turns
  std::deque<DeviceTask*> tasks_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_generation_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_turn_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t open_streams_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t rooms_lent_ ABSL_GUARDED_BY(mutex_) = 0;
  int chunks_in_flight_ ABSL_GUARDED_BY(mutex_) = 0;
  // Of those, the ones that accumulate, are no groups and have no results yet (chunk_policy.h).
  int chunks_without_results_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Notifier notifier_;  // its events take mutex_
  std::thread device_thread_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ENGINE_IMPL_H_
