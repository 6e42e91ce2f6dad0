// SPDX-License-Identifier: Apache-2.0
// How the rows of a microbatch are spread over streams and slices, and which of them the server has answered
// (AnswerTracker). Pure arithmetic, no I/O.
//
// Functions are stateless and thread-safe. AnswerTracker is thread-compatible.
#ifndef LOSSD_CLIENT_CPP_LOSS_PLAN_H_
#define LOSSD_CLIENT_CPP_LOSS_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/client_options.h"
#include "lossd/v1/types.pb.h"

namespace lossd::client::internal {

// Rows [begin, end).
struct Rows {
  uint64_t begin = 0;
  uint64_t end = 0;

  uint64_t size() const { return end - begin; }
  friend bool operator==(const Rows&, const Rows&) = default;
};

// Fewest valid rows worth a stream of their own. Fewer are sent sooner than the chunk is computed that they
// may get to themselves: 128 rows of a head of 128,256 classes took 5.3 ms in two streams, 3.5 ms in one.
inline constexpr uint64_t kMinRowsPerStream = 128;

// Memory of the caller's for the rows of a microbatch, in one piece or in several. Addresses of one piece
// only may be counted on from an address in it.
//
// Thread-compatible.
class RowPieces {
 public:
  // The memory of all rows; null: there is none.
  explicit RowPieces(const void* all = nullptr);
  // One piece for each depth that has rows.
  static RowPieces HiddenOf(const std::vector<Depth>& depths);
  static RowPieces GradientsOf(const std::vector<Depth>& depths);

  bool empty() const { return pieces_.empty(); }
  // The row's address. Not of memory that is empty.
  const uint8_t* At(uint64_t row, uint64_t row_bytes) const;
  // Cuts rows where one piece ends and the next one begins.
  std::vector<Rows> Cut(Rows rows) const;
  // The address of each piece.
  std::vector<const void*> Addresses() const;

