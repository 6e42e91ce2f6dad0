// SPDX-License-Identifier: Apache-2.0
// Backend is the interface between the engine and a device that computes. A Backend is one device. A
// HeadKernels has the tensors of one head on that device and the operations on them. The CPU backend, the
// CUDA backend, groups of backends and backends in other processes implement these interfaces. The
// double-precision reference (kernels/reference) defines the correct results.
//
// The file first declares the types that the interfaces use: choices for people, memory by kind, slices of
// rows and chunks of slices. HeadKernels and Backend follow.
//
// Some members have a default, which a backend or a head overrides only if it supports the operation. The
// default returns UNIMPLEMENTED or an empty result; the member's comment says which.
//
// Threads. A Backend and all its HeadKernels are driven by one thread at a time (the engine's
// device thread), except the members marked thread-safe.
// Errors. INVALID_ARGUMENT for arguments outside the documented ranges, RESOURCE_EXHAUSTED if there is too
// little memory, INTERNAL or UNAVAILABLE for a device failure. After an error from a const or a validating
// member nothing has changed. A head checks its arguments itself (validation.h). A head of several devices
// makes only the checks that its members cannot make; the members make the other checks. A server also checks
// options when it receives a request (server/messages), and names the fields as the request does.
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

// One choice between several ways to compute something. It is printed and logged for people; no code depends
// on the texts.
struct Choice {
  std::string what;             // e.g. "loss"
  std::string choice;           // e.g. "after the logits product"
  std::string reason;           // e.g. "few rows"; may be empty
  int64_t workspace_bytes = 0;  // bytes of the head's workspace for this choice; 0: none

  friend bool operator==(const Choice&, const Choice&) = default;
};

// The purpose of memory. A backend plans and counts its memory by kind.
enum class MemoryKind : uint8_t {
  kWeights,    // fp32 master weights, 16-bit compute copies, bias, norm, class weights
  kGradients,  // fp32 accumulators
  kOptimizer,  // momentum and Adam moments
  kWorkspace,  // intermediate results: logits, sums, lists, rows being converted
  // On a device: hidden states, gradients, inputs and results of rows, for chunks or shared with clients.
  kSlots,
  kStaging,      // host buffers that slices are received into and sent from
  kRetained,     // hidden states of deferred microbatches
  kLedger,       // on the host: targets and weights of open streams, ledgers of open steps
  kHostValues,   // on the host: values of heads that live there (Residency::kHost)
  kTeacherPool,  // on a device: the pool that such heads are copied to, and the workspace of their chunks
};
inline constexpr size_t kMemoryKinds = 10;

constexpr absl::string_view Name(MemoryKind kind) {
  constexpr absl::string_view kNames[kMemoryKinds] = {"weights",     "gradients",   "optimizer", "workspace",
                                                      "slots",       "staging",     "retained",  "ledger",
                                                      "host_values", "teacher_pool"};
  return kNames[static_cast<size_t>(kind)];
}

// Whether memory of this kind is always host memory, even if the heads compute on a GPU.
constexpr bool IsOfHost(MemoryKind kind) {
  return kind == MemoryKind::kStaging || kind == MemoryKind::kLedger || kind == MemoryKind::kHostValues;
}

// Bytes of memory by kind.
struct MemoryBytes {
  std::array<int64_t, kMemoryKinds> by_kind{};

  int64_t& operator[](MemoryKind kind) { return by_kind[static_cast<size_t>(kind)]; }
  int64_t operator[](MemoryKind kind) const { return by_kind[static_cast<size_t>(kind)]; }
  int64_t Total() const {
    int64_t total = 0;
    for (int64_t bytes : by_kind) total += bytes;
    return total;
  }
  // The sum without the kinds that are host memory.
  int64_t OnDevice() const {
    int64_t total = 0;
    for (size_t i = 0; i < kMemoryKinds; ++i) total += IsOfHost(static_cast<MemoryKind>(i)) ? 0 : by_kind[i];
    return total;
  }
};

