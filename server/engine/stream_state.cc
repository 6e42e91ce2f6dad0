// SPDX-License-Identifier: Apache-2.0
// The checks of a stream's spec, the contents and progress of a stream, and the deferred microbatches
// (stream_state.h).
#include "server/engine/stream_state.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "server/engine/errors.h"

namespace lossd::engine {

// ---- DeferredMicrobatches ----

absl::Status CheckRetained(uint64_t id, const RetainedTerms& kept, const RetainedTerms& other,
                           absl::string_view how) {
  if (!(kept.terms == other.terms)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.microbatch_id",
                      absl::StrCat("is ", how, " with other options; release it first"), absl::StrCat(id));
  }
  const RowRange a = kept.rows;
  const RowRange b = other.rows;
  if (a == b || a.end <= b.begin || b.end <= a.begin) return absl::OkStatus();
  return FieldError(absl::StatusCode::kAlreadyExists, "open.rows",
                    absl::StrCat("overlaps rows ", Text(a), " of microbatch ", id, ", which are ", how,
                                 "; release it first"),
                    Text(b));
}

absl::Status DeferredMicrobatches::CheckAdd(uint64_t id, const MicrobatchTerms& terms, RowRange rows,
                                            absl::string_view identity) const {
  const auto it = microbatches_.find(id);
  if (it == microbatches_.end()) return absl::OkStatus();
  for (const auto& [begin, part] : it->second.parts) {
    auto agrees = CheckRetained(id, {it->second.terms, part.retained.rows}, {terms, rows}, "retained");
    if (!agrees.ok()) return agrees;
    if (part.retained.rows == rows && part.identity != identity) {
      return FieldError(absl::StatusCode::kPermissionDenied, "open.rows",
                        absl::StrCat("of microbatch ", id, " are retained by ", part.identity), Text(rows));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> DeferredMicrobatches::Release(uint64_t id, const Asker& asker) {
  const auto found = microbatches_.find(id);
  if (found == microbatches_.end()) return false;
  const auto owns = [&asker](const auto& entry) {
    const Part& part = entry.second;
    if (!asker.identity.empty()) return part.identity == asker.identity;
    return asker.run.empty() || part.run.empty() || part.run == asker.run;
  };
  const auto& parts = found->second.parts;
  if (!asker.may_all && std::none_of(parts.begin(), parts.end(), owns)) {
    const Part& part = parts.begin()->second;
    return FieldError(
        asker.identity.empty() ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kPermissionDenied,
        "microbatch_id",
        absl::StrCat("is retained by ", part.identity, part.identity.empty() ? "run " : " (run ", part.run,
                     part.identity.empty() ? "" : ")", ", which may release it, as may an admin"),
        absl::StrCat(id));
  }
  microbatches_.erase(found);
  return true;
}

void DeferredMicrobatches::Add(uint64_t id, const MicrobatchTerms& terms, const Binding& binding, Part part,
                               absl::Time now) {
  if (part.retained.rows.size() == 0) return;
  Microbatch& microbatch = microbatches_[id];
  microbatch.terms = terms;
  microbatch.binding = binding;
  microbatch.last_used = now;
  microbatch.parts.insert_or_assign(part.retained.rows.begin, std::move(part));
}

absl::StatusOr<const DeferredMicrobatches::Microbatch*> DeferredMicrobatches::Find(uint64_t id, RowRange rows,
                                                                                   absl::Time now) {
  const auto it = microbatches_.find(id);
  if (it == microbatches_.end()) {
    return FieldError(absl::StatusCode::kNotFound, "backward.microbatch_id",
                      "must be retained: forwarded with retain in the open step, not released, not expired",
                      absl::StrCat(id));
  }
  int64_t next = rows.begin;
  for (const auto& [begin, part] : it->second.parts) {
    if (begin <= next && next < part.retained.rows.end) next = part.retained.rows.end;
  }
  if (next < rows.end) {
    return FieldError(absl::StatusCode::kNotFound, "backward.rows",
                      absl::StrCat("must be retained; row ", next, " is not"), Text(rows));
  }
  it->second.last_used = now;
  return &it->second;
}

void DeferredMicrobatches::ReleaseIf(absl::FunctionRef<bool(const Binding&)> past) {
  std::erase_if(microbatches_, [past](const auto& entry) { return past(entry.second.binding); });
}

int64_t DeferredMicrobatches::Expire(absl::Time limit) {
  return static_cast<int64_t>(
      std::erase_if(microbatches_, [limit](const auto& entry) { return entry.second.last_used < limit; }));
}

// ---- StreamRows ----

namespace {

constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

absl::Status CheckRanges(const StreamSpec& spec) {
  if (spec.microbatch_rows < 0 || spec.microbatch_rows > kMaxRows) {
    return InvalidField("open.microbatch_rows", "must be in [0, 2^31 - 1]",
                        absl::StrCat(spec.microbatch_rows));
  }
  if (!spec.rows.IsWithin({0, spec.microbatch_rows})) {
    return InvalidField("open.rows", absl::StrCat("must lie in [0, ", spec.microbatch_rows, ")"),
                        Text(spec.rows));
  }
  const int64_t rows = spec.rows.size();
  if (static_cast<int64_t>(spec.targets.size()) != rows) {
    return InvalidField("open.targets", absl::StrCat("must have one entry for each of the ", rows, " rows"),
                        absl::StrCat(spec.targets.size()));
  }
  return CheckRowValues("open.row_weights", spec.row_weights, rows, /*optional=*/true);
}

absl::Status CheckNormalizer(absl::string_view field, double normalizer, const StreamSpec& spec) {
  if (spec.reduction != Reduction::kMean) {
    return InvalidField(field, "goes with REDUCTION_MEAN only", absl::StrCat(normalizer));
  }
  if (!(std::isfinite(normalizer) && normalizer >= 0)) {
    return InvalidField(field, "must be finite and positive", absl::StrCat(normalizer));
  }
  return absl::OkStatus();
}

// Checks that the per-row inputs that the objective needs are present, and no others.
absl::Status CheckObjective(const StreamSpec& spec) {
  const kernels::Objective& objective = spec.options.objective;
  const std::tuple<absl::string_view, bool, const std::vector<float>&> numbers[] = {
      {"open.advantages", kernels::NeedsAdvantage(objective.kind), spec.numbers.advantages},
      {"open.old_logprobs", kernels::NeedsOldLogprob(objective.kind), spec.numbers.old_logprobs},
      {"open.ref_logprobs", objective.needs_reference(), spec.numbers.ref_logprobs}};
  for (const auto& [field, needed, values] : numbers) {
    if (!needed && !values.empty()) {
      return InvalidField(
          field,
          absl::StrCat("must be empty with open.options.objective ", kernels::Name(objective.kind),
                       field == "open.ref_logprobs" ? " without kl_coef" : ""),
          absl::StrCat(values.size()));
    }
    if (needed) LOSSD_RETURN_IF_ERROR(CheckRowValues(field, values, spec.rows.size(), /*optional=*/false));
  }
  if (objective.active() && spec.reduction == Reduction::kNone) {
    return InvalidField("open.reduction", "must be sum or mean with open.options.objective", "none");
  }
  return absl::OkStatus();
}

// Checks that the depths cover all rows, with weights and normalizers that fit the reduction.
absl::Status CheckDepths(const StreamSpec& spec) {
  if (spec.depths.empty()) return absl::OkStatus();
  const auto count = static_cast<int64_t>(spec.depths.size());
  if (count > kMostDepths) {
    return InvalidField("open.depths", absl::StrCat("must be at most ", kMostDepths), absl::StrCat(count));
  }
  if (spec.reduction == Reduction::kNone) {
    return InvalidField("open.depths", "must be empty with REDUCTION_NONE", absl::StrCat(count));
  }
  if (spec.normalizer.has_value()) {
    return InvalidField("open.normalizer",
                        "must be absent with open.depths, which have normalizers of their own",
                        absl::StrCat(*spec.normalizer));
  }
  int64_t rows = 0;
  for (size_t i = 0; i < spec.depths.size(); ++i) {
    const Depth& depth = spec.depths[i];
    const std::string field = absl::StrCat("open.depths[", i, "].");
    if (depth.rows < 0 || depth.rows > spec.microbatch_rows - rows) {
      return InvalidField(absl::StrCat(field, "rows"),
                          absl::StrCat("must be in [0, ", spec.microbatch_rows - rows, "], the rest of the ",
                                       spec.microbatch_rows, " rows of the microbatch"),
                          absl::StrCat(depth.rows));
    }
    if (!std::isfinite(depth.weight) || depth.weight < 0.0f) {
      return InvalidField(absl::StrCat(field, "weight"), "must be finite and >= 0",
                          absl::StrCat(depth.weight));
    }
    if (depth.normalizer.has_value()) {
      LOSSD_RETURN_IF_ERROR(CheckNormalizer(absl::StrCat(field, "normalizer"), *depth.normalizer, spec));
    }
    rows += depth.rows;
  }
  if (rows != spec.microbatch_rows) {
    return InvalidField("open.depths",
                        absl::StrCat("must have all ", spec.microbatch_rows, " rows of the microbatch"),
                        absl::StrCat(rows));
  }
  return absl::OkStatus();
}

absl::Status CheckNumbers(const StreamSpec& spec) {
  LOSSD_RETURN_IF_ERROR(CheckObjective(spec));
  if (spec.reduction == Reduction::kNone && (spec.want_grad_hidden || spec.accumulate_gradients)) {
    return InvalidField(
        "open.reduction",
        "must be sum or mean with want_grad_hidden or accumulate_gradients (with none, gradients "
        "come by Backward)",
        "none");
  }
  if (spec.retain && spec.reduction != Reduction::kNone) {
    return InvalidField("open.retain", "goes with REDUCTION_NONE only", "true");
  }
  if (!std::isfinite(spec.grad_output)) {
    return InvalidField("open.grad_output", "must be finite", absl::StrCat(spec.grad_output));
  }
  if (spec.normalizer.has_value()) {
    LOSSD_RETURN_IF_ERROR(CheckNormalizer("open.normalizer", *spec.normalizer, spec));
  }
  LOSSD_RETURN_IF_ERROR(CheckDepths(spec));
  assert(kernels::Validate(spec.options).ok());
  return absl::OkStatus();
}

// Sets the options that the spec leaves to the head.
void ResolveOptions(const kernels::HeadConfig& config, StreamSpec& spec) {
  if (spec.gradients_of_head && !spec.options.is_embedding()) spec.options.gradients = config.gradients;
}

absl::Status CheckHead(const StreamSpec& spec, const kernels::HeadConfig& config) {
  if (config.logits == kernels::Logits::kNone && !spec.options.is_embedding()) {
    return InvalidField("open.embedding", "is required: the head is an embedding alone (LOGITS_NONE)",
                        "nothing");
  }
  if (spec.options.use_class_weights && !config.has_class_weights) {
    return InvalidField("open.options.use_class_weights", "needs a head with class weights", "true");
  }
  if (!spec.accumulate_gradients) return absl::OkStatus();
  if (!config.trainable) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.accumulate_gradients",
                      "needs a head that is not frozen", "true");
  }
  if (!spec.step.has_value()) {
    return InvalidField("open.step", "is required with accumulate_gradients", "nothing");
  }
  return absl::OkStatus();
}

// Checks a stream of embedding rows or of their gradients: it has no loss, and its only result is the rows.
absl::Status CheckEmbedding(const StreamSpec& spec, const kernels::HeadConfig& config) {
  if (!spec.options.is_embedding()) return absl::OkStatus();
  const bool gradients = spec.options.embedding == kernels::Embedding::kGradients;
  const RowWants& wants = spec.want_rows;
  struct Rule {
    absl::string_view field;
    bool is_broken;
    absl::string_view must;
    std::string value;
  };
  const absl::string_view must_go_out = gradients ? "must be false" : "must be true";
  const absl::string_view must_come_in = gradients ? "must be true" : "must be false";
  const std::string true_or_false[] = {gradients ? "true" : "false", gradients ? "false" : "true"};
  const Rule rules[] = {
      {"open.reduction", spec.reduction != Reduction::kSum, "must be sum",
       spec.reduction == Reduction::kMean ? "mean" : "none"},
      {"open.grad_output", !gradients && spec.grad_output != 1.0f, "must be absent",
       absl::StrCat(spec.grad_output)},
      {"open.want_grad_hidden", spec.want_grad_hidden == gradients, must_go_out, true_or_false[0]},
      {"open.accumulate_gradients", spec.accumulate_gradients != gradients, must_come_in, true_or_false[1]},
      {"open.want_row_loss", wants.loss, "must be false", "true"},
      {"open.want_row_lse", wants.lse, "must be false", "true"},
      {"open.want_row_entropy", wants.entropy, "must be false", "true"},
      {"open.want_row_logprob", wants.logprob, "must be false", "true"},
      {"open.want_row_argmax", wants.argmax, "must be false", "true"},
      {"open.class_count", wants.class_count != 0, "must be 0", absl::StrCat(wants.class_count)},
      {"open.top_k", wants.top_k != 0, "must be 0", absl::StrCat(wants.top_k)},
      {"open.target_count", spec.soft.count != 0, "must be 0", absl::StrCat(spec.soft.count)},
      {"open.row_weights", !spec.row_weights.empty(), "must be empty", absl::StrCat(spec.row_weights.size())},
      {"open.depths", !spec.depths.empty(), "must be empty", absl::StrCat(spec.depths.size())},
      {"open.retain", spec.retain, "must be false", "true"}};
  const absl::string_view name = gradients ? "EMBEDDING_GRADIENTS" : "EMBEDDING_ROWS";
  for (const Rule& rule : rules) {
    if (rule.is_broken) return InvalidField(rule.field, absl::StrCat(rule.must, " with ", name), rule.value);
  }
  if (!config.class_list.empty()) {
    return InvalidField("open.embedding", "must be absent: the head has a draft vocabulary (class_list)",
                        name);
  }
  if (config.residency == kernels::Residency::kHost) {
    return FieldError(absl::StatusCode::kUnimplemented, "open.embedding",
                      "must be absent: the head lives in memory of the host",
                      gradients ? "gradients" : "rows");
  }
  return absl::OkStatus();
}

// Checks what the stream wants of single classes: top_k, class_count and classes.
absl::Status CheckClasses(const StreamSpec& spec, int64_t vocab_size, const SliceLimits& limits) {
  const int64_t most_top = std::min<int64_t>(vocab_size, kernels::kMostTopClasses);
  if (spec.want_rows.top_k < 0 || spec.want_rows.top_k > most_top) {
    return InvalidField("open.top_k",
                        absl::StrCat("must be at most ", most_top, " (of the head's ", vocab_size,
                                     " classes at most ", kernels::kMostTopClasses, ")"),
                        absl::StrCat(spec.want_rows.top_k));
  }
  const int64_t count = spec.want_rows.class_count;
  if (count < 0 || count > kernels::kMostGivenClasses) {
    return InvalidField("open.class_count", absl::StrCat("must be at most ", kernels::kMostGivenClasses),
                        absl::StrCat(count));
  }
  if (count > 0 && limits.has_grid()) {
    return InvalidField(
        "open.class_count",
        "must be 0 with accumulate_gradients on a deterministic server, where calls share chunks",
        absl::StrCat(count));
  }
  const auto size = static_cast<int64_t>(spec.classes.size());
  if (size != count && size != count * spec.rows.size()) {
    return InvalidField("open.classes",
                        absl::StrCat("must have class_count entries, ", count,
                                     ", or as many for each of the ", spec.rows.size(), " rows"),
                        absl::StrCat(size));
  }
  return absl::OkStatus();
}

// Maps the classes that a caller names to the head's numbers of these classes.
absl::Status MapClasses(const kernels::HeadConfig& config, std::vector<int32_t>& classes) {
  const kernels::ClassList& list = config.class_list;
  const int64_t most = list.empty() ? config.vocab_size : list.full_size();
  for (size_t i = 0; i < classes.size(); ++i) {
    const int32_t named = classes[i];
    LOSSD_RETURN_IF_ERROR(errors::CheckClass("open.classes", i, named, most));
    if (list.empty()) continue;
    classes[i] = list.Find(named);
    if (classes[i] >= 0) continue;
    return InvalidField(absl::StrCat("open.classes[", i, "]"), "must be in the head's class_list",
                        absl::StrCat(named));
  }
  return absl::OkStatus();
}

// Checks soft targets, which are required with options.rest and refused without it.
absl::Status CheckSoftTargets(const StreamSpec& spec, int64_t vocab_size) {
  const SoftTargets& soft = spec.soft;
  const std::pair<absl::string_view, size_t> sizes[] = {
      {"open.target_count", static_cast<size_t>(soft.count)},
      {"open.target_classes", soft.classes.size()},
      {"open.target_weights", soft.weights.size()}};
  if (!spec.options.has_soft_targets()) {
    for (const auto& [field, size] : sizes) {
      if (size == 0) continue;
      return InvalidField(field, "goes with open.options.rest only", absl::StrCat(size));
    }
    return absl::OkStatus();
  }
  if (spec.want_rows.class_count > 0 || spec.want_rows.top_k > 0) {
    return InvalidField(spec.want_rows.class_count > 0 ? "open.class_count" : "open.top_k",
                        "must be 0 with open.options.rest",
                        absl::StrCat(std::max(spec.want_rows.class_count, spec.want_rows.top_k)));
  }
  const int64_t most = std::min<int64_t>(vocab_size, kernels::kMostSoftTargets);
  if (soft.count < 1 || soft.count > most) {
    return InvalidField("open.target_count",
                        absl::StrCat("must be in [1, ", most, "] with open.options.rest"),
                        absl::StrCat(soft.count));
  }
  const auto entries = static_cast<size_t>(spec.rows.size()) * static_cast<size_t>(soft.count);
  for (const auto& [field, size] : absl::MakeSpan(sizes).subspan(1)) {
    if (size == entries) continue;
    return InvalidField(field,
                        absl::StrCat("must have target_count entries, ", soft.count, ", for each of the ",
                                     spec.rows.size(), " rows"),
                        absl::StrCat(size));
  }
  return kernels::CheckSoftTargets("open.", spec.options.rest, vocab_size, soft.count, soft.classes,
                                   soft.weights, spec.targets, spec.ignore_index);
}

// The most rows of a slice whose rows want results of single classes. These results are far larger than
// others, so such a slice has fewer rows, and its answer stays a message of the usual size.
int64_t MostRowsWithClasses(const RowWants& wants) {
  const int64_t row_bytes = 4 * int64_t{wants.class_count} + 9 * int64_t{wants.top_k};
  return row_bytes == 0 ? std::numeric_limits<int64_t>::max() : kMostClassResultBytes / row_bytes;
}

// For a head with a class list: the head's number of the class that a target names. kernels::kIgnoredTarget
// if the class is not in the list.
absl::StatusOr<int32_t> ListedClass(const StreamSpec& spec, const kernels::ClassList& class_list,
                                    size_t index) {
  const int32_t target = spec.targets[index];
  const int32_t found = class_list.Find(target);
  if (found >= 0) return found;
  // The target has no weight in the loss; it only says that the row counts.
  const kernels::Distillation& distillation = spec.options.distillation;
  if (distillation.used() && distillation.target_weight == 0.0f) return 0;
  if (spec.refuse_unlisted) {
    return InvalidField(absl::StrCat("open.targets[", index, "]"),
                        "must be in the head's class_list with open.options.refuse_unlisted",
                        absl::StrCat(target));
  }
  return kernels::kIgnoredTarget;
}

// The normalizer of the microbatch or of a depth. `field` names it in errors; `given` is the value in the
// spec; `valid`: the valid rows that this stream has of it.
absl::StatusOr<double> NormalizerOf(const StreamSpec& spec, absl::string_view field,
                                    std::optional<double> given, int64_t valid) {
  if (spec.reduction != Reduction::kMean) return 1.0;
  if (!given.has_value() &&
      (spec.rows != RowRange{0, spec.microbatch_rows} || spec.options.use_class_weights)) {
    return InvalidField(
        field,
        "is required with REDUCTION_MEAN unless one call carries the whole microbatch without "
        "class weights",
        "nothing");
  }
  const double normalizer = given.value_or(static_cast<double>(valid));
  if (normalizer == 0 && valid > 0) {
    return InvalidField(field, absl::StrCat("must be positive with ", valid, " valid rows"), "0");
  }
  return normalizer;
}

// The factor of gradients, grad_output / normalizer. `field` names the normalizer in errors.
absl::StatusOr<float> GradScale(absl::string_view field, double grad_output, double normalizer) {
  const float scale = normalizer == 0 ? 0.0f : static_cast<float>(grad_output / normalizer);
  if (std::isfinite(scale)) return scale;
  return InvalidField(field, "makes grad_output / normalizer overflow", absl::StrCat(normalizer));
}

}  // namespace

absl::Status CheckRowValues(absl::string_view field, absl::Span<const float> values, int64_t rows,
                            bool optional) {
  if (values.empty() && optional) return absl::OkStatus();
  if (static_cast<int64_t>(values.size()) != rows) {
    return InvalidField(field,
                        absl::StrCat(optional ? "must be empty or have" : "must have",
                                     " one entry for each of the ", rows, " rows"),
                        absl::StrCat(values.size()));
  }
  return errors::CheckFinite(field, values);
}

StreamRows::StreamRows(StreamSpec spec, HeadState state, SliceLimits limits, TeacherOf teacher)
    : spec_(std::move(spec)), head_state_(state), limits_(limits), teacher_(std::move(teacher)) {
  limits_.max_bytes_in_place += limits_.max_rows * teacher_.hidden_size * static_cast<int64_t>(sizeof(float));
}

absl::StatusOr<StreamRows> StreamRows::Create(StreamSpec spec, const kernels::HeadConfig& config,
                                              HeadState state, SliceLimits limits, TeacherOf teacher) {
  ResolveOptions(config, spec);
  LOSSD_RETURN_IF_ERROR(CheckRanges(spec));
  LOSSD_RETURN_IF_ERROR(CheckNumbers(spec));
  LOSSD_RETURN_IF_ERROR(CheckHead(spec, config));
  LOSSD_RETURN_IF_ERROR(CheckEmbedding(spec, config));
  LOSSD_RETURN_IF_ERROR(CheckClasses(spec, config.vocab_size, limits));
  if (spec.options.has_soft_targets() && !config.class_list.empty()) {
    return FieldError(absl::StatusCode::kUnimplemented, "open.options.rest",
                      "must be absent: the rows of a head with a draft vocabulary have one target each",
                      kernels::Name(spec.options.rest));
  }
  LOSSD_RETURN_IF_ERROR(CheckSoftTargets(spec, config.vocab_size));
  LOSSD_RETURN_IF_ERROR(MapClasses(config, spec.classes));

  limits.max_rows = std::min(limits.max_rows, MostRowsWithClasses(spec.want_rows));
  StreamRows rows(std::move(spec), state, limits, std::move(teacher));
  rows.hidden_size_ = config.hidden_size;
  rows.class_list_ = config.class_list;
  LOSSD_RETURN_IF_ERROR(rows.MapTargets(config.vocab_size));
  rows.digest_ = DigestOf(rows.spec_.soft, rows.spec_.targets);
  LOSSD_RETURN_IF_ERROR(rows.ResolveNormalizer());
  return rows;
}

absl::Status StreamRows::MapTargets(int64_t vocab_size) {
  const bool listed = !class_list_.empty() && !spec_.classes_of_head;
  const int64_t most = listed ? class_list_.full_size() : vocab_size;
  const std::string also =
      spec_.options.is_embedding() ? "" : absl::StrCat(" or ignore_index (", spec_.ignore_index, ")");
  for (size_t i = 0; i < spec_.targets.size(); ++i) {
    int32_t& target = spec_.targets[i];
    if (target == spec_.ignore_index) {
      target = kernels::kIgnoredTarget;
      continue;
    }
    LOSSD_RETURN_IF_ERROR(errors::CheckClass("open.targets", i, target, most, also));
    if (listed) {
      LOSSD_TRY(target, ListedClass(spec_, class_list_, i));
    }
    ++(target == kernels::kIgnoredTarget ? unlisted_rows_ : valid_rows_);
  }
  return absl::OkStatus();
}

void StreamRows::NumberClasses(std::vector<int32_t>& classes) const {
  if (class_list_.empty()) return;
  for (int32_t& each : classes) {
    if (each >= 0) each = class_list_.classes()[static_cast<size_t>(each)];
  }
}

absl::Status StreamRows::ResolveDepths() {
  grad_scales_.clear();
  int64_t begin = 0;
  for (size_t i = 0; i < spec_.depths.size(); ++i) {
    const Depth& depth = spec_.depths[i];
    const int64_t end = begin + depth.rows;
    int64_t valid = 0;  // valid rows of this stream in the depth
    for (int64_t row = std::max(begin, spec_.rows.begin); row < std::min(end, spec_.rows.end); ++row) {
      valid += HasTarget(row) ? 1 : 0;
    }
    const std::string field = absl::StrCat("open.depths[", i, "].normalizer");
    LOSSD_TRY(const double normalizer, NormalizerOf(spec_, field, depth.normalizer, valid));
    LOSSD_TRY(const float scale,
              GradScale(field, double{spec_.grad_output} * double{depth.weight}, normalizer));
    terms_.depths.push_back({.end = end, .weight = depth.weight, .normalizer = normalizer});
    grad_scales_.push_back(scale);
    begin = end;
  }
  return absl::OkStatus();
}

absl::Status StreamRows::ResolveNormalizer() {
  double normalizer = 1.0;
  if (spec_.depths.empty()) {
    LOSSD_TRY(normalizer, NormalizerOf(spec_, "open.normalizer", spec_.normalizer, valid_rows_));
    LOSSD_TRY(grad_scales_.front(), GradScale("open.normalizer", double{spec_.grad_output}, normalizer));
  }
  terms_ = {.microbatch_rows = spec_.microbatch_rows,
            .options = spec_.options,
            .hidden_dtype = spec_.hidden_dtype,
            .reduction = spec_.reduction,
            .normalizer = normalizer,
            .grad_output = spec_.grad_output,
            .want_grad_hidden = limits_.has_grid() && spec_.want_grad_hidden,
            .want_row_entropy = limits_.has_grid() && spec_.want_rows.entropy,
            .want_top_classes = limits_.has_grid() && spec_.want_rows.top_k > 0,
            .target_count = spec_.soft.count};
  return spec_.depths.empty() ? absl::OkStatus() : ResolveDepths();
}

void StreamRows::SetRetained(std::vector<RetainedRows> retained, RowGradients gradients) {
  retained_ = std::move(retained);
  gradients_ = std::move(gradients);
  is_backward_ = !gradients_.loss.empty();
}

Binding StreamRows::binding() const {
  Binding binding{.step = spec_.step, .weights = head_state_.weights_version};
  if (spec_.accumulate_gradients || spec_.retain || is_backward())
    binding.generation = head_state_.generation;
  return binding;
}

void StreamRows::PutValues(RowRange rows, kernels::Slice& slice) const {
  slice.targets = targets(rows);
  const auto values_of = [&](const std::vector<float>& values) {
    return values.empty() ? nullptr : values.data() + (rows.begin - spec_.rows.begin);
  };
  slice.row_weights = values_of(spec_.row_weights);
  slice.grad_loss = values_of(gradients_.loss);
  slice.grad_lse = values_of(gradients_.lse);
  slice.grad_entropy = values_of(gradients_.entropy);
  slice.advantages = values_of(spec_.numbers.advantages);
  slice.old_logprobs = values_of(spec_.numbers.old_logprobs);
  slice.ref_logprobs = values_of(spec_.numbers.ref_logprobs);
  slice.target_count = spec_.soft.count;
  if (slice.target_count > 0) {
    const int64_t first_entry = (rows.begin - spec_.rows.begin) * slice.target_count;
    slice.target_classes = spec_.soft.classes.data() + first_entry;
    slice.target_weights = spec_.soft.weights.data() + first_entry;
  }
  slice.class_count = spec_.want_rows.class_count;
  slice.shared_classes = spec_.shared_classes();
  const int64_t first = slice.shared_classes ? 0 : rows.begin - spec_.rows.begin;
  if (!spec_.classes.empty()) slice.classes = spec_.classes.data() + first * slice.class_count;
}

int64_t StreamRows::RowBytes(int64_t rows) const {
  return rows * hidden_size_ * static_cast<int64_t>(kernels::SizeOf(spec_.hidden_dtype));
}

int64_t StreamRows::RetainedBytes() const {
  constexpr int64_t kEntry = sizeof(int32_t) + sizeof(float);
  return RowBytes(spec_.rows.size()) + static_cast<int64_t>(spec_.soft.classes.size()) * kEntry;
}

int64_t StreamRows::RetainedOffset(RowRange rows) const {
  for (const RetainedRows& piece : retained_) {
    if (piece.rows.begin <= rows.begin && rows.end <= piece.rows.end) {
      return piece.block->offset() + RowBytes(rows.begin - piece.rows.begin);
    }
  }
  return -1;
}

int64_t StreamRows::HostBytes() const {
  constexpr int64_t kOverhead = 1024;  // for the stream object itself
  const size_t floats = spec_.row_weights.size() + gradients_.loss.size() + gradients_.lse.size() +
                        gradients_.entropy.size() + spec_.numbers.advantages.size() +
                        spec_.numbers.old_logprobs.size() + spec_.numbers.ref_logprobs.size() +
                        spec_.soft.weights.size() + 3 * digest_.sums.size();
  constexpr size_t kTargetAndFlag = sizeof(int32_t) + sizeof(uint8_t);
  return kOverhead + terms_.HostBytes() +
         static_cast<int64_t>(spec_.targets.size() * kTargetAndFlag + floats * sizeof(float) +
                              spec_.classes.size() * sizeof(int32_t) +
                              spec_.soft.classes.size() * sizeof(int32_t));
}

RowValues StreamRows::TakeValues() {
  return {.targets = std::move(spec_.targets),
          .row_weights = std::move(spec_.row_weights),
          .grad_loss = std::move(gradients_.loss),
          .grad_lse = std::move(gradients_.lse),
          .grad_entropy = std::move(gradients_.entropy),
          .numbers = std::move(spec_.numbers),
          .classes = std::move(spec_.classes),
          .soft = std::move(spec_.soft),
          .digest = std::move(digest_)};
}

DeferredMicrobatches::Part StreamRows::TakePart() {
  return {.retained = std::move(retained_.front()),
          .targets = std::move(spec_.targets),
          .row_weights = std::move(spec_.row_weights),
          .soft = std::move(spec_.soft),
          .identity = spec_.identity,
          .run = spec_.run};
}

std::vector<RowRange> StreamRows::RetainedSlices() const {
  const int64_t most = std::max<int64_t>(1, std::min(limits_.max_rows, limits_.max_bytes / RowBytes(1)));
  std::vector<RowRange> slices;
  for (const RetainedRows& piece : retained_) {
    const int64_t end = std::min(piece.rows.end, spec_.rows.end);
    for (int64_t row = std::max(piece.rows.begin, spec_.rows.begin); row < end; row = slices.back().end) {
      slices.push_back({row, std::min({end, row + most, limits_.NextGridRow(row)})});
    }
  }
  return slices;
}

absl::Status StreamRows::CheckSlice(RowRange rows, int64_t bytes, bool in_place) const {
  const int64_t most = in_place ? limits_.max_bytes_in_place : limits_.max_bytes;
  if (bytes > most) {
    return InvalidField(in_place ? "slice.in_region" : "payload",
                        absl::StrCat("must have at most ", errors::ExactBytes(most)), absl::StrCat(bytes));
  }
  if (rows.begin >= rows.end || !rows.IsWithin(spec_.rows)) {
    return InvalidField("slice.rows", absl::StrCat("must be a non-empty range in ", Text(spec_.rows)),
                        Text(rows));
  }
  if (rows.size() > limits_.max_rows) {
    return InvalidField("slice.rows", absl::StrCat("must have at most ", limits_.max_rows, " rows"),
                        Text(rows));
  }
  if (rows.end > terms_.EndOfDepth(rows.begin)) {
    return InvalidField("slice.rows",
                        absl::StrCat("must have rows of one depth only (open.depths); row ",
                                     terms_.EndOfDepth(rows.begin), " is of the next one"),
                        Text(rows));
  }
  if (bytes != SliceBytes(*this, rows.size())) {
    const std::string of_teacher =
        teacher_ ? absl::StrCat(", and ", teacher_.hidden_size, " of the teacher") : "";
    return InvalidField("payload",
                        absl::StrCat("must have ", errors::ExactBytes(SliceBytes(*this, rows.size())),
                                     " for rows ", Text(rows), " of ", hidden_size_, " ",
                                     kernels::Name(spec_.hidden_dtype), " values", of_teacher),
                        absl::StrCat(bytes));
  }
  return absl::OkStatus();
}

// ---- The backward pass of deferred microbatches ----

namespace {

// Appends the contents of rows [begin, end) of a part to `stream`. Some parts may have row weights and others
// not: a missing weight is 1.
void AppendPart(const DeferredMicrobatches::Part& part, int64_t begin, int64_t end, StreamSpec& stream) {
  const int64_t first = part.retained.rows.begin;
  const auto targets = part.targets.begin() + (begin - first);
  stream.targets.insert(stream.targets.end(), targets, targets + (end - begin));
  if (!part.row_weights.empty()) {
    stream.row_weights.resize(static_cast<size_t>(begin - stream.rows.begin), 1.0f);
    const auto weights = part.row_weights.begin() + (begin - first);
    stream.row_weights.insert(stream.row_weights.end(), weights, weights + (end - begin));
  } else if (!stream.row_weights.empty()) {
    stream.row_weights.resize(static_cast<size_t>(end - stream.rows.begin), 1.0f);
  }
  // All parts have the same number of soft targets a row (MicrobatchTerms::target_count).
  const int64_t count = part.soft.count;
  stream.soft.count = part.soft.count;
  const auto append = [&](const auto& from, auto& to) {
    to.insert(to.end(), from.begin() + (begin - first) * count, from.begin() + (end - first) * count);
  };
  append(part.soft.classes, stream.soft.classes);
  append(part.soft.weights, stream.soft.weights);
}

}  // namespace

absl::Status CheckBackward(const BackwardSpec& spec) {
  if (spec.rows.begin < 0 || spec.rows.begin >= spec.rows.end) {
    return InvalidField("backward.rows", "must be a non-empty range", Text(spec.rows));
  }
  if (spec.accumulate_gradients && !spec.step.has_value()) {
    return InvalidField("backward.step", "is required with accumulate_gradients", "nothing");
  }
  const int64_t rows = spec.rows.size();
  absl::Status status = CheckRowValues("backward.grad_loss", spec.grad_loss, rows, /*optional=*/false);
  status.Update(CheckRowValues("backward.grad_lse", spec.grad_lse, rows, /*optional=*/true));
  status.Update(CheckRowValues("backward.grad_entropy", spec.grad_entropy, rows, /*optional=*/true));
  return status;
}

BackwardRows RowsOf(const BackwardSpec& spec, const DeferredMicrobatches::Microbatch& kept) {
  BackwardRows backward;
  StreamSpec& stream = backward.stream;
  stream.head = spec.head;
  stream.peer = spec.peer;
  stream.step = spec.step;
  stream.run = spec.run;
  stream.microbatch_id = spec.microbatch_id;
  stream.microbatch_rows = kept.terms.microbatch_rows;
  stream.rows = spec.rows;
  stream.hidden_dtype = kept.terms.hidden_dtype;
  stream.options = kept.terms.options;
  stream.ignore_index = kernels::kIgnoredTarget;
  stream.classes_of_head = true;
  stream.want_grad_hidden = spec.want_grad_hidden;
  stream.accumulate_gradients = spec.accumulate_gradients;
  for (const auto& [first, part] : kept.parts) {
    const int64_t begin = std::max(first, spec.rows.begin);
    const int64_t end = std::min(part.retained.rows.end, spec.rows.end);
    if (begin >= end) continue;
    backward.retained.push_back(part.retained);
    AppendPart(part, begin, end, stream);
  }
  return backward;
}

// ---- StreamState ----

absl::StatusOr<std::shared_ptr<StreamState>> StreamState::Create(StreamSpec spec,
                                                                 const kernels::HeadConfig& config,
                                                                 HeadState state, SliceLimits limits,
                                                                 std::shared_ptr<StreamObserver> observer,
                                                                 TeacherOf teacher) {
  auto rows = StreamRows::Create(std::move(spec), config, state, limits, std::move(teacher));
  if (!rows.ok()) return rows.status();
  return std::make_shared<StreamState>(*std::move(rows), std::move(observer));
}

StreamState::StreamState(StreamRows rows, std::shared_ptr<StreamObserver> observer)
    : StreamRows(std::move(rows)),
      observer_(std::move(observer)),
      sent_(static_cast<size_t>(spec().rows.size())),
      unsent_rows_(spec().rows.size()),
      unsent_valid_rows_(valid_rows()) {
  summary_.state = head_state();
  summary_.normalizer = terms().normalizer;
  summary_.unlisted_rows = unlisted_rows();
  for (const DepthTerms& depth : terms().depths) {
    summary_.depths.emplace_back().normalizer = depth.normalizer;
  }
}

absl::Status StreamState::CheckNew(RowRange rows, int64_t bytes, bool in_place) const {
  if (half_closed_) return InvalidField("slice.rows", "came after the half-close", Text(rows));
  LOSSD_RETURN_IF_ERROR(CheckSlice(rows, bytes, in_place));
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    if (sent_[Index(row)]) return InvalidField("slice.rows", absl::StrCat("repeats row ", row), Text(rows));
  }
  if (!limits().has_grid()) return absl::OkStatus();
  if (rows.begin < sent_end_) {
    return InvalidField(
        "slice.rows",
        absl::StrCat("must come in ascending order on a deterministic server, after row ", sent_end_ - 1),
        Text(rows));
  }
  if (rows.end > limits().NextGridRow(rows.begin)) {
    return InvalidField("slice.rows",
                        absl::StrCat("must not hold rows on both sides of a multiple of ", limits().row_grid,
                                     " (SliceLimits.row_grid)"),
                        Text(rows));
  }
  return absl::OkStatus();
}

