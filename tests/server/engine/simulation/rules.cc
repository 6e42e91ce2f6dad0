// SPDX-License-Identifier: Apache-2.0
#include "tests/server/engine/simulation/rules.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/engine/errors.h"

namespace lossd::engine::simulation {
namespace {

float WeightOf(const Duty& duty, int64_t row) {
  return duty.row_weights.empty() ? 1.0f : duty.row_weights[static_cast<size_t>(row)];
}
bool HasTarget(const Duty& duty, int64_t row) { return duty.targets[static_cast<size_t>(row)] >= 0; }
float DepthWeightOf(const Duty& duty, int64_t row) {
  for (const Depth& depth : duty.depths) {
    if (row < depth.rows) return depth.weight;
    row -= depth.rows;
  }
  return 1.0f;
}
RowRange GroupOf(const Duty& duty, int64_t row, int64_t grid) {
  const int64_t begin = row / grid * grid;
  return {begin, std::min(begin + grid, duty.rows)};
}

// The place of a row in its group, as the device tells it.
float PlaceOf(const Duty& duty, int64_t row, int64_t grid) {
  const RowRange group = GroupOf(duty, row, grid);
  int64_t position = 0, total = 0;
  for (int64_t r = group.begin; r < group.end; ++r) {
    position += r < row && HasTarget(duty, r) ? 1 : 0;
    total += HasTarget(duty, r) ? 1 : 0;
  }
  return static_cast<float>(position * kMostRows + total);
}

std::string CheckGradient(const float* dx, int64_t row, const Device& device, const StreamFacts& stream) {
  const Duty& duty = *stream.duty;
  if (!HasTarget(duty, row)) return dx[0] == 0.0f ? "" : "the gradient of a row without a target";
  const float upstream = stream.backward ? UpstreamOf(row) : DepthWeightOf(duty, row);
  if (dx[0] != upstream * NameOf(duty.id, row)) return absl::StrCat("dx of row ", row, " is ", dx[0]);
  const bool in_order = stream.row_grid > 0 && stream.accumulates;
  if (!in_order || device.Of(stream.generation).has_bad_rows) return "";
  const float place = PlaceOf(duty, row, stream.row_grid);
  if (dx[1] == place) return "";
  return absl::StrCat("dx of row ", row, " was computed in another place: ", dx[1], " instead of ", place);
}

// The row of the weight that an id names, or nothing for a gradient that was taken.
std::string CheckEmbedding(const SliceOutput& output, int64_t row, int64_t newest_version,
                           StreamFacts& stream) {
  if (!output.loss.empty() || !output.lse.empty()) return "a row of an embedding has a loss";
  if (bool{output.grad_hidden} != (stream.embedding == kernels::Embedding::kRows))
    return absl::StrCat("row ", row, " of an embedding has values where it should not, or none");
  if (!output.grad_hidden) return "";
  const auto* got = reinterpret_cast<const float*>(output.grad_hidden.data()) +
                    static_cast<size_t>(row - output.rows.begin) * kHidden;
  const int32_t id = stream.duty->targets[static_cast<size_t>(row)];
  if (id < 0)
    return got[0] == 0.0f && got[1] == 0.0f ? "" : absl::StrCat("row ", row, " has no id and is not 0");
  if (got[1] != static_cast<float>(id + 1))
    return absl::StrCat("row ", row, " is that of id ", got[1] - 1.0f, " instead of ", id);
  const auto version = static_cast<int64_t>(got[0]);
  stream.versions.insert(version);
  if (version < stream.version || version > newest_version)
    return absl::StrCat("row ", row, " is of weights ", version);
  return "";
}

std::string CheckRow(const SliceOutput& output, int64_t row, const Device& device, int64_t newest_version,
                     StreamFacts& stream) {
  const auto i = static_cast<size_t>(row - output.rows.begin);
  if (!stream.sent.contains(row)) return absl::StrCat("row ", row, " was not sent");
  if (stream.embedding != kernels::Embedding::kNone) {
    if (!stream.losses.emplace(row, 0.0f).second) return absl::StrCat("row ", row, " came twice");
    return CheckEmbedding(output, row, newest_version, stream);
  }
  const float loss =
      HasTarget(*stream.duty, row) ? NameOf(stream.duty->id, row) * WeightOf(*stream.duty, row) : 0.0f;
  if (!output.loss.empty() && output.loss[i] != loss)
    return absl::StrCat("the loss of row ", row, " is ", output.loss[i]);
  if (!stream.losses.emplace(row, loss).second) return absl::StrCat("row ", row, " came twice");
  if (output.grad_hidden) {
    const auto* dx = reinterpret_cast<const float*>(output.grad_hidden.data()) + i * kHidden;
    if (std::string wrong = CheckGradient(dx, row, device, stream); !wrong.empty()) return wrong;
  }
  if (!HasTarget(*stream.duty, row)) return "";
  stream.loss_sum += loss;
  const auto name = static_cast<int64_t>(NameOf(stream.duty->id, row));
  if (name % kVocab == stream.duty->targets[static_cast<size_t>(row)]) ++stream.correct_rows;
  if (output.lse.empty()) return "";  // a backward, which is told gradients alone
  const auto version = static_cast<int64_t>(output.lse[i]);
  stream.versions.insert(version);
  if (version < stream.version || version > newest_version)
    return absl::StrCat("row ", row, " was computed with weights ", version);
  return "";
}

// ---- Ends ----

// The sums of each depth are those of its rows.
std::string CheckDepths(const StreamSummary& summary, const StreamFacts& stream) {
  const Duty& duty = *stream.duty;
  const bool undivided = stream.retains || stream.backward || stream.embedding == kernels::Embedding::kRows;
  const size_t expected = undivided ? 0 : duty.depths.size();
  if (summary.depths.size() != expected) return absl::StrCat(summary.depths.size(), " depths");
  int64_t begin = 0;
  for (size_t i = 0; i < expected; ++i) {
    const DepthSummary& depth = summary.depths[i];
    const int64_t end = begin + duty.depths[i].rows;
    int64_t valid = 0;
    double loss = 0.0;
    for (int64_t row = std::max(begin, stream.rows.begin); row < std::min(end, stream.rows.end); ++row) {
      if (!HasTarget(duty, row)) continue;
      ++valid;
      loss += stream.losses.at(row);
    }
    const int64_t booked = depth.accumulated_rows + (stream.accumulates ? depth.repeated_rows : 0);
    if (depth.sums.valid_rows != valid || depth.sums.loss != loss ||
        booked != (stream.accumulates ? valid : 0)) {
      return absl::StrCat("depth ", i, " has ", depth.sums.valid_rows, " rows and a loss of ",
                          depth.sums.loss, ", and ", booked, " rows were booked, instead of ", valid,
                          " rows and ", loss);
    }
    begin = end;
  }
  return "";
}

std::string CheckOk(const StreamSummary& summary, const StreamFacts& stream, const Device& device) {
  const Duty& duty = *stream.duty;
  int64_t valid = 0;
  for (int64_t row = stream.rows.begin; row < stream.rows.end; ++row) {
    if (!HasTarget(duty, row)) continue;
    ++valid;
    if (!stream.losses.contains(row)) return absl::StrCat("OK without results of row ", row);
    // By arrival a call may end before its gradient is in; what it says is a promise then.
    if (!stream.accumulates || !(stream.backward || stream.row_grid > 0)) continue;
    const auto& times = device.Of(stream.generation).times;
    if (!times.contains(static_cast<int64_t>(NameOf(duty.id, row))))
      return absl::StrCat("OK, and row ", row, " was not accumulated in its generation");
  }
  if (summary.sums.valid_rows != valid) return absl::StrCat("valid_rows is ", summary.sums.valid_rows);
  if (summary.sums.correct_rows != stream.correct_rows)
    return absl::StrCat("correct_rows is ", summary.sums.correct_rows, " instead of ", stream.correct_rows);
  if (summary.sums.loss != stream.loss_sum) return absl::StrCat("loss_sum is ", summary.sums.loss);
  const int64_t booked = stream.accumulates ? valid : 0;
  const int64_t answered = summary.accumulated_rows + (stream.accumulates ? summary.repeated_rows : 0);
  if (answered != booked || summary.accumulated_rows < 0 || summary.repeated_rows < 0) {
    return absl::StrCat("of ", valid, " rows, ", summary.accumulated_rows, " were accumulated and ",
                        summary.repeated_rows, " repeated");
  }
  if (stream.versions.size() > 1) return "rows of several versions";
  if (summary.state.weights_version != stream.weights_version)
    return absl::StrCat("the summary is of weights_version ", summary.state.weights_version,
                        ", and the call was accepted for ", stream.weights_version);
  return CheckDepths(summary, stream);
}

bool BelongsToStep(const StreamFacts& stream) {
  return stream.accumulates || stream.retains || stream.backward;
}

// A reset ends streams. It is refused while streams that accumulate are open, so it ends those of them alone
// that were opened while it was under way.
bool EndedByReset(const StreamFacts& stream, const HeadFacts& head) {
  return std::any_of(head.changes.begin(), head.changes.end(), [&](const Change& change) {
    return change.what == Change::What::kReset && change.end >= stream.opened &&
           (!stream.accumulates || change.begin < stream.opened);
  });
}

// Another call may have sent the same rows.
bool BadRowsAmong(const StreamFacts& stream, const HeadFacts& head) {
  const auto it = head.bad_rows.find(stream.duty->id);
  return it != head.bad_rows.end() && std::any_of(it->second.begin(), it->second.end(), [&](int64_t row) {
           return stream.rows.begin <= row && row < stream.rows.end;
         });
}

bool MayEndWith(absl::StatusCode code, const StreamFacts& stream, const HeadFacts& head, const Device& device,
                bool stopping) {
  switch (code) {
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kDeadlineExceeded:
      return stream.cut;
    case absl::StatusCode::kInvalidArgument:
      return stream.broke_a_rule;
    case absl::StatusCode::kOutOfRange:
      return BadRowsAmong(stream, head);
    case absl::StatusCode::kInternal:
      // A step that was under way when the stream was opened may have failed already.
      return device.failed_results > stream.failed_results || device.broken > stream.broken ||
             device.Of(stream.generation).broken ||
             (device.broken > 0 && head.Changed({Change::What::kStep}, stream.opened));
    case absl::StatusCode::kAborted:
      return head.Changed({Change::What::kStep, Change::What::kLoad, Change::What::kWrite}, stream.opened) ||
             (BelongsToStep(stream) && head.Changed({Change::What::kZero}, stream.opened)) ||
             EndedByReset(stream, head);
    case absl::StatusCode::kUnavailable:
      return stopping;
    default:
      return false;
  }
}

// The slice of the stream with the row that an error names, e.g. "row 3 must".
RowRange SliceOf(const StreamFacts& stream, const absl::Status& status) {
  int64_t row = -1;
  const std::vector<absl::string_view> words = absl::StrSplit(status.message(), absl::MaxSplits(' ', 2));
  if (words.size() < 2 || !absl::SimpleAtoi(words[1], &row)) return {};
  const auto holds = [row](RowRange rows) { return rows.begin <= row && row < rows.end; };
  const auto it = std::find_if(stream.slices.begin(), stream.slices.end(), holds);
  return it == stream.slices.end() ? RowRange() : *it;
}

// An error that says that nothing of a slice was accumulated is right about rows that no other stream sent.
std::string CheckNothingAccumulated(const absl::Status& status, const StreamFacts& stream,
                                    const HeadFacts& head, const Device& device) {
  if (!absl::IsOutOfRange(status) || !stream.accumulates) return "";
  if (!absl::StrContains(status.message(), "nothing of its slice was accumulated")) return "";
  const RowRange slice = SliceOf(stream, status);
  for (int64_t row = slice.begin; row < slice.end; ++row) {
    const auto name = static_cast<int64_t>(NameOf(stream.duty->id, row));
    const auto senders = head.senders.find(name);
    const bool alone = senders != head.senders.end() && senders->second.size() == 1;
    if (alone && device.Of(stream.generation).times.contains(name))
      return absl::StrCat("row ", row, " was accumulated, although: ", status.message());
  }
  return "";
}

// ---- Order ----

// Walks along a serial execution of the duties.
class SerialOrder {
 public:
  SerialOrder(const std::vector<Duty>& duties, int64_t grid) : duties_(duties), grid_(grid) {}

