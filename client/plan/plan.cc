// SPDX-License-Identifier: Apache-2.0
#include "client/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/plan/arithmetic.h"
#include "kernels/errors/field_error.h"

namespace lossd::plan {
namespace {

using kernels::Gradients;
using kernels::Logits;
using kernels::Split;

constexpr int64_t kMostTrainers = 1 << 20;
constexpr int kMostServerGpus = 1024;

absl::Status CheckRequest(const Request& r) {
  if (absl::Status status = Validate(r.model); !status.ok()) return status;
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
  if (absl::Status status = CheckPipeline(r); !status.ok()) return status;
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

// The passes between steps: of parameters in fp32 with a copy in bf16.
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

// How many trainers compute their steps without waiting: while they work, the server has their rows and the
// update.
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
  // What one of several GPUs has to itself differs by split; the slower of the two counts.
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

// The least that was measured for so many GPUs.
std::optional<double> Speedup(const Measured& measured, Split split, int gpus, std::vector<size_t>& sources) {
  std::optional<double> least;
  for (const DeviceSpeedup& d : measured.devices) {
    if (d.split != split || d.devices != gpus) continue;
    least = std::min(least.value_or(d.speedup), d.speedup);
    sources.push_back(d.source);
  }
  return least;
}

// The most of each transport, with as many connections as moved that.
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
  // An embedding that is the classifier, too, stays with its trainer.
  shape.head_parameters = r.model.tied ? 0 : r.model.hidden * r.model.vocab;
  return MemoryOfTrainer(r.model, shape);
}

}  // namespace

absl::StatusOr<Plan> MakePlan(const Request& request, const Measured& measured) {
  if (absl::Status status = CheckRequest(request); !status.ok()) return status;
  Plan plan;
  plan.request = request;
  Request& r = plan.request;
  if (r.memory_bytes == 0) r.memory_bytes = measured.card.memory_bytes;
  for (const Logits logits : {Logits::kStored, Logits::kRecomputed}) {
    for (const Split split : {Split::kRows, Split::kVocabulary}) {
      if (r.gpus == 1 && split != Split::kRows) continue;
      // The first GPU has as much as any other.
      absl::StatusOr<DeviceMemory> device = DeviceMemoryOf(
          r, measured.card, {.logits = logits, .split = r.gpus == 1 ? Split::kAny : split}, {0, r.gpus});
      if (!device.ok()) return device.status();
      plan.server.push_back(*std::move(device));
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
  absl::StatusOr<std::vector<Pipeline>> pipelines = PipelinesOf(plan, measured);
  if (!pipelines.ok()) return pipelines.status();
  plan.pipelines = *std::move(pipelines);
  plan.trainer_bytes = 2 * kHalf * r.microbatch * r.model.hidden;
  if (r.trainer.has_value()) {
    absl::StatusOr<TrainerMemory> memory = TrainerMemoryOf(r);
    if (!memory.ok()) return memory.status();
    plan.trainer_memory = *std::move(memory);
  }
  return plan;
}

}  // namespace lossd::plan