// The memory that a backend uses now, and the peaks since it was created.
struct MemoryStats {
  MemoryBytes current;
  MemoryBytes peak;        // the peak of each kind by itself
  int64_t peak_total = 0;  // peak of the sum over kinds
  int64_t limit = 0;       // the most bytes that may be planned; 0: unlimited
};

// The target of an ignored row: loss 0, grad_hidden 0, no weight gradient, and no work in matrix products.
inline constexpr int32_t kIgnoredTarget = -1;

// The most classes of a row for which a slice may ask for log-probabilities: kMostGivenClasses for named
// classes (Slice::classes), kMostTopClasses for the most probable classes (Slice::top_k).
inline constexpr int32_t kMostGivenClasses = 256;
inline constexpr int32_t kMostTopClasses = 128;

// Where the results of a slice's rows are written. Each pointer is null (not wanted) or [rows] in host
// memory. Ignored rows get 0 (argmax and top classes: -1). Losses are multiplied by the row weight; other
// results are not. Absent rows (IsAbsent) have loss 0; if their logits are not finite, their other results
// are NaN (argmax and top classes: -1). All other results of a slice that has not failed are finite, except
// the log-probability of a class whose logit is -infinity.
struct RowOutputs {
  float* loss = nullptr;            // with the z-loss, times the row weight
  float* lse = nullptr;             // natural logarithm, of the logits after scale and softcap
  float* entropy = nullptr;         // nats, of softmax(z)
  float* target_logprob = nullptr;  // log p_y = z_y - lse
  int32_t* argmax = nullptr;        // the smallest class among those with the largest logit
  float* class_logprobs = nullptr;  // [rows, Slice::class_count]: z_v - lse of Slice::classes
  // The classes with the largest logits and their log-probabilities, [rows, Slice::top_k] each; or both are
  // null. The largest logit comes first; of classes with equal logits, the smaller class comes first.
  float* top_logprobs = nullptr;
  int32_t* top_classes = nullptr;
};

