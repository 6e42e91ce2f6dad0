// SPDX-License-Identifier: Apache-2.0
// The contract between the engine and whatever computes. A Backend is one device. A HeadKernels is the
// tensors of one head on that device and the operations on them. The CPU backend, the CUDA backend, groups of
// backends and backends in other processes implement the contract; the double-precision reference
// (kernels/reference) says what the numbers have to be.
//
// The file begins with what the contract is stated in: choices for people, memory by kind, slices of rows and
// chunks of slices. HeadKernels and Backend follow.
//
// Some members have a default: what a backend or a head cannot do, it does not override. The default answers
// UNIMPLEMENTED, or says that there is nothing of the kind; its comment names which.
//
// Threads. A Backend and all its HeadKernels are driven by one thread at a time (the engine's
// device thread), except the members marked thread-safe.
// Errors. INVALID_ARGUMENT for arguments outside the documented ranges, RESOURCE_EXHAUSTED if memory
// cannot be had, INTERNAL or UNAVAILABLE for a device failure. After an error from a const or a
// validating member nothing has changed. The head that computes checks its arguments (validation.h), for
// whoever uses this library; a head of several devices checks what its members cannot see, and leaves the
// rest to them. A server checks options first where a request comes in (server/messages), with the request's
// names.
#ifndef LOSSD_KERNELS_BACKEND_H_
#define LOSSD_KERNELS_BACKEND_H_

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/head_config.h"
#include "kernels/replica.h"
#include "kernels/teacher_pool.h"

namespace lossd::kernels {

// What was chosen where there was a choice, for people: it is printed and logged, and no code depends on the
// words.
struct Choice {
  std::string what;             // e.g. "loss"
  std::string choice;           // e.g. "after the logits product"
  std::string reason;           // e.g. "few rows"; empty: there is nothing to say
  int64_t workspace_bytes = 0;  // of the head's workspace, that go with it; 0: none of its own

  friend bool operator==(const Choice&, const Choice&) = default;
};

// What memory is used for. A backend plans and counts its memory by kind.
enum class MemoryKind : uint8_t {
  kWeights,      // fp32 master weights, 16-bit compute copies, bias, norm, class weights
  kGradients,    // fp32 accumulators
  kOptimizer,    // momentum and Adam moments
  kWorkspace,    // what is computed on the way: logits, sums, lists, rows being converted
  kSlots,        // on a device: hidden states, gradients, inputs and results of rows, of chunks or clients
  kStaging,      // host buffers that slices are received into and sent from
  kRetained,     // hidden states of deferred microbatches, waiting for their backward pass
  kLedger,       // on the host: targets and weights of open streams, ledgers of open steps
  kHostValues,   // on the host: values of heads that live there (Residency::kHost)
  kTeacherPool,  // on a device: where such heads are copied to, and what their chunks work in
};
inline constexpr size_t kMemoryKinds = 10;

constexpr absl::string_view Name(MemoryKind kind) {
  constexpr absl::string_view kNames[kMemoryKinds] = {"weights",     "gradients",   "optimizer", "workspace",
                                                      "slots",       "staging",     "retained",  "ledger",
                                                      "host_values", "teacher_pool"};
  return kNames[static_cast<size_t>(kind)];
}

// Whether memory of this kind is memory of the host wherever the heads compute.
constexpr bool IsOfHost(MemoryKind kind) {
  return kind == MemoryKind::kStaging || kind == MemoryKind::kLedger || kind == MemoryKind::kHostValues;
}

// Bytes by kind.
struct MemoryBytes {
  std::array<int64_t, kMemoryKinds> by_kind{};