 private:
  struct Piece {
    uint64_t first_row = 0;
    const uint8_t* at = nullptr;
  };
  std::vector<Piece> pieces_;  // by first row
};

// Where the hidden states and their gradients are: with the depths, or in one piece each.
RowPieces HiddenOf(const Microbatch& microbatch);
RowPieces GradientsOf(const Microbatch& microbatch, const LossOutputs& outputs);

// The class that marks a row as ignored.
int32_t IgnoreIndex(const v1::LossOptions& options);

// INVALID_ARGUMENT naming the field and its value if the call is wrong in a way that the server need not be
// asked about.
absl::Status ValidateCall(const Microbatch& microbatch, const LossOutputs& outputs,
                          const ComputeOptions& options);

absl::Status ValidateBackward(const RetainedGradients& gradients, const BackwardOptions& options);

// Whether the loss depends on the targets; else they only say which rows count.
bool TargetsCount(const ComputeOptions& options);

// INVALID_ARGUMENT, in the words of the server, if the server would refuse a value of a single row: one that
// is not finite, or a class that the head does not have. `vocab_size`: of targets; `classes`:
// HeadInfo::classes.
absl::Status CheckRowValues(const Microbatch& microbatch, const ComputeOptions& options, int64_t vocab_size,
                            const std::vector<int32_t>* classes);
absl::Status CheckRowValues(const RetainedGradients& gradients);

uint64_t CountValid(absl::Span<const int32_t> targets, int32_t ignore_index);

// Splits [0, targets.size()) into at least one contiguous range: `streams` of them with about the same number
// of valid rows each, fewer if there are few valid rows, more if one would have over `max_rows` rows.
std::vector<Rows> SplitRanges(absl::Span<const int32_t> targets, int32_t ignore_index, int streams,
                              uint64_t max_rows);

// How slices are cut.
struct SliceRule {
  uint64_t max_rows = 1;
  uint64_t row_grid = 0;  // no slice has rows on both sides of a multiple of it; 0: no such rule
  // Of a slice that lies in a region; at most max_rows: no more than in a message.
  uint64_t max_rows_in_region = 0;
  friend bool operator==(const SliceRule&, const SliceRule&) = default;
};

// The most rows of a slice of a call that wants results of single classes, which are large
// (OpenMicrobatch.class_count).
inline uint64_t MostRowsWithClasses(const LossOutputs& outputs) {
  const uint64_t row_bytes = 4 * uint64_t{outputs.class_count} + 9 * uint64_t{outputs.top_k};
  return row_bytes == 0 ? ~uint64_t{0} : std::max<uint64_t>(1, (uint64_t{1} << 19) / row_bytes);
}

// Cuts the valid rows of `range` into slices, in ascending order. Slices start and end with a valid row; long
// runs of ignored rows are in none.
std::vector<Rows> DivideIntoSlices(absl::Span<const int32_t> targets, int32_t ignore_index, Rows range,
                                   const SliceRule& rule);
// The same, and each slice has rows of one depth. `depths` may be empty.
std::vector<Rows> DivideIntoSlices(absl::Span<const int32_t> targets, int32_t ignore_index, Rows range,
                                   const SliceRule& rule, const std::vector<Depth>& depths);
// The rows of each depth.
std::vector<Rows> RowsOfDepths(const std::vector<Depth>& depths);

// Slices as large as slice_bytes (ComputeOptions) and the server's limits allow. INVALID_ARGUMENT if a single
// row exceeds the server's limit.
absl::StatusOr<SliceRule> MakeSliceRule(uint64_t row_bytes, std::optional<uint64_t> slice_bytes,
                                        const v1::SliceLimits& limits);

// The bytes that one call takes at most of a region of region_bytes, so that calls of several microbatches
// find room beside each other.
uint64_t ShareOfRegion(uint64_t region_bytes);

// Bytes of the regions that a client asks for.
struct RegionSizes {
  uint64_t least = 0;  // at first
  uint64_t most = 0;
};

// The region that is asked for when calls have found none of the size they wanted, or no room in it: so many
// times what it was asked for.
inline constexpr uint64_t kRegionGrowth = 4;

// The region for calls whose rows have so many bytes: a power of two of which they are a share, within the
// sizes.
uint64_t WantedRegion(uint64_t call_bytes, const RegionSizes& sizes);

// How many streams copy so many bytes of rows into a region of the host's memory, and their gradients out of
// it, on a machine with so many cores: gRPC runs the copies of each stream on one thread at a time.
int StreamsInRegion(uint64_t bytes, unsigned cores);

// How many rows of a slice are best in a region of so many bytes, of a GPU's memory or of the host's.
uint64_t WantedRows(uint64_t region_bytes, bool of_gpu, uint64_t row_bytes);

// For `rows` that lie in a region: about `wanted` at once if that is allowed, in parts of equal size.
SliceRule InRegion(const SliceRule& rule, uint64_t rows, uint64_t wanted);

// Parts of a slice that finds no room in a region, for messages.
std::vector<Rows> CutForMessages(Rows slice, const SliceRule& rule);

// The rows of `range` that no slice covers, in ascending order.
std::vector<Rows> UnsentRows(Rows range, absl::Span<const Rows> slices);

// Writes the results of ignored rows (zeros; argmax -1) to the rows of `range` that no slice covers.
void FillUnsentRows(const LossOutputs& outputs, uint64_t row_bytes, Rows range,
                    absl::Span<const Rows> slices);

// Records which rows of a call have been answered, and finds answers that do not belong to the call.
//
// Thread-compatible. Errors are INTERNAL and say what the server sent.
class AnswerTracker {
 public:
  // Expects one answer for each of the slices, which are disjoint.
  static AnswerTracker Exactly(const std::vector<Rows>& slices);
  // Expects disjoint answers anywhere inside `range`: the server cuts it.
  static AnswerTracker Within(Rows range);

  // One of the slices is sent in parts.
  void Replace(Rows whole, const std::vector<Rows>& parts);

  // Notes an answer. An error if it is not expected (any more); then nothing changes.
  absl::Status Take(const v1::RowRange& rows);

  // Whether every expected slice was answered; always true for Within.
  bool Complete() const { return open_.empty(); }
  uint64_t answered_rows() const { return answered_rows_; }

 private:
  absl::Status TakeExactly(Rows rows);
  absl::Status TakeWithin(Rows rows);

  bool exactly_ = true;
  Rows range_;
  std::map<uint64_t, uint64_t> open_;      // begin -> end of slices without an answer
  std::map<uint64_t, uint64_t> answered_;  // begin -> end
  uint64_t answered_rows_ = 0;
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_LOSS_PLAN_H_