// Sums over the rows of a slice, in double. They are also added up over a stream, a chunk or a step. Clients
// get them in lossd.v1.MicrobatchSummary. Ignored rows do not count. Absent rows count as valid rows; they
// count in `entropy` if their entropy is finite.
struct LossSums {
  double loss = 0.0;          // sum of row losses, z-loss included, row weights applied
  double z_loss = 0.0;        // the z-loss part of `loss`
  double entropy = 0.0;       // nats; only if RowOutputs::entropy is wanted
  double dropped_mass = 0.0;  // probability left out of filtered gradients, over rows with a gradient
  // For sampled gradients, summed over rows with a gradient. sampling_variance is the expected square of the
  // error that sampling adds to dL/d(logit scale * dot product), and squared_gradient is the square of that
  // derivative. The square root of sampling_variance / squared_gradient is the predicted relative error. A
  // backend may estimate both from the classes that it has taken.
  double sampling_variance = 0.0;
  double squared_gradient = 0.0;
  int64_t valid_rows = 0;
  int64_t correct_rows = 0;  // argmax == target
  ObjectiveSums objective;
  // For rows with a teacher, with row weights applied: the divergences, and the losses with the targets.
  // Neither is multiplied by its weight in Distillation, but target_loss is 0 if Distillation::target_weight
  // is 0.
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

// Some rows of one microbatch, in host memory. A slice is atomic: either all its rows that are to be
// accumulated are added to the accumulators, or none.
//
// With LossOptions::embedding the rows have no loss. Of the inputs only `hidden`, `targets`, `accumulate` and
// grad_scale may then be set, no member of `out` is wanted, and of the sums only valid_rows counts.
//   kRows       `hidden` is null. grad_hidden gets, for each row, the row of the weight that its target
//               names, rounded once from its fp32 value or a compute copy; 0 for ignored rows.
//   kGradients  `hidden` are gradients, and grad_hidden is null. Each row, times grad_scale in fp32, is added
//               to the gradient of the weight's row that its target names, unless `accumulate` keeps it out.
//               A row that has a target and a value that is not finite, also after the multiplication, makes
//               its slice fail.
struct Slice {
  int64_t rows = 0;
  const void* hidden = nullptr;         // [rows, D], Chunk::hidden_dtype
  const int32_t* targets = nullptr;     // [rows], each in [0, V) or kIgnoredTarget
  const float* row_weights = nullptr;   // [rows]; null: all are 1
  const uint8_t* accumulate = nullptr;  // [rows], 0: do not accumulate this row; null: accumulate all
  float grad_scale = 1.0f;              // g: dL/d(row loss), the same for all rows
  // These two determine the random numbers of sampled gradients (kernels/decision.h).
  uint64_t sample_seed = 0;  // the microbatch's seed
  int64_t first_row = 0;     // the number of the slice's first row in its microbatch
  // The rows take the place of rows that are not computed again (deterministic mode). They are computed like
  // other rows, so that the other rows of the chunk get the same bits as before. They do not influence
  // decisions about the whole chunk (kAuto; whether lists have room), and their results are unspecified.
  bool stands_in = false;
  // For deferred microbatches: an offset in Chunk::retained, in bytes, a multiple of the element size; -1:
  // none. If `hidden` is set, the rows are also stored there; if `hidden` is null, they are read from there.
  int64_t retained_offset = -1;
  // Optional upstream gradients of each row (reduction none), [rows] or null. grad_loss is multiplied with
  // grad_scale; the other two add dL/dlse and dL/dentropy.
  const float* grad_loss = nullptr;
  const float* grad_lse = nullptr;
  const float* grad_entropy = nullptr;
  // The inputs of LossOptions::objective for each row, [rows] or null. Inputs that the objective does not
  // need are not read.
  const float* advantages = nullptr;
  const float* old_logprobs = nullptr;
  const float* ref_logprobs = nullptr;
  // With LossOptions::rest: the soft targets of the rows, both [rows, target_count] (kernels/soft_targets.h).
  // `targets` then says which rows count, and for which class target_logprob and correct_rows are reported.
  const int32_t* target_classes = nullptr;
  const float* target_weights = nullptr;
  int32_t target_count = 0;  // K, in [1, min(V, kMostSoftTargets)]
  // With Chunk::teacher: the rows' hidden states for the teacher, [rows, the teacher's D],
  // Chunk::hidden_dtype.
  const void* teacher_hidden = nullptr;

  // Classes whose log-probabilities are wanted, each in [0, V), in any order; a class may come several times.
  // [rows, class_count], or with shared_classes [class_count], the same for all rows.
  const int32_t* classes = nullptr;
  int32_t class_count = 0;  // in [0, kMostGivenClasses]
  bool shared_classes = false;
  int32_t top_k = 0;  // how many of the most probable classes are wanted, in [0, min(V, kMostTopClasses)]

  void* grad_hidden = nullptr;  // out: [rows, D], Chunk::hidden_dtype, or null; may equal `hidden`
  RowOutputs out;