  int64_t& operator[](MemoryKind kind) { return by_kind[static_cast<size_t>(kind)]; }
  int64_t operator[](MemoryKind kind) const { return by_kind[static_cast<size_t>(kind)]; }
  int64_t Total() const {
    int64_t total = 0;
    for (int64_t bytes : by_kind) total += bytes;
    return total;
  }
  // Without what is memory of the host.
  int64_t OnDevice() const {
    int64_t total = 0;
    for (size_t i = 0; i < kMemoryKinds; ++i) total += IsOfHost(static_cast<MemoryKind>(i)) ? 0 : by_kind[i];
    return total;
  }
};

// What a backend holds now and has held at most since it was created.
struct MemoryStats {
  MemoryBytes current;
  MemoryBytes peak;        // each kind's own peak
  int64_t peak_total = 0;  // peak of the sum over kinds
  int64_t limit = 0;       // bytes the plan may reach; 0: unlimited
};

// The target of a row that has none: loss 0, grad_hidden 0, no weight gradient, no GEMM work.
inline constexpr int32_t kIgnoredTarget = -1;

// The most classes of a row whose log-probabilities a slice may ask for: of classes that it names
// (Slice::classes), and of the most probable ones (Slice::top_k).
inline constexpr int32_t kMostGivenClasses = 256;
inline constexpr int32_t kMostTopClasses = 128;

// Where the per-row results of a slice go; each is null (not wanted) or [rows] in host memory.
// Ignored rows get 0 (argmax and top classes: -1). Losses carry the row weight; the others do not. Absent
// rows (IsAbsent) have loss 0; the rest is NaN (argmax and top classes: -1) where their logits are not
// finite, and all else is finite in a slice that has not failed, but for the log-probability of a class whose
// logit is -infinity.
struct RowOutputs {
  float* loss = nullptr;            // with z-loss, times the row weight
  float* lse = nullptr;             // natural log, of the logits after scale and softcap
  float* entropy = nullptr;         // nats, of softmax(z)
  float* target_logprob = nullptr;  // log p_y = z_y - lse
  int32_t* argmax = nullptr;        // the smallest class among those with the largest logit
  float* class_logprobs = nullptr;  // [rows, Slice::class_count]: z_v - lse of Slice::classes
  // [rows, Slice::top_k] each: of the classes with the largest logits, the largest first, and of equal logits
  // the smaller class first. Both or neither.
  float* top_logprobs = nullptr;
  int32_t* top_classes = nullptr;
};

// Sums over rows, in double: of a slice, and added up of a stream, a chunk or a step. They go to the client
// as lossd.v1.MicrobatchSummary. Ignored rows count in nothing; absent rows count as valid, and in the
// entropy if theirs is finite.
struct LossSums {
  double loss = 0.0;          // sum of row losses, z-loss included, row weights applied
  double z_loss = 0.0;        // the z-loss part alone, row weights applied
  double entropy = 0.0;       // nats; only if RowOutputs::entropy is wanted
  double dropped_mass = 0.0;  // probability left out of filtered gradients, over the rows that have one
  // Of sampled gradients, over the rows that have one, of dL/d(logit scale * dot product): the expected
  // square of what sampling adds to it, and its own. The root of their ratio is the predicted relative error.
  // A backend may estimate both from the classes that it has taken.
  double sampling_variance = 0.0;
  double squared_gradient = 0.0;
  int64_t valid_rows = 0;
  int64_t correct_rows = 0;  // argmax == target
  ObjectiveSums objective;
  // Of rows with a teacher, row weights applied: their divergences, and their losses with the targets, each
  // before its weight in Distillation. A loss with targets of weight 0 counts as 0.
  double divergence = 0.0;
  double target_loss = 0.0;

