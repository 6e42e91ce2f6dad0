// SPDX-License-Identifier: Apache-2.0
// Makes a plan (plan.h): the division of layers and head, steps of a pipeline, memory of a GPU, and speeds.
#include "client/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::plan {

// ---- Balance ----

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The exact sum of values >= 0, rounded once, as Python's math.fsum computes it. It keeps partial sums that
// do not overlap (Shewchuk 1997).
double ExactSum(absl::Span<const double> values) {
  std::vector<double> partials;  // ascending
  for (double x : values) {
    size_t kept = 0;
    for (double y : partials) {
      if (std::fabs(x) < std::fabs(y)) std::swap(x, y);
      const double high = x + y;
      const double low = y - (high - x);
      if (low != 0.0) partials[kept++] = low;
      x = high;
    }
    partials.resize(kept);
    partials.push_back(x);
  }
  double sum = 0.0, rest = 0.0;
  while (!partials.empty()) {
    const double x = sum;
    const double y = partials.back();
    partials.pop_back();
    sum = x + y;
    rest = y - (sum - x);
    if (rest != 0.0) break;
  }
  // If the rest is exactly half a unit, the partial sums that are left decide how to round.
  if (!partials.empty() && ((rest < 0.0 && partials.back() < 0.0) || (rest > 0.0 && partials.back() > 0.0))) {
    const double twice = rest * 2.0;
    const double higher = sum + twice;
    if (twice == higher - sum) sum = higher;
  }
  return sum;
}

enum class Least : uint8_t { kSlowest, kSquares };

// Divides `times` over the stages, with no load above `limit`. Minimizes the largest load or the sum of the
// squared loads. The load of a stage is the sum of its times, and its entry of `besides`.
std::vector<int64_t> Best(absl::Span<const double> times, absl::Span<const double> besides, double limit,
                          Least least, int64_t least_on_last) {
  const size_t count = times.size(), stages = besides.size();
  std::vector<double> sums = {0.0};
  for (const double time : times) sums.push_back(sums.back() + time);
  // costs[end]: the cost of the first `end` layers on the stages so far.
  std::vector<double> costs(count + 1, kInfinity);
  costs[0] = 0.0;
  std::vector<std::vector<size_t>> choices;
  for (size_t stage = 0; stage < stages; ++stage) {
    const size_t fewest = stage + 1 == stages ? static_cast<size_t>(least_on_last) : 1;
    std::vector<double> reached(count + 1, kInfinity);
    std::vector<size_t> begins(count + 1, 0);
    for (size_t end = fewest; end <= count; ++end) {
      for (size_t begin = 0; begin + fewest <= end; ++begin) {
        const double load = sums[end] - sums[begin] + besides[stage];
        if (load > limit || costs[begin] == kInfinity) continue;
        const double cost =
            least == Least::kSquares ? costs[begin] + load * load : std::max(costs[begin], load);
        if (cost < reached[end]) {
          reached[end] = cost;
          begins[end] = begin;
        }
      }
    }
    costs = std::move(reached);
    choices.push_back(std::move(begins));
  }
  std::vector<int64_t> layers(stages);
  size_t end = count;
  for (size_t stage = stages; stage-- > 0;) {
    layers[stage] = static_cast<int64_t>(end - choices[stage][end]);
    end = choices[stage][end];
  }
  return layers;
}

// Divides as evenly as possible, with a limit for each stage: the slowest stage of the best division, or
// `bound` if that is larger. A head fills the time up to `bound`.
std::vector<int64_t> DivideUpTo(absl::Span<const double> times, absl::Span<const double> besides,
                                double bound, int64_t least_on_last) {
  const std::vector<double> loads =
      StageSeconds(times, besides, Best(times, besides, kInfinity, Least::kSlowest, least_on_last));
  const double slowest = *std::max_element(loads.begin(), loads.end());
  return Best(times, besides, std::max(slowest, bound) * (1 + 1e-12), Least::kSquares, least_on_last);
}

// The part of the head's time that each stage takes. Each takes at least `least`, and the stages that take
// more finish together.
std::vector<double> Fill(const std::vector<double>& loads, double head, double least) {
  // Only what exceeds the lowest load is computed with. Otherwise a short time of the head would be lost in
  // rounding.
  const double lowest = *std::min_element(loads.begin(), loads.end());
  std::vector<double> above;
  above.reserve(loads.size());
  for (const double load : loads) above.push_back(load - lowest);
  std::vector<double> order = above;
  std::sort(order.begin(), order.end());
  const double rest = std::max(0.0, head - least * static_cast<double>(loads.size()));
  double level = 0.0;
  for (size_t number = 1; number <= order.size(); ++number) {
    level = (ExactSum(absl::MakeConstSpan(order).first(number)) + rest) / static_cast<double>(number);
    if (number == order.size() || level <= order[number]) break;
  }
  std::vector<double> parts;
  parts.reserve(loads.size());
  for (const double more : above) parts.push_back(least + std::max(0.0, level - more));
  return parts;
}