  // Both are set by the backend. A row that is not absent makes its slice fail if one of these values is not
  // finite: its loss, lse, target_logprob, entropy (if it is wanted or has a gradient), a factor of its
  // gradient, or a wanted grad_hidden before rounding. first_nonfinite_row is the index of the first such
  // row; -1: there is none. A failed slice has unspecified outputs and has accumulated nothing.
  int64_t first_nonfinite_row = -1;
  LossSums sums;
};

// Device memory for the hidden states of deferred microbatches, until their backward pass. Created by
// Backend::AllocateRetained; used through Chunk::retained.
//
// The host reads and writes the memory if another process computes its rows (docs/scaling.md). ReadBytes and
// WriteBytes are thread-safe, except that a caller must not read or write bytes that another thread is
// writing. By default they return UNIMPLEMENTED: the host cannot access the memory.
class RetainedMemory {
 public:
  virtual ~RetainedMemory() = default;
  virtual int64_t size() const = 0;  // bytes
  // Copies out.size() bytes from `offset` to `out`. Bytes that a chunk stores may be read when the chunk has
  // results.
  virtual absl::Status ReadBytes(int64_t offset, absl::Span<uint8_t> out) const {
    return absl::UnimplementedError("the host cannot read retained memory");
  }
  // Copies `in` to `offset`. Chunks that are submitted afterwards see it.
  virtual absl::Status WriteBytes(int64_t offset, absl::Span<const uint8_t> in) {
    return absl::UnimplementedError("the host cannot write retained memory");
  }
};

class HeadKernels;

// Rows that are computed together. The caller owns the chunk and must not access it between Submit and the
// end of on_done.
struct Chunk {
  LossOptions options;
  DType hidden_dtype = DType::kBFloat16;
  bool accumulate_gradients = true;  // false: a frozen head, only losses, or embedding rows
  bool independent = false;          // the computation must not depend on earlier chunks
  // For independent chunks that accumulate: the chunk's place in a fixed order, e.g. a number that counts up.
  // If a head has several devices, this number decides which device computes the chunk, so that sums are the
  // same each time.
  uint64_t turn = 0;
  RetainedMemory* retained = nullptr;  // memory of the same backend, for slices with a retained_offset
  // With options.distillation: the head whose softmax the rows are compared with; HeadKernels::CheckTeacher
  // must accept it. The caller lets all operations on the teacher wait for the chunk. Chunks of the teacher
  // itself, and of other heads that it teaches, may be in flight at the same time. The slices have neither a
  // retained_offset nor upstream gradients of lse or entropy.
  HeadKernels* teacher = nullptr;
  absl::Span<Slice> slices;  // at most HeadKernels::chunk_rows() rows in all

  // Set by the backend unless it refuses the chunk, and final when on_results runs: the choices for this
  // chunk, with the choice of its gradients first.
  std::vector<Choice> choices;
  // How the gradients were computed: kFiltered, kSampled or kExact. kExact also stands for a chunk that wants
  // no gradients, and for a chunk whose filter was given up. sample_threshold is the threshold of sampled
  // gradients. Both are set, and become final, together with `choices`.
  Gradients gradients = Gradients::kExact;
  float sample_threshold = 0.0f;
};

// Each callback is called exactly once for a chunk, on_results first, on the driving thread or on a thread of
// the backend. A callback must not block for long and must not call into the backend.
struct ChunkCallbacks {
  // OK: host outputs, first_nonfinite_row and sums of all slices are complete; weight gradients may still be
  // computed. An error: the whole chunk failed and accumulated nothing, unless on_done says DATA_LOSS. From
  // now on the backend does not access the slices' host arrays.
  absl::AnyInvocable<void(absl::Status)> on_results;
  // The chunk has left the device. If on_results was OK, an error here means that the accumulators of the
  // head can no longer be trusted. DATA_LOSS has this meaning even if on_results was not OK: either some of
  // the devices that share the chunk failed and others did not, or a gradient of a hidden state turned out
  // not to be finite after its row had been accumulated.
  absl::AnyInvocable<void(absl::Status)> on_done;
};

// One head on the device. Destroying it frees its memory; no chunk may then be in flight.
class HeadKernels {
 public:
  virtual ~HeadKernels() = default;

  virtual const HeadConfig& config() const = 0;
  virtual DType compute_dtype() const = 0;
  // The most rows of a chunk; >= 1, fixed for the life of the head.
  virtual int64_t chunk_rows() const = 0;
  // The most rows of one slice, and of the rows that an independent chunk computes together; >= 1, fixed for
  // the life of the head. Less than chunk_rows() if several devices share a chunk.
  virtual int64_t slice_rows() const { return chunk_rows(); }
  // The memory of this head, by kind. Thread-safe.
  virtual MemoryBytes memory() const = 0;
  // Describes how a full chunk is computed with default options and the head's own HeadConfig::gradients, and
  // the choices that were made when the head was created.
  virtual std::vector<Choice> Describe() const = 0;
  // For a head in host memory: how often it was copied to the device. Nullopt, the default: the head lives on
  // the device. Thread-safe.
  virtual std::optional<PagingStats> paging() const { return std::nullopt; }