  LossSums& operator+=(const LossSums& more) {
    loss += more.loss;
    z_loss += more.z_loss;
    entropy += more.entropy;
    dropped_mass += more.dropped_mass;
    sampling_variance += more.sampling_variance;
    squared_gradient += more.squared_gradient;
    valid_rows += more.valid_rows;
    correct_rows += more.correct_rows;
    objective += more.objective;
    divergence += more.divergence;
    target_loss += more.target_loss;
    return *this;
  }
  // The predicted relative error of sampled gradients; 0 if nothing was sampled.
  double gradient_error() const {
    return squared_gradient > 0.0 ? std::sqrt(sampling_variance / squared_gradient) : 0.0;
  }
};

// Some rows of one microbatch, in host memory. A slice is the unit of atomicity: either all its
// wanted rows reach the accumulators or none.
//
// With LossOptions::embedding the rows have no loss: of the members in, only those below up to `accumulate`
// and grad_scale may be there, no member of `out` is wanted, and of the sums only valid_rows counts.
//   kRows       `hidden` is null, and grad_hidden gets the row of the weight that each target names, rounded
//   once
//               from its fp32 value or a compute copy; 0 for ignored rows
//   kGradients  `hidden` are gradients: grad_scale times each row, in fp32, is added to the gradient of the
//   weight's
//               row that its target names, where `accumulate` lets it; grad_hidden is null. A row that has a
//               target and a value that is not finite, also after grad_scale, makes its slice fail
struct Slice {
  int64_t rows = 0;
  const void* hidden = nullptr;         // [rows, D], Chunk::hidden_dtype
  const int32_t* targets = nullptr;     // [rows], each in [0, V) or kIgnoredTarget
  const float* row_weights = nullptr;   // [rows] or null (all 1)
  const uint8_t* accumulate = nullptr;  // [rows], 0: keep this row out of the accumulators; null: all in
  float grad_scale = 1.0f;              // g: dL/d(row loss), the same for all rows
  // What sampled gradients take their random numbers from (kernels/decision.h).
  uint64_t sample_seed = 0;  // of the microbatch
  int64_t first_row = 0;     // the number in the microbatch of the slice's first row
  // The rows only keep the places of rows that are not computed again. They are computed like any others, so
  // that the bits of those beside them are the same, but have no part in what the rows of a chunk decide
  // together (kAuto; whether lists have room), and unspecified results.
  bool stands_in = false;
  // Deferred microbatches: a place in Chunk::retained, in bytes, a multiple of the element size; -1: none.
  // With `hidden`, the rows are also kept there, as they are; without (null), they are taken from there.
  int64_t retained_offset = -1;
  // Optional per-row upstream gradients (reduction none), [rows] or null. grad_loss multiplies
  // grad_scale; the other two add dL/dlse and dL/dentropy.
  const float* grad_loss = nullptr;
  const float* grad_lse = nullptr;
  const float* grad_entropy = nullptr;
  // What LossOptions::objective takes with each row, [rows] or null: those that it does not need are not
  // looked at.
  const float* advantages = nullptr;
  const float* old_logprobs = nullptr;
  const float* ref_logprobs = nullptr;
  // With LossOptions::rest: the soft targets of the rows, [rows, target_count] each (kernels/soft_targets.h).
  // `targets` then says which rows count, and whose log-probability and argmax are reported.
  const int32_t* target_classes = nullptr;
  const float* target_weights = nullptr;
  int32_t target_count = 0;  // K, in [1, min(V, kMostSoftTargets)]
  // With Chunk::teacher: the rows' hidden states of the teacher, [rows, D of the teacher],
  // Chunk::hidden_dtype.
  const void* teacher_hidden = nullptr;

  // Classes whose log-probabilities are wanted, each in [0, V), in any order and as often as the caller
  // likes: [rows, class_count], or with shared_classes [class_count], the same for all rows.
  const int32_t* classes = nullptr;
  int32_t class_count = 0;  // in [0, kMostGivenClasses]
  bool shared_classes = false;
  int32_t top_k = 0;  // how many most probable classes are wanted: in [0, min(V, kMostTopClasses)]

  void* grad_hidden = nullptr;  // out: [rows, D], Chunk::hidden_dtype, or null; may equal `hidden`
  RowOutputs out;