// The shares of the stages, in thousandths of the head.
std::vector<int64_t> SharesOf(const std::vector<double>& parts, double head, int64_t least) {
  if (*std::max_element(parts.begin(), parts.end()) == 0.0) {  // the head takes no time
    return std::vector<int64_t>(parts.size(), std::max(least, int64_t{1}));
  }
  std::vector<int64_t> shares;
  shares.reserve(parts.size());
  for (const double part : parts) {
    // nearbyint rounds halves to even, as Python's round does.
    const double share = std::nearbyint(static_cast<double>(kWholeShare) * (part / head));
    shares.push_back(std::max(least, static_cast<int64_t>(share)));
  }
  return shares;
}

}  // namespace

Balanced Balance(absl::Span<const double> layer_seconds, double head_seconds,
                 absl::Span<const double> stage_seconds, int64_t least_share) {
  const double bound = (ExactSum(layer_seconds) + ExactSum(stage_seconds) + head_seconds) /
                       static_cast<double>(stage_seconds.size());
  Balanced balanced;
  balanced.layers = DivideUpTo(layer_seconds, stage_seconds, bound, 1);
  const std::vector<double> loads = StageSeconds(layer_seconds, stage_seconds, balanced.layers);
  const double least = head_seconds * (static_cast<double>(least_share) / static_cast<double>(kWholeShare));
  balanced.shares = SharesOf(Fill(loads, head_seconds, least), head_seconds, least_share);
  return balanced;
}

std::vector<int64_t> DivideLayers(absl::Span<const double> layer_seconds,
                                  absl::Span<const double> stage_seconds, int64_t least_on_last) {
  return DivideUpTo(layer_seconds, stage_seconds, 0.0, least_on_last);
}

std::vector<double> StageSeconds(absl::Span<const double> layer_seconds,
                                 absl::Span<const double> stage_seconds, absl::Span<const int64_t> layers) {
  std::vector<double> loads;
  size_t first = 0;
  for (size_t stage = 0; stage < layers.size(); ++stage) {
    const auto count = static_cast<size_t>(layers[stage]);
    loads.push_back(ExactSum(layer_seconds.subspan(first, count)) + stage_seconds[stage]);
    first += count;
  }
  return loads;
}

// ---- Steps of a pipeline ----

namespace {

// The time of each stage outside its layers: the embedding on the first stage.
std::vector<double> Besides(const PipelineShape& shape) {
  std::vector<double> besides(static_cast<size_t>(shape.stages), 0.0);
  besides.front() = shape.embedding_seconds;
  return besides;
}

std::vector<double> Scaled(std::vector<double> values, double factor) {
  for (double& value : values) value *= factor;
  return values;
}

// T of each stage without the head.
std::vector<double> WithoutHead(const PipelineShape& shape, const std::vector<int64_t>& layers,
                                double layer_factor) {
  return StageSeconds(Scaled(shape.layer_seconds, layer_factor), Besides(shape), layers);
}

double Sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

struct Step {
  double slowest = 0.0;  // stage, of a microbatch
  double seconds = 0.0;
  bool server_bound = false;
};

// passed: the seconds of one microbatch through the whole pipeline. busy: T of each stage. served: the
// server's seconds for one microbatch of all replicas.
Step StepOf(const PipelineShape& shape, double passed, const std::vector<double>& busy, double served) {
  Step step;
  step.slowest = *std::max_element(busy.begin(), busy.end());
  step.server_bound = served > step.slowest;
  step.seconds = passed + static_cast<double>(shape.microbatches - 1) * std::max(step.slowest, served);
  return step;
}

Step LocalStep(const PipelineShape& shape, const std::vector<int64_t>& layers, double head,
               const PipelineFactors& factors) {
  std::vector<double> busy = WithoutHead(shape, layers, factors.layer);
  busy.back() += factors.local_head * head;
  return StepOf(shape, Sum(busy), busy, 0.0);
}

Step ServerStep(const PipelineShape& shape, const std::vector<int64_t>& layers, double head,
                const PipelineFactors& factors) {
  const std::vector<double> busy = WithoutHead(shape, layers, factors.layer);
  return StepOf(shape, Sum(busy) + head, busy, static_cast<double>(shape.replicas) * head);
}

Step ColocatedStep(const PipelineShape& shape, const std::vector<int64_t>& layers,
                   const std::vector<int64_t>& shares, double head, const PipelineFactors& factors) {
  std::vector<double> busy = WithoutHead(shape, layers, factors.layer);
  double passed = Sum(busy), largest = 0.0;
  const auto whole = static_cast<double>(std::accumulate(shares.begin(), shares.end(), int64_t{0}));
  for (size_t stage = 0; stage < busy.size(); ++stage) {
    const double part =
        whole > 0.0 ? static_cast<double>(shares[stage]) / whole : 1.0 / static_cast<double>(busy.size());
    busy[stage] += factors.colocated * part * head;
    largest = std::max(largest, part);
  }
  passed += factors.colocated * largest * head;
  return StepOf(shape, passed, busy, 0.0);
}

PipelineLayout LayoutOf(const PipelineShape& shape, const Step& step, const Step& least,
                        std::vector<int64_t> layers, int server_gpus) {
  PipelineLayout layout;
  layout.layers = std::move(layers);
  layout.gpus = shape.replicas * shape.stages + server_gpus;
  layout.slowest_stage_seconds = step.slowest;
  layout.step_seconds = step.seconds;
  layout.least_step_seconds = least.seconds;
  layout.server_bound = step.server_bound;
  const auto rows = static_cast<double>(shape.replicas * shape.microbatches * shape.microbatch_rows);
  layout.rows_per_second_and_gpu = rows / step.seconds / static_cast<double>(layout.gpus);
  return layout;
}

}  // namespace