  // Checks whether chunks of this head may have the teacher `teacher` (Chunk::teacher), a head of the same
  // backend. INVALID_ARGUMENT as ValidateTeacher, with the field "distillation.teacher". UNIMPLEMENTED, the
  // default, if distillation between two such heads is not supported. Thread-safe; the answer is fixed for
  // the life of both heads.
  virtual absl::Status CheckTeacher(const HeadKernels& teacher) const {
    return absl::UnimplementedError(
        "distillation.teacher must be absent: this server, or the way in which the head lies on its devices, "
        "does not distil yet");
  }

  // Computes a chunk: results of rows and, where wanted, grad_hidden; with accumulate_gradients it adds the
  // weight gradients to the accumulators. At most Backend::max_chunks_in_flight() chunks may be unfinished.
  // Chunks finish in the order of submission. All other operations on the head wait for the chunks in flight.
  virtual void Submit(Chunk* chunk, ChunkCallbacks callbacks) = 0;

  // Copy rows [row_begin, row_begin + rows) of a tensor between the device, where it is fp32, and host
  // memory, where it has `dtype`. The span must have exactly rows * cols * SizeOf(dtype) bytes. Writing a
  // value also updates the compute copy. NOT_FOUND if the head has no such tensor.
  virtual absl::Status ReadTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                  absl::Span<uint8_t> out) = 0;
  virtual absl::Status WriteTensor(TensorId id, int64_t row_begin, int64_t rows, DType dtype,
                                   absl::Span<const uint8_t> in) = 0;
  // Adds to rows of a gradient accumulator: gradient += scale * in, with `in` as in WriteTensor. Product and
  // sum are each rounded to fp32, so all backends give the same bits. Values are not checked. NOT_FOUND if
  // the head accumulates no gradient of `param`. After a device error some of the rows may have been added.
  virtual absl::Status AddGradient(Param param, int64_t row_begin, int64_t rows, DType dtype, float scale,
                                   absl::Span<const uint8_t> in) = 0;

  // The 2-norm over all accumulated gradients, computed in double; not finite if a gradient is not.
  virtual absl::StatusOr<double> GradNorm() = 0;
  // Updates every trained parameter, then zeroes the gradients. `update` is the number of updates including
  // this one, for bias correction; skipped steps do not count. INVALID_ARGUMENT if an option or `update` is
  // out of range; FAILED_PRECONDITION if the head is not trainable or reserved less optimizer state than
  // `options` needs. A replica updates only its shard, zeroes only that shard's gradients, and has moments
  // only for it. A shard has whole rows of the weight, so lazy rows are the same on any number of devices.
  virtual absl::Status ApplyStep(const OptimizerOptions& options, int64_t update) = 0;
  virtual absl::Status ZeroGradients() = 0;
  // Zeroes the optimizer's moments, as in a new head; does nothing if the head has none. The next update is
  // number 1. A device error may leave moments half-written.
  virtual absl::Status ZeroMoments() = 0;

  // ---- Heads whose classes are divided among devices ----
  // The defaults are for a head that is not divided by classes and has no part in another process.

  // Whether SetShares is supported. Thread-safe; fixed for the life of the head.
  virtual bool divides_classes() const { return false; }
  // Decides whether the head may be divided in this way. `divided` is the head as it would be: its config,
  // rows and memory.
  using Accept = absl::FunctionRef<absl::Status(const HeadKernels& divided)>;
  // Changes HeadConfig::shares. Values and optimizer state keep every bit. Gradients must be zero: the caller
  // ensures that nothing has accumulated. The head's config(), chunk_rows(), slice_rows(), memory() and
  // Describe() may change. Tensors are copied through host memory, a few MiB at a time; meanwhile the devices
  // hold both divisions. After an error the head is as it was: INVALID_ARGUMENT (shares), RESOURCE_EXHAUSTED
  // (no room for both divisions), what `accept` returns, UNAVAILABLE; FAILED_PRECONDITION, the default,
  // unless divides_classes().
  virtual absl::Status SetShares(const std::vector<int32_t>& shares, Accept accept) {
    return absl::FailedPreconditionError(
        "the head is not split by vocabulary over several devices, or has replicas (nothing changed)");
  }