  // Set by the backend. A row makes its slice fail if its loss, lse, target_logprob, entropy (if wanted or
  // with a gradient), a factor of its gradient, or a wanted grad_hidden before it is rounded is not finite,
  // and it is not absent: the index of the first such row, else -1. A failed slice has unspecified outputs
  // and accumulated nothing.
  int64_t first_nonfinite_row = -1;
  LossSums sums;
};

// Device memory where hidden states of deferred microbatches wait for their backward pass. Made by
// Backend::AllocateRetained; used through Chunk::retained.
//
// The host reads and writes it where another process computes its rows (docs/scaling.md). ReadBytes and
// WriteBytes are thread-safe, except that a caller must not read or write bytes that another thread is
// writing. By default they answer UNIMPLEMENTED: the host cannot reach the memory.
class RetainedMemory {
 public:
  virtual ~RetainedMemory() = default;
  virtual int64_t size() const = 0;  // bytes
  // Copies what lies at `offset`, to fill `out`. What a chunk keeps there may be read once its results are
  // out.
  virtual absl::Status ReadBytes(int64_t offset, absl::Span<uint8_t> out) const {
    return absl::UnimplementedError("the host cannot read retained memory");
  }
  // Copies `in` to `offset`. Chunks that are submitted afterwards find it there.
  virtual absl::Status WriteBytes(int64_t offset, absl::Span<const uint8_t> in) {
    return absl::UnimplementedError("the host cannot write retained memory");
  }
};

class HeadKernels;

// Rows computed together. Owned by the caller, untouched by it until on_done has run.
struct Chunk {
  LossOptions options;
  DType hidden_dtype = DType::kBFloat16;
  bool accumulate_gradients = true;  // false: frozen head, loss only, or rows of an embedding
  bool independent = false;          // what became of the chunks before it may not decide how it is computed
  // Of independent chunks that accumulate: their place in a fixed order, e.g. a number that counts up. Where
  // a head has several devices, it decides which of them computes the chunk, so that sums are the same each
  // time.
  uint64_t turn = 0;
  RetainedMemory* retained = nullptr;  // for slices with a retained_offset; of the same backend
  // With options.distillation: the head whose softmax the rows are compared with, which
  // HeadKernels::CheckTeacher takes. All other operations on it wait for the chunk; its own chunks and those
  // of others that it teaches may be in flight too. The slices have neither a retained_offset nor upstream
  // gradients of lse or entropy.
  HeadKernels* teacher = nullptr;
  absl::Span<Slice> slices;  // together at most HeadKernels::chunk_rows() rows

  // Set by the backend unless it refuses the chunk, and final when on_results runs: how it was computed, as
  // far as that depends on the chunk, its gradients first.
  std::vector<Choice> choices;
  // How its gradients were computed: kFiltered, kSampled, or kExact, which is also said of a chunk that wants
  // none and of one whose filter was given up. sample_threshold is that of the chunk's sampled gradients. Set
  // and final as `choices`.
  Gradients gradients = Gradients::kExact;
  float sample_threshold = 0.0f;
};

// Each is called exactly once per chunk, on_results first; on the driving thread or on one of the
// backend's own. They must not block for long and must not call into the backend.
struct ChunkCallbacks {
  // Host outputs of all slices, first_nonfinite_row and sums are complete (weight gradients may still be
  // in the making), or the whole chunk failed with this status and accumulated nothing, unless on_done says
  // DATA_LOSS. From here on the backend touches none of the slices' host arrays.
  absl::AnyInvocable<void(absl::Status)> on_results;
  // The chunk has left the device. An error here that on_results did not report means that the
  // accumulators of the head can no longer be trusted; so does DATA_LOSS whatever on_results said (of several
  // devices that share the chunk some failed and others did not; or a gradient of a hidden state turned out
  // not to be finite when its row had been accumulated).
  absl::AnyInvocable<void(absl::Status)> on_done;
};

// One head on the device. Destroying it frees its memory; no chunk may be in flight.
class HeadKernels {
 public:
  virtual ~HeadKernels() = default;