PipelineLayout LocalLayout(const PipelineShape& shape, std::vector<int64_t> layers, double head_seconds,
                           const PipelineFactors& factors) {
  const Step step = LocalStep(shape, layers, head_seconds, factors);
  const Step least = LocalStep(shape, layers, head_seconds, {});
  return LayoutOf(shape, step, least, std::move(layers), 0);
}

PipelineLayout ServerLayout(const PipelineShape& shape, std::vector<int64_t> layers, double head_seconds,
                            int gpus, const PipelineFactors& factors) {
  const Step step = ServerStep(shape, layers, head_seconds, factors);
  const Step least = ServerStep(shape, layers, head_seconds, {});
  return LayoutOf(shape, step, least, std::move(layers), gpus);
}

PipelineLayout ColocatedLayout(const PipelineShape& shape, std::vector<int64_t> layers,
                               std::vector<int64_t> shares, double head_seconds,
                               const PipelineFactors& factors) {
  const Step step = ColocatedStep(shape, layers, shares, head_seconds, factors);
  const Step least = ColocatedStep(shape, layers, shares, head_seconds, {});
  PipelineLayout layout = LayoutOf(shape, step, least, std::move(layers), 0);
  layout.shares = std::move(shares);
  return layout;
}

PipelineLayout WithLocalHead(const PipelineShape& shape, double head_seconds,
                             const PipelineFactors& factors) {
  std::vector<double> besides = Besides(shape);
  besides.back() += factors.local_head * head_seconds;
  const int64_t least_on_last = shape.stages == 1 ? 1 : 0;
  std::vector<int64_t> layers =
      DivideLayers(Scaled(shape.layer_seconds, factors.layer), besides, least_on_last);
  return LocalLayout(shape, std::move(layers), head_seconds, factors);
}

PipelineLayout WithServer(const PipelineShape& shape, double head_seconds, int gpus,
                          const PipelineFactors& factors) {
  std::vector<int64_t> layers = DivideLayers(Scaled(shape.layer_seconds, factors.layer), Besides(shape), 1);
  return ServerLayout(shape, std::move(layers), head_seconds, gpus, factors);
}

PipelineLayout Colocated(const PipelineShape& shape, double head_seconds, int64_t least_share,
                         const PipelineFactors& factors) {
  Balanced balanced = Balance(shape.layer_seconds, head_seconds, Besides(shape), least_share);
  return ColocatedLayout(shape, std::move(balanced.layers), std::move(balanced.shares), head_seconds,
                         factors);
}

// ---- Memory of a GPU ----

namespace {

using kernels::Gradients;
using kernels::Logits;

using kernels::MemoryKind;

kernels::cuda::PlanDevice DeviceOf(const Card& card, kernels::Replica replica) {
  kernels::cuda::PlanDevice device;
  device.limits.multiprocessors = card.multiprocessors;
  device.limits.has_clusters = card.clusters > 0;
  device.limits.is_hopper = card.clusters > 0;
  device.limits.fused_clusters = card.clusters;
  device.limits.has_branches = true;
  device.replica = replica;
  return device;
}

kernels::HeadConfig ConfigOf(const Request& r, const Placement& placement) {
  return {.hidden_size = r.model.hidden,
          .vocab_size = r.model.vocab,
          .has_bias = r.bias,
          .norm = r.norm,
          .compute_dtype = kernels::DType::kBFloat16,
          .optimizer_state = r.optimizer_state,
          .logits = placement.logits,
          .workspace_bytes = r.workspace_bytes,
          .split = placement.split,
          .shares = placement.shares};
}

}  // namespace