  // The parts of the head that are in other processes; these processes can save and load their parts
  // themselves.
  virtual std::vector<RemotePart> remote_parts() const { return {}; }
  // From now on WriteTensor does not write the parts of the head on `ranks`, because these ranks get their
  // rows in another way. WriteTensor writes the parts on all other ranks: all parts if `ranks` is empty.
  virtual void SkipWritesTo(absl::Span<const int> ranks) {}
};

// The exchange between the replicas of one head on several devices (replica.h). Called on the backends'
// driving thread while no chunk of any replica is in flight. An error may leave tensors half-written.
class Replicas {
 public:
  virtual ~Replicas() = default;
  // Sums the accumulated gradients of all replicas, in a fixed order. The replica that updates a parameter
  // gets the sum, and the gradients of the other replicas become zero.
  virtual absl::Status SumGradients() = 0;
  // Gives every replica the values that the other replicas have updated, so that its chunks compute with
  // them. ReadTensor of a replica's values is correct only for the replica's own shard.
  virtual absl::Status SpreadValues() = 0;
};

struct BackendInfo {
  std::string name;                               // "cpu" or "cuda"
  std::string device;                             // e.g. "2 threads, OpenBLAS" or "cuda:0 NVIDIA H200"
  DType default_compute_dtype = DType::kFloat32;  // for heads whose config leaves it open
  std::vector<std::string> uuids = {};            // of the GPUs, "GPU-..."
  bool mps = false;                               // under NVIDIA's Multi-Process Service
  std::string gpu_sharing = {};                   // GpuSharing (device_choice.h); empty: no GPU
};

// Host memory for slices in transit, in the form that the device copies fastest (pinned, for a GPU).
class StagingMemory {
 public:
  virtual ~StagingMemory() = default;
  virtual absl::Span<uint8_t> bytes() = 0;  // aligned to 64
};

// How Backend::AdoptStaging treats the memory.
struct AdoptOptions {
  // A file descriptor by which other processes can map the same memory from its start; -1: none. The caller
  // owns it; the backend duplicates it if it needs it longer than the call.
  int descriptor = -1;
  // Whether this backend counts the memory. False if another process counts the same pages.
  bool counted = true;
};

// Memory of a device that other programs on the host can map, too, so that rows are not copied through host
// memory. It is zero at first. Destroying the object, which must happen before the backend ends, unmaps the
// memory in this process; a program that has mapped it keeps the device's memory in use until it unmaps it or
// ends. Thread-safe.
class SharedDeviceMemory {
 public:
  virtual ~SharedDeviceMemory() = default;
  // Device addresses, in whole pages of the device; code on the host must not access them. The backend reads
  // hidden states there and writes gradients and tensors there, as with staging memory. Other processes may
  // write to the memory at any time (Backend::AdoptStaging).
  virtual absl::Span<uint8_t> bytes() const = 0;
  // The file descriptor by which another process imports the memory, e.g. with
  // cuMemImportFromShareableHandle. This object owns it.
  virtual int descriptor() const = 0;
  // Copy between a part of bytes() and host memory, and wait for the copy. UNAVAILABLE: the device is lost.
  virtual absl::Status CopyToHost(absl::Span<const uint8_t> from, uint8_t* to) const = 0;
  virtual absl::Status CopyFromHost(const uint8_t* from, absl::Span<uint8_t> to) const = 0;
};

// A head as it would be created: what its HeadKernels would return.
struct PlannedHead {
  MemoryBytes memory;
  DType compute_dtype = DType::kFloat32;
  int64_t chunk_rows = 0;
  int64_t slice_rows = 0;
  // As HeadKernels::Describe, without choices that are known only once the head is on its device.
  std::vector<Choice> choices;
};

// The kinds of exchange between a device and other devices, of its process or of other ranks.
enum class ExchangeKind {
  kSumGradients,     // in a step of a head split by rows
  kSpreadValues,     // in a step of a head split by rows
  kRowStatistics,    // in a chunk of a head split by vocabulary: the rows' sums over each part of the classes
  kHiddenGradients,  // in a chunk of a head split by vocabulary: sums for the norm's gradients
};
inline constexpr size_t kExchangeKinds = 4;