  virtual const HeadConfig& config() const = 0;
  virtual DType compute_dtype() const = 0;
  // The most rows a chunk may hold; >= 1, fixed for the life of the head.
  virtual int64_t chunk_rows() const = 0;
  // The most rows that one slice may have, and that an independent chunk computes together; >= 1, fixed for
  // the life of the head. Less than chunk_rows() where several devices share a chunk.
  virtual int64_t slice_rows() const { return chunk_rows(); }
  // Bytes this head holds, by kind. Thread-safe.
  virtual MemoryBytes memory() const = 0;
  // How a full chunk with gradients is computed whose options are the defaults, with the gradients that the
  // head's config names; and what was chosen when the head was made.
  virtual std::vector<Choice> Describe() const = 0;
  // Of a head that lives in host memory: how it has come to the device and gone. Nullopt, the default: it
  // lives on the device. Thread-safe.
  virtual std::optional<PagingStats> paging() const { return std::nullopt; }

  // OK if chunks of this head may have such a teacher (Chunk::teacher), a head of the same backend:
  // INVALID_ARGUMENT as ValidateTeacher, with the field "distillation.teacher"; UNIMPLEMENTED, the default,
  // if heads like these two are not distilled. Thread-safe; fixed for the life of both.
  virtual absl::Status CheckTeacher(const HeadKernels& teacher) const {
    return absl::UnimplementedError(
        "distillation.teacher must be absent: this server, or the way in which the head lies on its devices, "
        "does not distil yet");
  }

  // Computes a chunk: row results, grad_hidden where wanted, and (accumulate_gradients) adds the
  // weight gradients to the accumulators. At most Backend::max_chunks_in_flight() chunks may be
  // unfinished; chunks finish in the order of submission. All other operations on the head wait
  // for those in flight.
  virtual void Submit(Chunk* chunk, ChunkCallbacks callbacks) = 0;

  // Copies rows [row_begin, row_begin + rows) of a tensor between the device's fp32 and host memory
  // in `dtype`. `bytes` must be exactly rows * cols * SizeOf(dtype). Writing a value refreshes the
  // compute copy. NOT_FOUND if the head has no such tensor.
  virtual absl::Status ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                  absl::Span<uint8_t> out) = 0;
  virtual absl::Status WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                   absl::Span<const uint8_t> in) = 0;
  // Adds to rows of a gradient accumulator: gradient += scale * in, where `in` is as in WriteTensor. The
  // product and the sum are each rounded to fp32, so all backends give the same bits. Values are not
  // checked. NOT_FOUND if the head accumulates no gradient of `param`. After an error of the device some
  // of the rows may have been added.
  virtual absl::Status AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                                   absl::Span<const uint8_t> in) = 0;

  // The 2-norm over all accumulated gradients, computed in double; not finite if a gradient is not.
  virtual absl::StatusOr<double> GradNorm() = 0;
  // One update of every trained parameter, then zeroes the gradients. `update` is the 1-based count
  // of updates including this one (bias correction; steps that were skipped do not count).
  // INVALID_ARGUMENT if an option or `update` is out of range; FAILED_PRECONDITION if the head is not
  // trainable or reserved less optimizer state than `options` needs. A replica updates its shard, zeroes the
  // gradients of that, and has moments of that only. A shard has whole rows of the weight, so lazy rows are
  // the same rows on any number of devices.
  virtual absl::Status ApplyStep(const OptimizerOptions& options, int64_t update) = 0;
  virtual absl::Status ZeroGradients() = 0;
  // Zeroes what the optimizer keeps beside the values, as in a new head; a head that keeps nothing stays as
  // it is. The next update counts from 1. An error of the device may leave moments half-written.
  virtual absl::Status ZeroMoments() = 0;

  // ---- Of heads whose classes are divided among devices ----
  // By default a head is not divided so, and no part of it lies in another process.

  // Whether SetShares can divide the classes in another way. Thread-safe; fixed for the life of the head.
  virtual bool divides_classes() const { return false; }
  // Says whether the head may become so: `divided` has the config, the rows and the memory that it would
  // have.
  using Accept = absl::FunctionRef<absl::Status(const HeadKernels& divided)>;
  // HeadConfig::shares become these. Values and optimizer state keep every bit; gradients are zero before and
  // after, and the caller sees to it that nothing has accumulated. The head's config(), chunk_rows(),
  // slice_rows(), memory() and Describe() may change. The devices have both divisions while tensors are
  // copied, a few MiB at a time through memory of the host. After an error the head is as it was:
  // INVALID_ARGUMENT (shares), RESOURCE_EXHAUSTED (no room for both divisions), what `accept` returns,
  // UNAVAILABLE; FAILED_PRECONDITION, the default, unless divides_classes().
  virtual absl::Status SetShares(const std::vector<int32_t>& shares, Accept accept) {
    return absl::FailedPreconditionError(
        "the head is not split by vocabulary over several devices, or has replicas (nothing changed)");
  }

  // The parts of the head that lie in other processes, which can save and load their parts by themselves.
  virtual std::vector<RemotePart> remote_parts() const { return {}; }
  // From now on WriteTensor passes by the parts on these ranks, which get their rows in another way. Empty:
  // it writes all parts again.
  virtual void PassBy(absl::Span<const int> ranks) {}
};