absl::StatusOr<DeviceMemory> DeviceMemoryOf(const Request& request, const Card& card,
                                            const Placement& placement, kernels::Replica replica) {
  LOSSD_TRY(const kernels::cuda::HeadPlan plan,
            kernels::cuda::PlanHead(ConfigOf(request, placement), DeviceOf(card, replica)));
  DeviceMemory device;
  device.logits = placement.logits;
  device.split = placement.split;
  device.memory = plan.memory;
  device.library_bytes = kernels::cuda::kGemmWorkspaceBytes;
  device.device_bytes = plan.memory.OnDevice() + device.library_bytes;
  device.chunk_rows = plan.sizes.chunk_rows;
  device.fits = device.device_bytes <= request.memory_bytes;
  device.choices = plan.choices;
  return device;
}

// ---- Pipelines ----

namespace {

// The limits of a pipeline: dividing the layers takes stages x layers^2 operations.
constexpr int kMostStages = 256;
constexpr int64_t kMostPipelineLayers = 1024;
constexpr int64_t kFewestClasses = 8;  // for each GPU, on average
constexpr double kMostSeconds = 1e6;   // the most that a part may take for a microbatch
constexpr int64_t kStateBytes = 16;    // for each parameter: fp32 weight, gradient and two moments

// Converts to int64_t without overflow; sizes beyond any memory become 2^60.
int64_t Saturated(double bytes) {
  constexpr int64_t kMost = int64_t{1} << 60;
  return bytes < static_cast<double>(kMost) ? static_cast<int64_t>(bytes) : kMost;
}

// The seconds of the head for a microbatch; nullopt: not known.
struct HeadTimes {
  std::optional<double> local;
  std::optional<LocalMethod> method;                   // of `local`
  std::optional<double> exact, sampled;                // on one GPU
  std::optional<double> served_exact, served_sampled;  // on the server's GPUs
};

// The local head whose estimate has the smallest middle, or null if no estimate is known.
const LastStage* FastestLocal(const Plan& plan) {
  const LastStage* best = nullptr;
  for (const LastStage& stage : plan.last_stage) {
    if (!stage.microbatch.known()) continue;
    if (best == nullptr || stage.microbatch.middle_seconds() < best->microbatch.middle_seconds())
      best = &stage;
  }
  return best;
}

HeadTimes TimesOf(const Plan& plan) {
  const Request& r = plan.request;
  HeadTimes times;
  if (const LastStage* local = FastestLocal(plan); local != nullptr) {
    times.local = local->microbatch.middle_seconds();
    times.method = local->method;
  }
  if (r.pipeline.local_head_seconds > 0.0) {
    times.local = r.pipeline.local_head_seconds;
    times.method = std::nullopt;
  }
  const auto rows = static_cast<double>(r.microbatch);
  for (const ServerSpeed& speed : plan.speeds) {
    if (speed.logits != Logits::kStored || !speed.microbatch.known()) continue;
    if (speed.gradients == Gradients::kFiltered) continue;
    const bool exact = speed.gradients == Gradients::kExact;
    (exact ? times.exact : times.sampled) = speed.microbatch.high_seconds;
    (exact ? times.served_exact : times.served_sampled) = rows / speed.low_rows_per_second;
  }
  const double gpus = r.gpus;  // the given time is that of one GPU; several GPUs are taken to divide it
  if (r.pipeline.head_seconds > 0.0) {
    times.exact = r.pipeline.head_seconds;
    times.served_exact = r.pipeline.head_seconds / gpus;
  }
  if (r.pipeline.sampled_seconds > 0.0) {
    times.sampled = r.pipeline.sampled_seconds;
    times.served_sampled = r.pipeline.sampled_seconds / gpus;
  }
  return times;
}

class Planner {
 public:
  Planner(const Plan& plan, const Measured& measured)
      : plan_(plan), r_(plan.request), measured_(measured), times_(TimesOf(plan)) {
    const PipelineRequest& p = r_.pipeline;
    shape_ = {.layer_seconds = p.layer_seconds,
              .embedding_seconds = p.embedding_seconds,
              .stages = p.stages,
              .microbatches = CeilDiv(r_.rows, r_.microbatch),
              .microbatch_rows = r_.microbatch,
              .replicas = r_.trainers};
    if (p.layer_seconds.size() == 1) {
      shape_.layer_seconds.assign(static_cast<size_t>(r_.model.layers), p.layer_seconds[0]);
    }
    factors_ = {.layer = measured.factors.layer, .local_head = measured.factors.local_head};
  }

  absl::StatusOr<Pipelines> Make() {
    if (times_.local.has_value()) AddLocal();
    SayWhatIsLeftOut();
    AddServers(0);
    if (r_.trainers == 1 && r_.gpus == 1 && shape_.stages > 1) AddServers(1);
    for (const bool mps : {true, false}) {
      for (const Gradients gradients : {Gradients::kExact, Gradients::kSampled}) {
        LOSSD_RETURN_IF_ERROR(AddColocated(gradients, mps));
      }
    }
    return std::move(found_);
  }