absl::Status StreamState::AddSlice(RowRange rows, int64_t bytes, bool in_place) {
  LOSSD_RETURN_IF_ERROR(CheckNew(rows, bytes, in_place));
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    sent_[Index(row)] = 1;
    if (HasTarget(row)) --unsent_valid_rows_;
  }
  unsent_rows_ -= rows.size();
  sent_end_ = rows.end;
  ++receiving_;
  return absl::OkStatus();
}

void StreamState::OnQueued() {
  --receiving_;
  ++outstanding_;
}

void StreamState::FinishSlice(RowRange rows, const kernels::LossSums& sums, int64_t accumulated,
                              int64_t repeated, double queue_seconds, double compute_seconds) {
  if (!summary_.depths.empty()) {
    DepthSummary& depth = summary_.depths[terms().DepthOf(rows.begin)];
    depth.sums += sums;
    depth.accumulated_rows += accumulated;
    depth.repeated_rows += repeated;
  }
  summary_.sums += sums;
  summary_.accumulated_rows += accumulated;
  summary_.repeated_rows += repeated;
  summary_.queue_seconds += queue_seconds;
  summary_.compute_seconds += compute_seconds;
}

absl::Status StreamState::HalfClose() {
  half_closed_ = true;
  if (unsent_valid_rows_ == 0) return absl::OkStatus();
  int64_t missing = spec().rows.begin;
  while (sent_[Index(missing)] || !HasTarget(missing)) ++missing;
  return InvalidField("slice.rows",
                      absl::StrCat("must cover every row with a target before the half-close; ",
                                   unsent_valid_rows_, " are missing"),
                      absl::StrCat("nothing for row ", missing));
}

void StreamState::Fail(absl::Status status) {
  if (status_.ok() && !finished_) status_ = std::move(status);
}

bool StreamState::ReadyToFinish() const {
  if (!started_ || finished_ || outstanding_ > 0) return false;
  if (failed()) return true;
  return receiving_ == 0 && (unsent_rows_ == 0 || (half_closed_ && unsent_valid_rows_ == 0));
}

}  // namespace lossd::engine