// The replicas of one head on several devices of one kind (replica.h). Driven by the backends' driving
// thread, while no chunk of any replica is in flight. An error may leave tensors half-written.
class Replicas {
 public:
  virtual ~Replicas() = default;
  // Adds up the accumulated gradients of all replicas, in a fixed order: the sum goes to the replica that
  // updates the parameter, and the others' become zero.
  virtual absl::Status SumGradients() = 0;
  // Every replica computes with the values that the others have updated. What ReadTensor gives of a replica's
  // values is right for its shard only.
  virtual absl::Status SpreadValues() = 0;
};

struct BackendInfo {
  std::string name;                               // "cpu" or "cuda"
  std::string device;                             // e.g. "2 threads, OpenBLAS" or "cuda:0 NVIDIA H200"
  DType default_compute_dtype = DType::kFloat32;  // for heads that do not ask for one
  std::vector<std::string> uuids = {};            // of the GPUs, "GPU-..."
  bool mps = false;                               // under NVIDIA's Multi-Process Service
  std::string gpu_sharing = {};                   // device_choice.h; empty: it has no GPU
};

// Memory for slices in transit, in the form the device copies fastest (pinned, for a GPU).
class StagingMemory {
 public:
  virtual ~StagingMemory() = default;
  virtual absl::Span<uint8_t> bytes() = 0;  // aligned to 64
};

// How Backend::AdoptStaging treats the memory.
struct AdoptOptions {
  // A descriptor by which other processes can map the same memory from its begin, the caller's: it is copied
  // if it is needed for longer. -1: there is none.
  int descriptor = -1;
  // Whether the memory counts here; not if another process counts the same pages.
  bool counted = true;
};

// Memory of a device that programs of the host can map too, so that rows need no copy through memory of the
// host. It is zero at first. Destroying the object, which must happen before the backend ends, takes the
// memory from this process; a program that has mapped it keeps the device's memory until it unmaps it or
// ends. Thread-safe.
class SharedDeviceMemory {
 public:
  virtual ~SharedDeviceMemory() = default;
  // Addresses of the device, in whole pages of it: code of the host must not follow them. The backend takes
  // hidden states from there and writes gradients and tensors there, as with staging memory. Other processes
  // may write to it at any time (Backend::AdoptStaging).
  virtual absl::Span<uint8_t> bytes() const = 0;
  // What another process imports it from, e.g. cuMemImportFromShareableHandle. Stays this object's.
  virtual int descriptor() const = 0;
  // Copies `from`, a part of bytes(), to memory of the host, or the other way, and waits for it. UNAVAILABLE:
  // the device is lost.
  virtual absl::Status CopyToHost(absl::Span<const uint8_t> from, uint8_t* to) const = 0;
  virtual absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const = 0;
};

// A head as it would be: what its HeadKernels would say.
struct PlannedHead {
  MemoryBytes memory;
  DType compute_dtype = DType::kFloat32;
  int64_t chunk_rows = 0;
  int64_t slice_rows = 0;
  // As HeadKernels::Describe, without what is known of a head on its device alone.
  std::vector<Choice> choices;
};