 private:
  void Add(Pipeline pipeline) {
    const auto local = std::find_if(found_.known.begin(), found_.known.end(),
                                    [](const Pipeline& p) { return p.kind == PipelineKind::kLocal; });
    const double rate = pipeline.layout.rows_per_second_and_gpu;
    if (pipeline.kind == PipelineKind::kLocal) {
      pipeline.over_local = 1.0;
    } else if (local != found_.known.end()) {
      pipeline.over_local = rate / local->layout.rows_per_second_and_gpu;
    }
    pipeline.fits = std::max(*std::max_element(pipeline.stage_bytes.begin(), pipeline.stage_bytes.end()),
                             pipeline.server_bytes.value_or(0)) <= r_.memory_bytes;
    found_.known.push_back(std::move(pipeline));
  }

  void AddLocal() {
    Pipeline pipeline = {.kind = PipelineKind::kLocal, .local = times_.method};
    pipeline.layout = WithLocalHead(shape_, *times_.local, factors_);
    pipeline.stage_bytes = StageBytes(pipeline.layout.layers, 0);
    const LocalMethod method = times_.method.value_or(LocalMethod::kCompiled);
    pipeline.stage_bytes.back() +=
        StateBytesOfHead() + PeakBytes(method, r_.model.hidden, r_.model.vocab, r_.microbatch);
    Add(std::move(pipeline));
  }

  // The layouts with a server. The trainer has `fewer` stages less than the request.
  void AddServers(int fewer) {
    PipelineShape shape = shape_;
    shape.stages -= fewer;
    for (const Gradients gradients : {Gradients::kExact, Gradients::kSampled}) {
      const std::optional<double>& head =
          gradients == Gradients::kExact ? times_.served_exact : times_.served_sampled;
      if (!head.has_value()) continue;
      Pipeline pipeline = {.kind = PipelineKind::kServer, .gradients = gradients};
      pipeline.layout = WithServer(shape, *head, r_.gpus, factors_);
      pipeline.stage_bytes = StageBytes(pipeline.layout.layers, 1);
      pipeline.server_bytes = plan_.server.front().device_bytes;  // with stored logits
      Add(std::move(pipeline));
    }
  }

  absl::Status AddColocated(Gradients gradients, bool mps) {
    const std::optional<double>& head = gradients == Gradients::kExact ? times_.exact : times_.sampled;
    const auto factor = std::find_if(measured_.factors.colocated.begin(), measured_.factors.colocated.end(),
                                     [&](const StepFactors::Colocated& each) {
                                       return each.gradients == Name(gradients) && each.mps == mps;
                                     });
    if (!head.has_value() || factor == measured_.factors.colocated.end() || !EveryGpuHasClasses()) {
      return absl::OkStatus();
    }
    Pipeline pipeline = {.kind = PipelineKind::kColocated, .gradients = gradients, .mps = mps};
    PipelineFactors factors = factors_;
    factors.colocated = factor->factor;
    pipeline.head_seconds = *head;
    pipeline.least_share = LeastShare();
    pipeline.layout = Colocated(shape_, *head, pipeline.least_share, factors);
    pipeline.stage_bytes = StageBytes(pipeline.layout.layers, 1);
    const std::vector<int64_t>& shares = pipeline.layout.shares;
    const Placement placement = {.split = kernels::Split::kVocabulary,
                                 .shares = {shares.begin(), shares.end()}};
    for (int stage = 0; stage < shape_.stages; ++stage) {
      LOSSD_TRY(const DeviceMemory memory,
                DeviceMemoryOf(r_, measured_.card, placement, {stage, shape_.stages}));
      pipeline.stage_bytes[static_cast<size_t>(stage)] += memory.device_bytes;
    }
    Add(std::move(pipeline));
    return absl::OkStatus();
  }

  bool EveryGpuHasClasses() const { return r_.model.vocab >= kFewestClasses * shape_.stages; }

  void SayWhatIsLeftOut() {
    const auto leave_out = [&](bool is_so, std::string why) {
      if (is_so) found_.left_out.push_back(std::move(why));
    };
    const auto unknown = [](absl::string_view what, absl::string_view option) {
      return absl::StrCat("The time of ", what, " is not known; ", option, " gives it.");
    };
    leave_out(!times_.local.has_value(), unknown("a local head", "--local-head-seconds"));
    leave_out(!times_.exact.has_value(), unknown("exact gradients on a server", "--head-seconds"));
    leave_out(!times_.sampled.has_value(), unknown("sampled gradients on a server", "--sampled-seconds"));
    leave_out(!EveryGpuHasClasses(), absl::StrCat("A colocated head of ", r_.model.vocab,
                                                  " classes is too small for ", shape_.stages, " GPUs."));
    leave_out(measured_.factors.colocated.empty(), "No colocated head was measured on this card.");
  }

  // The least share of a GPU, so that every GPU has a class however its boundaries are rounded. Rounding may
  // make the sum of the shares larger than kWholeShare.
  int64_t LeastShare() const {
    const int64_t grain = kernels::GrainOfShares(r_.model.vocab, static_cast<size_t>(shape_.stages));
    const int64_t least = CeilDiv((kWholeShare + kWholeShare / 8) * grain, r_.model.vocab);
    return std::min(std::max<int64_t>(least, 1), kWholeShare / shape_.stages);
  }