  std::string Next(const Added& added) {
    SkipEmpty();
    if (duty_ == duties_.size()) return "something was accumulated after everything";
    const Duty& duty = duties_[duty_];
    if (added.contribution != (duty.kind == Kind::kContribution))
      return absl::StrCat("another kind than that of ", duty.id, " was accumulated");
    if (added.contribution) return NextContribution(added, duty);
    std::vector<int64_t> expected;
    const RowRange group = GroupOf(duty, row_, grid_);
    for (int64_t row = group.begin; row < group.end; ++row) {
      if (HasTarget(duty, row)) expected.push_back(static_cast<int64_t>(NameOf(duty.id, row)));
    }
    std::vector<int64_t> names;
    for (const Added::Row& row : added.rows) {
      if (!row.accumulated) return "a group was accumulated in part";
      names.push_back(row.name);
    }
    if (names != expected)
      return absl::StrCat("instead of microbatch ", duty.id, ", rows ", Text(group), ", other rows came");
    row_ = group.end;
    return "";
  }

 private:
  std::string NextContribution(const Added& added, const Duty& duty) {
    for (const Added::Row& row : added.rows) {
      if (row.name / kMostRows != static_cast<int64_t>(duty.id)) return "a contribution came out of turn";
    }
    row_ += static_cast<int64_t>(added.rows.size());
    return "";
  }
  void SkipEmpty() {
    while (duty_ < duties_.size()) {
      const Duty& duty = duties_[duty_];
      const bool contribution = duty.kind == Kind::kContribution;
      while (!contribution && row_ < duty.rows && !GroupHasTarget(duty))
        row_ = GroupOf(duty, row_, grid_).end;
      if (row_ < duty.rows) return;
      ++duty_;
      row_ = 0;
    }
  }
  bool GroupHasTarget(const Duty& duty) const {
    const RowRange group = GroupOf(duty, row_, grid_);
    for (int64_t row = group.begin; row < group.end; ++row) {
      if (HasTarget(duty, row)) return true;
    }
    return false;
  }