// What a device exchanges with others, ranks or devices of its process.
enum class ExchangeKind {
  kSumGradients,     // of a step, by rows
  kSpreadValues,     // of a step, by rows
  kRowStatistics,    // of a chunk by vocabulary: what the parts of a head say of its rows
  kHiddenGradients,  // of a chunk by vocabulary: the sums that go through the norm, and its gradients
};
inline constexpr size_t kExchangeKinds = 4;

constexpr absl::string_view Name(ExchangeKind kind) {
  constexpr std::array<absl::string_view, kExchangeKinds> kNames = {"sum_gradients", "spread_values",
                                                                    "row_statistics", "hidden_gradients"};
  return kNames[static_cast<size_t>(kind)];
}

// Since the start, with the wait for the others; by kind.
using ExchangeTimes = std::array<absl::Duration, kExchangeKinds>;

// What a member of a group has done, since its thread started.
struct MemberWork {
  int64_t chunks = 0;   // or parts of them, computed without an error
  int64_t rows = 0;     // of these, those without a target included
  absl::Duration busy;  // there was a chunk to compute, or something else to do
};

// What is known of one member of a group (kernels/group).
struct MemberState {
  std::string device;
  MemoryStats memory;  // members that count their memory together: all of it, of member 0
  MemberWork work;
  ExchangeTimes exchanges;  // of the time that it was busy; none without GroupOptions::exchanges
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual BackendInfo info() const = 0;          // thread-safe
  virtual MemoryStats memory() const = 0;        // thread-safe
  virtual int max_chunks_in_flight() const = 0;  // thread-safe; >= 1
  // What each member of a group has done, in order. Empty, the default: the backend is one device.
  // Thread-safe.
  virtual std::vector<MemberState> MemberStates() const { return {}; }

  // What a head with this config would hold on the device, by kind. Thread-safe.
  virtual absl::StatusOr<MemoryBytes> PlanHead(const HeadConfig& config) const = 0;
  // What CreateHead would make now, if `beside` were in use too; or the error that it would end with. Nothing
  // is held or counted. That a library or another device then fails is not foreseen. By default the plan is
  // PlanHead's memory and the config's compute_dtype alone. Thread-safe.
  virtual absl::StatusOr<PlannedHead> PlanWholeHead(const HeadConfig& config,
                                                    const MemoryBytes& beside) const {
    absl::StatusOr<MemoryBytes> memory = PlanHead(config);
    if (!memory.ok()) return memory.status();
    PlannedHead planned;
    planned.memory = *memory;
    planned.compute_dtype = config.compute_dtype;
    return planned;
  }
  // Allocates a head; its tensors are zero (norm gain and class weights: one). RESOURCE_EXHAUSTED
  // with the plan's numbers if it does not fit; then nothing is held.
  virtual absl::StatusOr<std::unique_ptr<HeadKernels>> CreateHead(const HeadConfig& config) = 0;

  // ---- Memory for rows; thread-safe ----
  // Counted as MemoryKind::kStaging; freed when the result is destroyed, which must be before the backend.
  virtual absl::StatusOr<std::unique_ptr<StagingMemory>> AllocateStaging(int64_t bytes) = 0;
  // Makes `memory` of somebody else, whole pages, staging memory as fast as what AllocateStaging gives; for
  // example memory that a server shares with another process. Counted as MemoryKind::kStaging, unless the
  // options say otherwise, until the result is destroyed, which must be before the memory goes and before the
  // backend. RESOURCE_EXHAUSTED if it would pass a limit, or the backend's error. UNIMPLEMENTED, the default:
  // the backend takes no memory of others.
  //
  // Other processes may write to the memory at any time. So a backend reads the hidden states of a slice
  // once, and takes every decision by what it has read.
  virtual absl::StatusOr<std::unique_ptr<StagingMemory>> AdoptStaging(absl::Span<uint8_t> memory,
                                                                      const AdoptOptions& options) {
    return absl::UnimplementedError("the backend takes no memory of others");
  }
  // Counted as MemoryKind::kRetained; freed when the result is destroyed, which must be before the backend.
  virtual absl::StatusOr<std::unique_ptr<RetainedMemory>> AllocateRetained(int64_t bytes) = 0;
  // Counts memory of the host that the caller will allocate by and by, until the backend ends.
  // RESOURCE_EXHAUSTED as CreateHead, if the plan includes memory of the host.
  virtual absl::Status PlanHostMemory(MemoryKind kind, int64_t bytes) = 0;