  int64_t StateBytesOfHead() const { return plan::StateBytes(r_.model.hidden, r_.model.vocab); }

  int64_t LayerParameters() const {
    const int64_t matrix = r_.model.hidden * r_.model.vocab;
    const int64_t outside = r_.model.tied ? matrix : 2 * matrix;
    if (r_.model.parameters > outside) return (r_.model.parameters - outside) / r_.model.layers;
    return 12 * r_.model.hidden * r_.model.hidden;  // attention and a feed-forward of 4 D
  }

  // The peak memory of each stage: parameters with gradients and moments, the activations of the microbatches
  // in flight, what a layer needs while it is computed, and the embedding on the first stage. `more`: the
  // microbatches that each stage has in flight in addition to those of 1F1B.
  std::vector<int64_t> StageBytes(const std::vector<int64_t>& layers, int64_t more) const {
    const int64_t parameters = LayerParameters();
    const int64_t kept = r_.pipeline.layer_bytes > 0
                             ? r_.pipeline.layer_bytes
                             : LayerActivationBytes(r_.model.hidden, r_.microbatch, parameters);
    std::vector<int64_t> bytes;
    for (size_t stage = 0; stage < layers.size(); ++stage) {
      const int64_t in_flight =
          std::min(shape_.microbatches, static_cast<int64_t>(layers.size() - stage) + more);
      const double layer = static_cast<double>(kStateBytes * parameters) +
                           static_cast<double>(in_flight) * static_cast<double>(kept);
      bytes.push_back(Saturated(static_cast<double>(layers[stage]) * layer + static_cast<double>(kept)));
    }
    bytes.front() += StateBytesOfHead();  // the embedding has as many parameters as the head
    return bytes;
  }