  const std::vector<Duty>& duties_;
  const int64_t grid_;
  size_t duty_ = 0;
  int64_t row_ = 0;
};

// Gradients of an embedding reach the row of the weight that their id names, and a loss the row of its
// target.
std::string CheckAddedRow(const Added& added, const Added::Row& row, const std::vector<Duty>& duties) {
  const auto id = static_cast<size_t>(row.name / kMostRows);
  const int64_t number = row.name % kMostRows;
  if (id >= duties.size() || number >= duties[id].rows) return "a row was accumulated that nobody sent";
  const Duty& duty = duties[id];
  if (added.row_gradients != duty.adds_row_gradients())
    return absl::StrCat("row ", number, " of ", duty.id, " was accumulated as one of another kind");
  if (row.target != duty.targets[static_cast<size_t>(number)])
    return absl::StrCat("row ", number, " of ", duty.id, " was accumulated for class ", row.target);
  if (row.scale == duty.scale) return "";
  return absl::StrCat("row ", number, " of ", duty.id, " was accumulated with the factor ", row.scale,
                      " instead of ", duty.scale);
}

bool AnyAccumulated(const Added& added) {
  return std::any_of(added.rows.begin(), added.rows.end(), [](const auto& row) { return row.accumulated; });
}

}  // namespace

bool HeadFacts::Changed(std::initializer_list<Change::What> kinds, int64_t since) const {
  return std::any_of(changes.begin(), changes.end(), [&](const Change& change) {
    return change.end >= since && std::find(kinds.begin(), kinds.end(), change.what) != kinds.end();
  });
}

std::string CheckRefusal(const absl::Status& status, const StreamFacts& stream, const HeadFacts& head,
                         const Device& device, const Setup& setup, bool stopping) {
  const bool recreated = head.Changed({Change::What::kRecreate}, stream.opened);
  switch (status.code()) {
    case absl::StatusCode::kNotFound:  // likewise retained rows that were released or expired
      if (recreated || stream.backward) return "";
      break;
    case absl::StatusCode::kUnavailable:
      if (recreated || stopping || head.Changed({Change::What::kLoad, Change::What::kReset}, 0)) return "";
      if (head.Changed({Change::What::kWrite, Change::What::kStep}, stream.opened)) return "";
      break;
    case absl::StatusCode::kInternal:
      if (device.broken > 0) return "";
      break;
    case absl::StatusCode::kResourceExhausted:
      if (stream.retains || setup.options.max_streams < 64) return "";
      break;
    case absl::StatusCode::kAlreadyExists:
      if (stream.retains) return "";
      break;
    case absl::StatusCode::kFailedPrecondition:  // judged by the order of calls (FindNoOrder)
      if (GetCurrentStep(status).has_value()) return "";
      break;
    default:
      break;
  }
  return absl::StrCat("a stream was refused without a reason: ", status.ToString());
}

std::string CheckRightlyRefused(const absl::Status& status, absl::StatusCode code, const StreamFacts& stream,
                                const HeadFacts& head, const Device& device, const Setup& setup,
                                bool stopping) {
  if (status.ok()) return "a call was opened that is to be refused";
  if (status.code() == code) return "";
  return CheckRefusal(status, stream, head, device, setup, stopping);
}

std::string CheckSlice(const SliceOutput& output, const Device& device, int64_t newest_version,
                       StreamFacts& stream) {
  for (int64_t row = output.rows.begin; row < output.rows.end; ++row) {
    std::string wrong = CheckRow(output, row, device, newest_version, stream);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

int64_t EndOfDepth(const Duty& duty, int64_t row) {
  int64_t end = 0;
  for (const Depth& depth : duty.depths) {
    end += depth.rows;
    if (row < end) return end;
  }
  return duty.rows;
}

std::string CheckEnd(const absl::Status& status, const StreamSummary& summary, const StreamFacts& stream,
                     const HeadFacts& head, const Device& device, bool stopping) {
  if (status.ok()) return CheckOk(summary, stream, device);
  if (MayEndWith(status.code(), stream, head, device, stopping))
    return CheckNothingAccumulated(status, stream, head, device);
  return absl::StrCat("it ended without a reason: ", status.ToString());
}

std::string CheckVersion(uint64_t weights_version, int64_t on_device, VersionNames& names) {
  const int64_t known = names.emplace(weights_version, on_device).first->second;
  if (known == on_device) return "";
  return absl::StrCat("a result of weights_version ", weights_version, " has weights ", on_device,
                      ", and another one had weights ", known);
}

std::string CheckBookedNothing(const EngineStats& before, const EngineStats& after) {
  const std::tuple<const char*, int64_t, int64_t> counts[] = {
      {"streams", before.open_streams, after.open_streams},
      {"queued slices", before.queued_slices, after.queued_slices},
      {"waiting slices", before.waiting_slices, after.waiting_slices},
      {"queued rows", before.queued_rows, after.queued_rows},
      {"bytes of staging", before.staging_used_bytes, after.staging_used_bytes},
      {"buffers of areas", before.area_buffers_lent, after.area_buffers_lent},
      {"retained microbatches", before.retained_microbatches, after.retained_microbatches},
      {"retained bytes", before.retained_bytes_used, after.retained_bytes_used},
      {"rows in ledgers", before.ledger_rows, after.ledger_rows},
      {"bytes in ledgers", before.ledger_bytes, after.ledger_bytes},
      {"bytes of what is known of rows", before.row_bytes_used, after.row_bytes_used}};
  for (const auto& [what, was, is] : counts) {
    if (was != is) return absl::StrCat("a refused call booked ", is - was, " ", what);
  }
  return "";
}

std::string CheckOnce(const Generation& generation) {
  for (const auto& [name, times] : generation.times) {
    if (times != 1)
      return absl::StrCat("row ", name % kMostRows, " of ", name / kMostRows, " was accumulated ", times,
                          " times");
  }
  return "";
}

std::string CheckGeneration(const Generation& generation, int64_t number,
                            const std::map<int64_t, int64_t>& generation_of_stream,
                            const std::vector<Duty>& duties, bool deterministic, int64_t row_grid) {
  if (generation.broken) return "";
  if (std::string wrong = CheckOnce(generation); !wrong.empty()) return wrong;
  if (std::string wrong = CheckPromises(generation); !wrong.empty()) return wrong;
  SerialOrder order(duties, row_grid);
  for (const Added& added : generation.added) {
    for (const Added::Row& row : added.rows) {
      if (added.contribution || !row.accumulated) continue;
      const auto it = generation_of_stream.find(row.stream);
      if (it == generation_of_stream.end() || it->second != number)
        return absl::StrCat("a row of stream ", row.stream, " was accumulated in another generation");
      if (std::string wrong = CheckAddedRow(added, row, duties); !wrong.empty()) return wrong;
    }
    if (!deterministic || generation.has_bad_rows || !AnyAccumulated(added)) continue;
    if (std::string wrong = order.Next(added); !wrong.empty()) return wrong;
  }
  return "";
}

std::string CheckWholeStep(const Generation& generation, const std::vector<Duty>& duties) {
  size_t expected = 0;
  for (const Duty& duty : duties) {
    for (int64_t row = 0; row < duty.rows; ++row) {
      if (duty.kind != Kind::kContribution && !HasTarget(duty, row)) continue;
      ++expected;
      if (!generation.times.contains(static_cast<int64_t>(NameOf(duty.id, row))))
        return absl::StrCat("a whole step without row ", row, " of ", duty.id);
    }
  }
  return generation.times.size() == expected ? "" : "a whole step with other rows besides";
}

namespace {

struct State {
  bool exists = false;
  uint64_t step = 0;
  std::optional<uint64_t> closed_last;  // the step before, if it was applied here
  friend auto operator<=>(const State&, const State&) = default;
};

// The state after the call; nothing if the call cannot be now.
std::optional<State> After(const State& state, const Call& call) {
  using What = Call::What;
  if (call.what == What::kCreated || call.what == What::kMaybeCreated)
    return state.exists ? std::nullopt : std::optional<State>(State{.exists = true});
  if (call.what == What::kNotFound) return state.exists ? std::nullopt : std::optional<State>(state);
  if (!state.exists) return std::nullopt;
  const bool open = state.step == call.step;
  State after = state;
  switch (call.what) {
    case What::kSees:
    case What::kZeroed:
      return open ? std::optional<State>(state) : std::nullopt;
    case What::kRefused:
      return open ? std::nullopt : std::optional<State>(state);
    case What::kApplied:
      after.step = call.step + 1;
      after.closed_last = call.step;
      return open ? std::optional<State>(after) : std::nullopt;
    case What::kRepeated:
      return state.closed_last == call.step ? std::optional<State>(state) : std::nullopt;
    case What::kLoaded:
    case What::kMaybe:
      after.step = call.step;
      after.closed_last.reset();
      return after;
    case What::kDeleted:
      return State{};
    default:
      return std::nullopt;
  }
}

class Search {
 public:
  explicit Search(std::vector<Call> calls) : calls_(std::move(calls)), done_(calls_.size()) {
    std::stable_sort(calls_.begin(), calls_.end(),
                     [](const Call& a, const Call& b) { return a.begin < b.begin; });
  }

  bool From(const State& state) {
    while (first_ < done_.size() && done_[first_]) ++first_;
    best_ = std::max(best_, count_);
    if (first_ == done_.size()) return true;
    if (!seen_.emplace(done_, state).second) return false;
    int64_t earliest_end = std::numeric_limits<int64_t>::max();
    for (size_t i = first_; i < calls_.size() && calls_[i].begin <= earliest_end; ++i) {
      if (!done_[i]) earliest_end = std::min(earliest_end, calls_[i].end);
    }
    const size_t first = first_;
    for (size_t i = first; i < calls_.size() && calls_[i].begin <= earliest_end; ++i) {
      if (done_[i]) continue;
      const std::optional<State> after = After(state, calls_[i]);
      if (after.has_value() && Try(i, *after)) return true;
      const bool optional =
          calls_[i].what == Call::What::kMaybe || calls_[i].what == Call::What::kMaybeCreated;
      if (optional && Try(i, state)) return true;
      first_ = first;
    }
    if (count_ == best_) stuck_ = Stuck(state, earliest_end);
    return false;
  }
  const std::string& stuck() const { return stuck_; }

 private:
  bool Try(size_t i, const State& state) {
    done_[i] = true;
    ++count_;
    if (From(state)) return true;
    done_[i] = false;
    --count_;
    return false;
  }
  std::string Stuck(const State& state, int64_t earliest_end) const {
    std::string text = state.exists ? absl::StrCat("step ", state.step, " is open") : "there is no head";
    absl::StrAppend(&text, ", and none of these can be next:");
    for (size_t i = first_; i < calls_.size() && calls_[i].begin <= earliest_end; ++i) {
      if (!done_[i]) absl::StrAppend(&text, " ", Describe(calls_[i]), ";");
    }
    return text;
  }

  std::vector<Call> calls_;
  std::vector<bool> done_;
  size_t first_ = 0, count_ = 0, best_ = 0;
  std::set<std::pair<std::vector<bool>, State>> seen_;
  std::string stuck_;
};

}  // namespace

std::string Describe(const Call& call) {
  static constexpr const char* kNames[] = {"sees",       "is refused", "applies",   "repeats",
                                           "zeroes",     "loads",      "deletes",   "creates",
                                           "finds none", "may load",   "may create"};
  return absl::StrCat("[", call.begin, ", ", call.end, "] ", kNames[static_cast<size_t>(call.what)], " step ",
                      call.step);
}

std::string FindNoOrder(const std::vector<Call>& calls) {
  Search search(calls);
  return search.From({}) ? "" : search.stuck();
}

}  // namespace lossd::engine::simulation