  // ---- Memory of the device that programs of the host can map; thread-safe ----
  // The UUIDs of the devices whose memory ShareDeviceMemory gives, in the order of the devices. Empty, the
  // default: it gives none.
  virtual std::vector<std::string> SharingDevices() const { return {}; }
  // `bytes` > 0, rounded up to whole pages, of `device`, one of SharingDevices(), that all devices of this
  // backend reach. Counted as MemoryKind::kSlots. RESOURCE_EXHAUSTED if it would pass a limit; UNIMPLEMENTED,
  // the default, if the device or its driver cannot share memory, or if nothing connects it with another
  // device.
  virtual absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> ShareDeviceMemory(absl::string_view device,
                                                                                int64_t bytes) {
    return absl::UnimplementedError("the server shares no memory of a GPU");
  }
  // Lets this device read and write memory that another backend of this process shares, SharedDeviceMemory's
  // bytes(), as long as it is there. UNIMPLEMENTED, the default, if nothing connects the two devices.
  virtual absl::Status ReachDeviceMemory(absl::Span<uint8_t> memory) {
    return absl::UnimplementedError("these devices share no memory");
  }
};

// The classes of row `row` whose log-probabilities are wanted, [class_count].
inline const int32_t* ClassesOf(const Slice& slice, int64_t row) {
  return slice.shared_classes ? slice.classes : slice.classes + row * slice.class_count;
}

// Whether row `row`, which has a target, is absent: its weight is 0 and nothing else of it has a gradient. An
// absent row adds nothing to any sum, whatever its hidden state holds (docs/math.md, "Rows of weight 0").
inline bool IsAbsent(const Slice& slice, int64_t row) {
  return slice.row_weights != nullptr && slice.row_weights[row] == 0.0f &&
         (slice.grad_lse == nullptr || slice.grad_lse[row] == 0.0f) &&
         (slice.grad_entropy == nullptr || slice.grad_entropy[row] == 0.0f);
}

// The soft targets of row `row`.
inline void SoftRowOf(Rest rest, const Slice& slice, int64_t row, SoftRow& soft) {
  const auto count = static_cast<size_t>(slice.target_count);
  const int64_t first = row * slice.target_count;
  MakeSoftRow(rest, {slice.target_classes + first, count}, {slice.target_weights + first, count}, soft);
}

// What is sent with row `row` for its objective; 0 for what is not.
inline ObjectiveNumbers<double> NumbersOf(const Slice& slice, int64_t row) {
  const auto at = [row](const float* values) { return values == nullptr ? 0.0 : double{values[row]}; };
  return {at(slice.advantages), at(slice.old_logprobs), at(slice.ref_logprobs)};
}

// dL/d(row loss), before the row weight has been divided out.
inline double GradLossOf(const Slice& slice, int64_t row) {
  double gradient = double{slice.grad_scale};
  if (slice.row_weights != nullptr) gradient *= double{slice.row_weights[row]};
  if (slice.grad_loss != nullptr) gradient *= double{slice.grad_loss[row]};
  return gradient;
}

// dL/dentropy of row `row`: what is sent with it, and the objective's entropy bonus.
inline double GradEntropyOf(const Objective& objective, const Slice& slice, int64_t row) {
  const double sent = slice.grad_entropy == nullptr ? 0.0 : double{slice.grad_entropy[row]};
  if (objective.entropy_bonus == 0.0f) return sent;
  return sent - double{objective.entropy_bonus} * GradLossOf(slice, row);
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_BACKEND_H_