  const Plan& plan_;
  const Request& r_;
  const Measured& measured_;
  const HeadTimes times_;
  PipelineShape shape_;
  PipelineFactors factors_;
  Pipelines found_;
};

absl::Status CheckSeconds(const char* name, double seconds) {
  if (seconds >= 0.0 && seconds <= kMostSeconds) return absl::OkStatus();
  return errors::FieldError(name, absl::StrCat("be from 0 to ", kMostSeconds), seconds);
}

absl::Status CheckLayerSeconds(const Request& r) {
  const std::vector<double>& layers = r.pipeline.layer_seconds;
  if (layers.empty()) return errors::FieldError("layer_seconds", "be given with stages", "nothing");
  if (layers.size() != 1 && static_cast<int64_t>(layers.size()) != r.model.layers) {
    return errors::FieldError("layer_seconds",
                              absl::StrCat("be one for all layers or one for each of the ", r.model.layers),
                              absl::StrCat(layers.size(), " values"));
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    if (layers[i] > 0.0 && layers[i] <= kMostSeconds) continue;
    const std::string name = layers.size() == 1 ? "layer_seconds" : absl::StrCat("layer_seconds[", i, "]");
    return errors::FieldError(name, absl::StrCat("be > 0 and at most ", kMostSeconds), layers[i]);
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view Name(PipelineKind kind) {
  switch (kind) {
    case PipelineKind::kLocal:
      return "local";
    case PipelineKind::kServer:
      return "server";
    case PipelineKind::kColocated:
      return "colocated";
  }
  return "";
}

int64_t LayerActivationBytes(int64_t hidden, int64_t rows, int64_t layer_parameters) {
  constexpr int64_t kBytes = 36;  // for each row and entry of the hidden state
  return Saturated(static_cast<double>(kBytes * hidden) * static_cast<double>(rows)) +
         kHalf * layer_parameters;
}

absl::Status CheckPipeline(const Request& request) {
  const PipelineRequest& p = request.pipeline;
  if (p.stages == 0) return absl::OkStatus();
  if (p.stages < 1 || p.stages > kMostStages) {
    return errors::FieldError("stages", absl::StrCat("be from 1 to ", kMostStages), p.stages);
  }
  if (request.model.layers < p.stages || request.model.layers > kMostPipelineLayers) {
    return errors::FieldError("layers",
                              absl::StrCat("be from ", p.stages, ", the stages, to ", kMostPipelineLayers),
                              request.model.layers);
  }
  LOSSD_RETURN_IF_ERROR(CheckLayerSeconds(request));
  for (const auto& [name, seconds] : {std::pair{"embedding_seconds", p.embedding_seconds},
                                      {"head_seconds", p.head_seconds},
                                      {"sampled_seconds", p.sampled_seconds},
                                      {"local_head_seconds", p.local_head_seconds}}) {
    LOSSD_RETURN_IF_ERROR(CheckSeconds(name, seconds));
  }
  constexpr int64_t kMostBytes = int64_t{1} << 40;
  if (p.layer_bytes < 0 || p.layer_bytes > kMostBytes) {
    return errors::FieldError("layer_memory", absl::StrCat("be from 0 to ", kMostBytes), p.layer_bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<Pipelines> PipelinesOf(const Plan& plan, const Measured& measured) {
  if (plan.request.pipeline.stages == 0) return Pipelines();
  return Planner(plan, measured).Make();
}

// ---- The whole plan ----

namespace {

using kernels::Split;

constexpr int64_t kMostTrainers = 1 << 20;
constexpr int kMostServerGpus = 1024;

absl::Status CheckRequest(const Request& r) {
  LOSSD_RETURN_IF_ERROR(Validate(r.model));
  const auto range = [](const char* name, int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) return absl::OkStatus();
    return errors::FieldError(name, absl::StrCat("be from ", least, " to ", most), value);
  };
  constexpr int64_t kMostRows = int64_t{1} << 40, kMostBytes = int64_t{1} << 50;
  for (const absl::Status& status :
       {range("rows", r.rows, 1, kMostRows), range("microbatch", r.microbatch, 1, r.rows),
        range("trainers", r.trainers, 1, kMostTrainers), range("gpus", r.gpus, 1, kMostServerGpus),
        range("memory", r.memory_bytes, 0, kMostBytes),
        range("stage_memory", r.stage_bytes, 0, kMostBytes)}) {
    if (!status.ok()) return status;
  }
  if (!(r.trainer_seconds >= 0.0) || !std::isfinite(r.trainer_seconds)) {
    return errors::FieldError("trainer_seconds", "be >= 0 and finite", r.trainer_seconds);
  }
  LOSSD_RETURN_IF_ERROR(CheckPipeline(r));
  if (r.data != "real" && r.data != "peaked" && r.data != "flat") {
    return errors::FieldError("data", "be real, peaked or flat", r.data);
  }
  return absl::OkStatus();
}

const PassRate* PassNamed(const Measured& measured, absl::string_view name) {
  for (const PassRate& pass : measured.passes) {
    if (pass.name == name) return &pass;
  }
  return nullptr;
}

// The passes between steps, over parameters in fp32 with a copy in bf16.
Update UpdateOf(const Request& r, const Measured& measured) {
  const char* name = "adamw bf16";
  if (r.optimizer_state == kernels::OptimizerState::kMomentum) name = "momentum bf16";
  if (r.optimizer_state == kernels::OptimizerState::kNone) name = "sgd bf16";
  Update update;
  const auto parameters = static_cast<double>(r.model.hidden) * static_cast<double>(r.model.vocab);
  double seconds = 0.0;
  for (const char* pass_name : {name, "gradient norm"}) {
    const PassRate* const pass = PassNamed(measured, pass_name);
    if (pass == nullptr) return update;
    seconds += parameters * static_cast<double>(pass->bytes_per_parameter) / (pass->gbps * 1e9);
    update.sources.push_back(pass->source);
  }
  update.sources.erase(std::unique(update.sources.begin(), update.sources.end()), update.sources.end());
  update.seconds = seconds;
  return update;
}

// How many trainers compute their steps without waiting for the server. In the time of a trainer's step, the
// server computes the rows of all these trainers and the update.
int64_t TrainersFed(const Request& r, double row_seconds, double update_seconds) {
  const double rows_seconds = row_seconds * static_cast<double>(r.rows);
  return std::max<int64_t>(static_cast<int64_t>((r.trainer_seconds - update_seconds) / rows_seconds), 0);
}

ServerSpeed SpeedOf(const Plan& plan, const Measured& measured, Logits logits, Gradients gradients) {
  const Request& r = plan.request;
  ServerSpeed speed;
  speed.logits = logits;
  speed.gradients = gradients;
  speed.microbatch = Bounded(EstimateTime(TimingsOf(measured, logits, gradients, r.data), r.model.hidden,
                                          r.model.vocab, r.microbatch),
                             measured.bounds);
  // The time that one of several GPUs takes differs between the splits. The slower split counts.
  double speedup = 1.0;
  if (r.gpus > 1) {
    if (!plan.rows_speedup.has_value() || !plan.vocabulary_speedup.has_value()) {
      speed.microbatch = Estimate();
      speed.microbatch.why_none = absl::StrCat("not measured on ", r.gpus, " GPUs");
      return speed;
    }
    speedup = std::min(*plan.rows_speedup, *plan.vocabulary_speedup);
  }
  if (!speed.microbatch.known()) return speed;
  const auto rows = static_cast<double>(r.microbatch);
  speed.low_rows_per_second = speedup * rows / speed.microbatch.high_seconds;
  speed.high_rows_per_second = speedup * rows / speed.microbatch.low_seconds;
  const double row_gigabytes = static_cast<double>(r.model.hidden * kHalf) * 1e-9;
  speed.low_gigabytes_per_second = speed.low_rows_per_second * row_gigabytes;
  speed.high_gigabytes_per_second = speed.high_rows_per_second * row_gigabytes;
  const double update = plan.update.seconds.value_or(0.0);
  const double row_seconds = 1.0 / speed.low_rows_per_second;
  speed.step_seconds = row_seconds * static_cast<double>(r.rows * r.trainers) + update;
  if (r.trainer_seconds > 0.0) speed.trainers_fed = TrainersFed(r, row_seconds, update);
  return speed;
}

// The least speedup that was measured with this number of GPUs.
std::optional<double> Speedup(const Measured& measured, Split split, int gpus, std::vector<size_t>& sources) {
  std::optional<double> least;
  for (const DeviceSpeedup& d : measured.devices) {
    if (d.split != split || d.devices != gpus) continue;
    least = std::min(least.value_or(d.speedup), d.speedup);
    sources.push_back(d.source);
  }
  return least;
}

// The highest rate of each transport, and the number of connections that reached it.
std::vector<Link> LinksOf(const Request& r, const Measured& measured) {
  std::vector<Link> links;
  for (const TransportRate& rate : measured.transports) {
    const auto same = std::find_if(links.begin(), links.end(),
                                   [&](const Link& l) { return l.transport == rate.transport; });
    if (same != links.end() && same->most_gigabytes_per_second >= rate.gigabytes_per_second) continue;
    const Link link = {rate.transport,
                       rate.connections,
                       rate.gigabytes_per_second,
                       rate.gigabytes_per_second * 1e9 / static_cast<double>(r.model.hidden * kHalf),
                       rate.server_cores,
                       rate.source};
    if (same == links.end()) {
      links.push_back(link);
    } else {
      *same = link;
    }
  }
  return links;
}

LastStage LastStageOf(const Request& r, const Measured& measured, LocalMethod method) {
  LastStage stage;
  stage.method = method;
  stage.microbatch = Bounded(
      EstimateTime(TimingsOf(measured, Name(method), r.data), r.model.hidden, r.model.vocab, r.microbatch),
      measured.bounds);
  stage.peak_bytes = PeakBytes(method, r.model.hidden, r.model.vocab, r.microbatch);
  stage.state_bytes = StateBytes(r.model.hidden, r.model.vocab);
  stage.largest_microbatch = LargestMicrobatch(method, r.model.hidden, r.model.vocab,
                                               std::max<int64_t>(r.memory_bytes - r.stage_bytes, 0));
  return stage;
}

absl::StatusOr<TrainerMemory> TrainerMemoryOf(const Request& r) {
  TrainerShape shape = *r.trainer;
  if (shape.memory_bytes == 0) shape.memory_bytes = r.memory_bytes;
  if (shape.rows == 0) shape.rows = r.rows;
  if (shape.parameters == 0) shape.parameters = r.model.parameters;
  // A tied classifier is also the embedding, which stays with its trainer.
  shape.head_parameters = r.model.tied ? 0 : r.model.hidden * r.model.vocab;
  return MemoryOfTrainer(r.model, shape);
}

}  // namespace

absl::StatusOr<Plan> MakePlan(const Request& request, const Measured& measured) {
  LOSSD_RETURN_IF_ERROR(CheckRequest(request));
  Plan plan;
  plan.request = request;
  Request& r = plan.request;
  if (r.memory_bytes == 0) r.memory_bytes = measured.card.memory_bytes;
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    for (const Split split : {Split::kRows, Split::kVocabulary}) {
      if (r.gpus == 1 && split != Split::kRows) continue;
      // The first GPU has at least as much as any other.
      LOSSD_TRY(DeviceMemory device,
                DeviceMemoryOf(r, measured.card,
                               {.logits = logits, .split = r.gpus == 1 ? Split::kAny : split}, {0, r.gpus}));
      plan.server.push_back(std::move(device));
    }
  }
  plan.update = UpdateOf(r, measured);
  if (r.gpus > 1) {
    plan.rows_speedup = Speedup(measured, Split::kRows, r.gpus, plan.speedup_sources);
    plan.vocabulary_speedup = Speedup(measured, Split::kVocabulary, r.gpus, plan.speedup_sources);
    std::vector<size_t>& sources = plan.speedup_sources;
    std::sort(sources.begin(), sources.end());
    sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  }
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    for (const Gradients gradients : {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled}) {
      plan.speeds.push_back(SpeedOf(plan, measured, logits, gradients));
    }
  }
  plan.links = LinksOf(r, measured);
  for (const LocalMethod method : kLocalMethods) plan.last_stage.push_back(LastStageOf(r, measured, method));
  LOSSD_TRY(plan.pipelines, PipelinesOf(plan, measured));
  plan.trainer_bytes = 2 * kHalf * r.microbatch * r.model.hidden;
  if (r.trainer.has_value()) {
    LOSSD_TRY(plan.trainer_memory, TrainerMemoryOf(r));
  }
  return plan;
}

}  // namespace lossd::plan