constexpr absl::string_view Name(ExchangeKind kind) {
  constexpr std::array<absl::string_view, kExchangeKinds> kNames = {"sum_gradients", "spread_values",
                                                                    "row_statistics", "hidden_gradients"};
  return kNames[static_cast<size_t>(kind)];
}

// Time spent in exchanges since the start, including the wait for other devices; by kind.
using ExchangeTimes = std::array<absl::Duration, kExchangeKinds>;

// What a member of a group has computed since its thread started.
struct MemberWork {
  int64_t chunks = 0;   // chunks, or parts of chunks, computed without an error
  int64_t rows = 0;     // rows of these chunks, including ignored rows
  absl::Duration busy;  // time in which it had a chunk or other work
};

// The state of one member of a group (kernels/group).
struct MemberState {
  std::string device;
  MemoryStats memory;  // if members count their memory together, member 0 has all of it
  MemberWork work;
  ExchangeTimes exchanges;  // parts of work.busy; 0 without GroupOptions::exchanges
};

// A device that computes heads, or several devices that act as one.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual BackendInfo info() const = 0;          // thread-safe
  virtual MemoryStats memory() const = 0;        // thread-safe
  virtual int max_chunks_in_flight() const = 0;  // thread-safe; >= 1
  // The state of each member of a group, in order. Empty, the default: the backend is one device.
  // Thread-safe.
  virtual std::vector<MemberState> MemberStates() const { return {}; }

  // The memory that a head with this config would need, by kind. Thread-safe.
  virtual absl::StatusOr<MemoryBytes> PlanHead(const HeadConfig& config) const = 0;
  // Describes the head that CreateHead would create now if `beside` were in use as well, or returns the error
  // that CreateHead would return. Allocates and counts nothing. It does not foresee failures of libraries or
  // other devices. By default the plan has only PlanHead's memory and the config's compute_dtype.
  // Thread-safe.
  virtual absl::StatusOr<PlannedHead> PlanWholeHead(const HeadConfig& config,
                                                    const MemoryBytes& beside) const {
    absl::StatusOr<MemoryBytes> memory = PlanHead(config);
    if (!memory.ok()) return memory.status();
    PlannedHead planned;
    planned.memory = *memory;
    planned.compute_dtype = config.compute_dtype;
    return planned;
  }
  // Allocates a head. Its norm gain and class weights are one, all other tensors zero. RESOURCE_EXHAUSTED,
  // with the planned bytes, if it does not fit; then nothing is allocated.
  virtual absl::StatusOr<std::unique_ptr<HeadKernels>> CreateHead(const HeadConfig& config) = 0;

  // ---- Memory for rows; thread-safe ----
  // Counted as MemoryKind::kStaging; freed when the result is destroyed, which must be before the backend.
  virtual absl::StatusOr<std::unique_ptr<StagingMemory>> AllocateStaging(int64_t bytes) = 0;
  // Registers `memory` that the caller owns, whole pages, as staging memory that is as fast as that of
  // AllocateStaging; for example memory that a server shares with another process. Counted as
  // MemoryKind::kStaging, unless the options say otherwise, until the result is destroyed, which must be
  // before the memory is freed and before the backend ends. RESOURCE_EXHAUSTED if it would exceed a limit, or
  // the backend's error. UNIMPLEMENTED, the default: the backend does not support it.
  //
  // Other processes may write to the memory at any time. So a backend reads the hidden states of a slice only
  // once, and bases every decision on what it has read.
  virtual absl::StatusOr<std::unique_ptr<StagingMemory>> AdoptStaging(absl::Span<uint8_t> memory,
                                                                      const AdoptOptions& options) {
    return absl::UnimplementedError("the backend takes no memory of others");
  }
  // Counted as MemoryKind::kRetained; freed when the result is destroyed, which must be before the backend.
  virtual absl::StatusOr<std::unique_ptr<RetainedMemory>> AllocateRetained(int64_t bytes) = 0;
  // Counts host memory that the caller will allocate later; it counts until the backend ends.
  // RESOURCE_EXHAUSTED, as CreateHead returns it, if the backend's limit includes host memory and there is
  // not enough.
  virtual absl::Status PlanHostMemory(MemoryKind kind, int64_t bytes) = 0;

  // ---- Device memory that programs on the host can map; thread-safe ----
  // The UUIDs of the devices whose memory can be shared (ShareDeviceMemory), in the order of the devices.
  // Empty, the default: none.
  virtual std::vector<std::string> SharingDevices() const { return {}; }
  // Allocates `bytes` > 0, rounded up to whole pages, on `device`, one of SharingDevices(). All devices of
  // this backend can access the memory. Counted as MemoryKind::kSlots. RESOURCE_EXHAUSTED if it would exceed
  // a limit. UNIMPLEMENTED, the default, if the device or its driver cannot share memory, or if another
  // device of this backend cannot access it.
  virtual absl::StatusOr<std::unique_ptr<SharedDeviceMemory>> ShareDeviceMemory(absl::string_view device,
                                                                                int64_t bytes) {
    return absl::UnimplementedError("the server shares no memory of a GPU");
  }
  // Lets this device read and write memory that another backend of this process shares
  // (SharedDeviceMemory::bytes()), as long as the memory exists. UNIMPLEMENTED, the default, if nothing
  // connects the two devices.
  virtual absl::Status ReachDeviceMemory(absl::Span<uint8_t> memory) {
    return absl::UnimplementedError("these devices share no memory");
  }
};

