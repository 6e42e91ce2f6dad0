// SPDX-License-Identifier: Apache-2.0
// The plan of a loss computation (loss_call.h): checks of its arguments, how its rows are spread over streams
// and slices, and which rows the server has answered (AnswerTracker). Pure arithmetic, no I/O.
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

// The fewest valid rows that are worth a stream of their own. Sending fewer rows takes less time than
// computing the extra chunk that a second stream may cause: 128 rows of a head with 128,256 classes took 5.3
// ms in two streams and 3.5 ms in one.
inline constexpr uint64_t kMinRowsPerStream = 128;

// The caller's memory for the rows of a microbatch, in one piece or in several. Address arithmetic is valid
// only within one piece.
//
// Thread-compatible.
class RowPieces {
 public:
  // One piece with the memory of all rows; null: there is no memory, and no piece.
  explicit RowPieces(const void* all = nullptr);
  // One piece for each depth that has rows.
  static RowPieces HiddenOf(const std::vector<Depth>& depths);
  static RowPieces GradientsOf(const std::vector<Depth>& depths);

  bool empty() const { return pieces_.empty(); }
  // The address of the row. Not if empty().
  const uint8_t* At(uint64_t row, uint64_t row_bytes) const;
  // Cuts the range of rows where one piece ends and the next one begins.
  std::vector<Rows> Cut(Rows rows) const;
  // The address of each piece.
  std::vector<const void*> Addresses() const;

 private:
  struct Piece {
    uint64_t first_row = 0;
    const uint8_t* at = nullptr;
  };
  std::vector<Piece> pieces_;  // sorted by first row
};

// Where the caller has the hidden states, and wants their gradients: one piece for each depth, or one for all
// rows.
RowPieces HiddenOf(const Microbatch& microbatch);
RowPieces GradientsOf(const Microbatch& microbatch, const LossOutputs& outputs);

// The class that marks a row as ignored.
int32_t IgnoreIndex(const v1::LossOptions& options);

// INVALID_ARGUMENT, naming the field and its value, if the client can tell without the server that the call
// is wrong.
absl::Status ValidateCall(const Microbatch& microbatch, const LossOutputs& outputs,
                          const ComputeOptions& options);

absl::Status ValidateBackward(const RetainedGradients& gradients, const BackwardOptions& options);

// Whether the loss depends on the targets. If not, they only say which rows are valid.
bool TargetsCount(const ComputeOptions& options);

// INVALID_ARGUMENT, in the server's words, if the server would refuse the value of a single row: a value that
// is not finite, or a class that the head does not have. `vocab_size` and `classes` are those of HeadInfo.
absl::Status CheckRowValues(const Microbatch& microbatch, const ComputeOptions& options, int64_t vocab_size,
                            const std::vector<int32_t>* classes);
absl::Status CheckRowValues(const RetainedGradients& gradients);

uint64_t CountValid(absl::Span<const int32_t> targets, int32_t ignore_index);

// Splits [0, targets.size()) into contiguous ranges, at least one: `streams` ranges with about the same
// number of valid rows each. There are fewer ranges if there are few valid rows, and more if a range would
// have more than `max_rows` rows.
std::vector<Rows> SplitRanges(absl::Span<const int32_t> targets, int32_t ignore_index, int streams,
                              uint64_t max_rows);

// How slices are cut.
struct SliceRule {
  uint64_t max_rows = 1;
  uint64_t row_grid = 0;  // no slice has rows on both sides of a multiple of it; 0: no such rule
  // The most rows of a slice that lies in a region. A value below max_rows means max_rows.
  uint64_t max_rows_in_region = 0;
  friend bool operator==(const SliceRule&, const SliceRule&) = default;
};

// The most rows of a slice in a call that wants results for single classes (class_count, top_k), which are
// large: about 512 KiB of such results.
inline uint64_t MostRowsWithClasses(const LossOutputs& outputs) {
  const uint64_t row_bytes = 4 * uint64_t{outputs.class_count} + 9 * uint64_t{outputs.top_k};
  return row_bytes == 0 ? ~uint64_t{0} : std::max<uint64_t>(1, (uint64_t{1} << 19) / row_bytes);
}

// Cuts the valid rows of `range` into slices, in ascending order. Slices start and end with a valid row. Long
// runs of ignored rows are in no slice.
std::vector<Rows> DivideIntoSlices(absl::Span<const int32_t> targets, int32_t ignore_index, Rows range,
                                   const SliceRule& rule);
// As above, and each slice has rows of one depth only. `depths` may be empty.
std::vector<Rows> DivideIntoSlices(absl::Span<const int32_t> targets, int32_t ignore_index, Rows range,
                                   const SliceRule& rule, const std::vector<Depth>& depths);
// The range of rows of each depth.
std::vector<Rows> RowsOfDepths(const std::vector<Depth>& depths);

// The rule for the largest slices that slice_bytes (ComputeOptions) and the server's limits allow.
// INVALID_ARGUMENT if a single row exceeds the server's limit.
absl::StatusOr<SliceRule> MakeSliceRule(uint64_t row_bytes, std::optional<uint64_t> slice_bytes,
                                        const v1::SliceLimits& limits);

// The most bytes that one call takes of a region of `region_bytes`, so that several calls find room at the
// same time.
uint64_t ShareOfRegion(uint64_t region_bytes);

// The sizes in bytes of the regions that a client asks for.
struct RegionSizes {
  uint64_t least = 0;  // the first region
  uint64_t most = 0;   // the largest region
};

// When calls have found no room in a region, the client asks for a region that is this many times as large.
inline constexpr uint64_t kRegionGrowth = 4;

// The size of the region for a call whose rows have `call_bytes`: the smallest power of two of which
// ShareOfRegion holds the call, within `sizes`.
uint64_t WantedRegion(uint64_t call_bytes, const RegionSizes& sizes);

// How many streams a call uses that copies `bytes` of rows into a region of host memory, and gradients out of
// it, on a machine with `cores`. More streams copy in parallel, because gRPC runs the copies of each stream
// on one thread at a time.
int StreamsInRegion(uint64_t bytes, unsigned cores);

// The best number of rows of a slice in a region of `region_bytes`. `of_gpu`: the region is GPU memory; else
// it is host memory.
uint64_t WantedRows(uint64_t region_bytes, bool of_gpu, uint64_t row_bytes);

// The rule that cuts `rows` rows in a region into slices of equal size: of about `wanted` rows if `rule`
// allows as many, else of fewer.
SliceRule InRegion(const SliceRule& rule, uint64_t rows, uint64_t wanted);

// Cuts a slice that finds no room in a region into slices for messages.
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

  // The slice `whole` is sent as these parts instead.
  void Replace(Rows whole, const std::vector<Rows>& parts);

  // Notes the answer for these rows. An error, and nothing changes, if no such answer is expected, or if it
  // has come before.
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