// The classes of row `row` whose log-probabilities are wanted, [class_count].
inline const int32_t* ClassesOf(const Slice& slice, int64_t row) {
  return slice.shared_classes ? slice.classes : slice.classes + row * slice.class_count;
}

// Whether row `row`, which has a target, is absent: its weight is 0, and its lse and entropy have no upstream
// gradient. An absent row adds nothing to any gradient or loss, even if its hidden state is not finite
// (docs/math.md, "Rows of weight 0").
inline bool IsAbsent(const Slice& slice, int64_t row) {
  return slice.row_weights != nullptr && slice.row_weights[row] == 0.0f &&
         (slice.grad_lse == nullptr || slice.grad_lse[row] == 0.0f) &&
         (slice.grad_entropy == nullptr || slice.grad_entropy[row] == 0.0f);
}

// Sets `soft` to the soft targets of row `row`.
inline void SoftRowOf(Rest rest, const Slice& slice, int64_t row, SoftRow& soft) {
  const auto count = static_cast<size_t>(slice.target_count);
  const int64_t first = row * slice.target_count;
  MakeSoftRow(rest, {slice.target_classes + first, count}, {slice.target_weights + first, count}, soft);
}

// The inputs of the objective for row `row`; an input that is not given is 0.
inline ObjectiveNumbers<double> NumbersOf(const Slice& slice, int64_t row) {
  const auto at = [row](const float* values) { return values == nullptr ? 0.0 : double{values[row]}; };
  return {at(slice.advantages), at(slice.old_logprobs), at(slice.ref_logprobs)};
}

// dL/d(loss of row `row` before its row weight): the row weight is a factor of the result.
inline double GradLossOf(const Slice& slice, int64_t row) {
  double gradient = double{slice.grad_scale};
  if (slice.row_weights != nullptr) gradient *= double{slice.row_weights[row]};
  if (slice.grad_loss != nullptr) gradient *= double{slice.grad_loss[row]};
  return gradient;
}

// dL/dentropy of row `row`: the upstream gradient and the objective's entropy bonus.
inline double GradEntropyOf(const Objective& objective, const Slice& slice, int64_t row) {
  const double sent = slice.grad_entropy == nullptr ? 0.0 : double{slice.grad_entropy[row]};
  if (objective.entropy_bonus == 0.0f) return sent;
  return sent - double{objective.entropy_bonus} * GradLossOf(slice, row);
}

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_BACKEND_H_
