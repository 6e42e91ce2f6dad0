// SPDX-License-Identifier: Apache-2.0
// Times a loss with gradients of the CUDA backend on one GPU: every kind of gradients, on heads that store
// their logits and heads that recompute them, compared with the floor (the bare matrix products) of the same
// run.
//
//   cuda_bench loss --out=results.json --commit=abc123 [--shapes=gemma2-2b,...] [--data=real,peaked,flat]
//                   [--logits=stored,recomputed] [--gradients=exact,filtered,sampled,auto]
//                   [--thresholds=10,12] [--deferred] [--top_k=64] [--losses=row_values,ppo,forward_kl]
//
// "loss+grad" is the time from the end of one microbatch to the end of the next. Microbatches are submitted
// one after the other; host copies in both directions are included, and the backend overlaps them. The floor
// is the time of the three bare cuBLASLt products with 16-bit output. The errors of losses and gradients are
// those against double precision (MeasureErrors in loss_times.h). More flags:
// - --deferred also times the two calls of a deferred microbatch. The first returns losses and entropies and
//   retains the hidden states. The second, the backward, brings the upstream gradients of each row's loss,
//   log-sum-exp and entropy, and computes the logits once more.
// - --top_k also times microbatches that return this number of top classes for each row.
// - --losses also times other losses than the cross-entropy. Distillation has a teacher with the same shape,
//   weight and hidden states, whose logits are scaled differently.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "bench/command.h"
#include "bench/cuda_bench.h"
#include "bench/gpu_data.h"
#include "bench/gpu_timer.h"
#include "bench/loss_times.h"
#include "nlohmann/json.hpp"

namespace lossd::bench::cuda_loss {
namespace {

struct Flags : CommandFlags {
  Flag<std::string> out{this, "out", "", "JSON file to write; empty: none"};
  Flag<std::string> commit{this, "commit", "", "commit of the program, recorded in the results"};
  Flag<std::vector<std::string>> shapes{this,
                                        "shapes",
                                        {"gemma2-2b", "llama3-8b", "phi3.5-mini", "mistral-nemo", "n4096"},
                                        "names of shapes to run, or NxDxV"};
  Flag<std::vector<std::string>> data{this, "data", {"real"}, "real, peaked, flat"};
  Flag<std::vector<std::string>> logits{
      this, "logits", {"stored"}, "stored, recomputed: heads to time, each with all --gradients"};
  Flag<std::vector<std::string>> gradients{this, "gradients", {"exact"}, "exact, filtered, sampled, auto"};
  Flag<std::vector<std::string>> thresholds{
      this, "thresholds", {"10"}, "n: sampled and auto take 2^-n as sample_threshold; each of these"};
  Flag<double> max_gradient_error{this, "max_gradient_error", 0.01, "of auto"};
  Flag<int> seeds{this, "seeds", 0, "of sampled: also the error of the mean over so many seeds"};
  Flag<int64_t> workspace_mib{this, "workspace_mib", 2220,
                              "workspace of the head, MiB; with the scratch memory of the GEMMs 2.2 GiB"};
  Flag<int> devices{this, "devices", 1, "GPUs that share the head, with NCCL"};
  Flag<std::string> split{this, "split", "any", "what several GPUs divide: rows, vocabulary, or any"};
  Flag<int> iterations{this, "iterations", 10, "timed microbatches"};
  Flag<bool> autotune{this, "autotune", false,
                      "choose GEMM algorithms by timing, for the backend and the floor"};
  Flag<bool> loss{this, "loss", true, "run the loss benchmark"};
  Flag<bool> norm{this, "norm", true, "run the norm benchmark"};
  Flag<bool> errors{this, "errors", true, "compare with double precision"};
  Flag<std::string> compute{this, "compute", "bf16",
                            "bf16 or fp32: what the head computes in (fp32: no floor, no parts)"};
  Flag<bool> fused{this, "fused", true,
                   "compute the loss in the epilogue of the first product where that is faster"};
  Flag<bool> deferred{this, "deferred", false,
                      "also time a deferred microbatch, with gradients of its rows' entropies"};
  Flag<int> top_k{this, "top_k", 0,
                  "also time microbatches that want so many top classes of each row, at most 128"};
  Flag<std::vector<std::string>> losses{
      this,
      "losses",
      {},
      "also time microbatches of these: row_values (a loss alone, with each row's log-probability and "
      "entropy), ppo (with a divergence from a reference), forward_kl, reverse_kl, jensen_shannon, "
      "total_variation"};
  Flag<bool> parts{this, "parts", true, "time the parts of a chunk one by one"};
  Flag<int> steps{this, "steps", 0, "also time so many steps of AdamW, whose state the head has then"};
} flags;

using kernels::DType;

DType ComputeType() { return *flags.compute == "fp32" ? DType::kFloat32 : DType::kBFloat16; }

void WriteWeight(kernels::HeadKernels& head, const DataShape& shape, const LossData& data) {
  constexpr int64_t kRows = 8192;
  std::vector<uint8_t> bytes;
  for (int64_t row = 0; row < shape.vocab; row += kRows) {
    const int64_t rows = std::min(kRows, shape.vocab - row);
    bytes.resize(static_cast<size_t>(rows * shape.hidden * 2));
    Check(cudaMemcpy(bytes.data(), static_cast<const uint8_t*>(data.weight) + row * shape.hidden * 2,
                     bytes.size(), cudaMemcpyDefault),
          "cudaMemcpy");
    Check(head.WriteTensor({}, row, rows, DType::kBFloat16, bytes), "WriteTensor");
  }
}

int64_t FreeBytes() {
  size_t free_bytes = 0, total = 0;
  Check(cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo");
  return static_cast<int64_t>(free_bytes);
}

// One way to compute a chunk.
struct Way {
  kernels::Logits logits = kernels::Logits::kStored;
  kernels::Gradients gradients = kernels::Gradients::kExact;
  int threshold = 10;  // 2^-threshold

  std::string Text() const {
    const std::string name(kernels::Name(gradients));
    return kernels::MaySample(gradients) ? absl::StrFormat("%s 2^-%d", name, threshold) : name;
  }
};

// The enumerator with this name. Ends the program if there is no such enumerator.
template <typename Enum>
Enum FromName(std::initializer_list<Enum> values, absl::string_view flag, const std::string& name) {
  for (const Enum value : values) {
    if (kernels::Name(value) == name) return value;
  }
  std::cerr << "--" << flag << ": unknown value " << name << std::endl;
  std::exit(2);
}

std::vector<int> ThresholdsOf(const Way& way) {
  if (!kernels::MaySample(way.gradients)) return {0};
  std::vector<int> thresholds;
  for (const std::string& text : *flags.thresholds) {
    thresholds.push_back(std::atoi(text.c_str()));
  }
  return thresholds;
}

// All combinations of --logits and --gradients. Kinds of gradients that have a threshold are also combined
// with each of --thresholds.
std::vector<Way> Ways() {
  using kernels::Gradients;
  using kernels::Logits;
  std::vector<Way> ways;
  for (const std::string& logits : *flags.logits) {
    for (const std::string& gradients : *flags.gradients) {
      Way way = {FromName({Logits::kStored, Logits::kRecomputed}, "logits", logits),
                 FromName({Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto},
                          "gradients", gradients)};
      for (const int threshold : ThresholdsOf(way)) {
        way.threshold = threshold;
        ways.push_back(way);
      }
    }
  }
  return ways;
}

// The times of each loss in --losses. "row_values" is timed with `forward`, other losses with `full`. "plain"
// is the time of the cross-entropy, measured immediately before each loss, because the clock of a card
// depends on its recent work.
Json TimeLosses(kernels::Backend& backend, const kernels::HeadConfig& student, const DataShape& shape,
                const LossData& data, Microbatch& full, Microbatch& forward) {
  const auto time = [&](Microbatch& batch) {
    batch.WarmUp(backend.max_chunks_in_flight());
    const int count = *flags.iterations + 1;
    return ToJson(Summarise(batch.Run(count, backend.max_chunks_in_flight())));
  };
  Json times = Json::object();
  std::unique_ptr<kernels::HeadKernels> teacher;
  for (const std::string& loss : *flags.losses) {
    if (loss == "row_values") {
      const Json plain = time(forward);
      forward.set_row_values(true);
      times[loss] = time(forward);
      times[loss]["plain"] = plain;
      forward.set_row_values(false);
    } else if (loss == "ppo") {
      const Json plain = time(full);
      full.set_objective({.kind = kernels::ObjectiveKind::kPpo,
                          .clip_low = 0.2f,
                          .clip_high = 0.2f,
                          .kl = kernels::KlEstimator::kK3,
                          .kl_coef = 0.1f});
      times[loss] = time(full);
      times[loss]["plain"] = plain;
      full.set_objective({});
    } else {
      using kernels::Divergence;
      const kernels::Distillation distillation = {
          .divergence = FromName({Divergence::kForwardKl, Divergence::kReverseKl, Divergence::kJensenShannon,
                                  Divergence::kTotalVariation},
                                 "losses", loss),
          .teacher_logit_scale = 0.8f};  // a little flatter than the student's softmax
      if (teacher == nullptr) {
        kernels::HeadConfig config = student;
        config.trainable = false;
        config.logits = kernels::Logits::kStored;
        // The teacher's workspace also holds the logits of a student that recomputes logits.
        config.workspace_bytes = int64_t{2220} << 20;
        config.optimizer_state = kernels::OptimizerState::kNone;
        teacher = Take(backend.CreateHead(config), "CreateHead");
        WriteWeight(*teacher, shape, data);
      }
      const Json plain = time(full);
      full.set_teacher(teacher.get(), distillation);
      times[loss] = time(full);
      times[loss]["plain"] = plain;
      times[loss]["chunk_rows"] = full.chunk_rows();
      times[loss]["predicted_error"] = full.predicted_error();
      full.set_teacher(nullptr, {});
    }
  }
  return times;
}

Json RunBackend(const DataShape& shape, const LossData& data, const Way& way) {
  const kernels::LossOptions options = {.gradients = way.gradients,
                                        .sample_threshold = std::ldexp(1.0f, -way.threshold),
                                        .max_gradient_error = static_cast<float>(*flags.max_gradient_error)};
  auto backend =
      Take(CreateGpus(*flags.devices, {.workspace_bytes = *flags.workspace_mib << 20,
                                       .autotune = *flags.autotune,
                                       .deterministic = !*flags.autotune,
                                       .fused_loss = *flags.fused ? kernels::FusedLoss::kWhereFaster
                                                                  : kernels::FusedLoss::kNever}),
           "CreateGpus");
  const kernels::HeadConfig config = {
      .hidden_size = shape.hidden,
      .vocab_size = shape.vocab,
      .compute_dtype = ComputeType(),
      .optimizer_state = *flags.steps > 0 ? kernels::OptimizerState::kAdam : kernels::OptimizerState::kNone,
      .logits = way.logits,
      .gradients = way.gradients,
      .split = FromName({kernels::Split::kAny, kernels::Split::kRows, kernels::Split::kVocabulary}, "split",
                        *flags.split)};
  const int64_t free_before = FreeBytes();
  auto head = Take(backend->CreateHead(config), "CreateHead");
  const int64_t taken = free_before - FreeBytes();  // to compare with what the head says that it takes
  const int64_t planned = head->memory().Total() - head->memory()[kernels::MemoryKind::kStaging];
  WriteWeight(*head, shape, data);
  Microbatch full(*backend, *head, shape, data, ComputeType(), options, Call::kLossAndGradients);
  // The hot classes are the most frequent classes, which sampled chunks multiply densely. They are chosen
  // from the counts of earlier chunks, so the first chunks have none. So some microbatches run first.
  if (kernels::MaySample(way.gradients)) {
    full.Run(4, 1);
    Check(head->ZeroGradients(), "ZeroGradients");
  }
  full.Run(1, 1);
  const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  const kernels::MemoryBytes memory = head->memory(), all = backend->memory().current;
  Json result = {
      {"chunk_rows", full.chunk_rows()},
      {"workspace_mib", mib(all[kernels::MemoryKind::kWorkspace] + all[kernels::MemoryKind::kSlots])},
      {"head_workspace_mib", mib(memory[kernels::MemoryKind::kWorkspace])},
      {"slots_mib", mib(memory[kernels::MemoryKind::kSlots])},
      {"gradients_mib", mib(memory[kernels::MemoryKind::kGradients])},
      {"memory_planned_bytes", planned},
      {"memory_taken_bytes", taken},
      {"memory_taken_after_a_microbatch_bytes", free_before - FreeBytes()},
      {"choices", ToJson(head->Describe())}};
  result["predicted_error"] = full.predicted_error();
  result["sample_threshold"] = full.sample_threshold();
  if (*flags.errors && ComputeType() == DType::kBFloat16) {
    const int seeds = way.gradients == kernels::Gradients::kSampled ? *flags.seeds : 0;
    result["errors"] = MeasureErrors(*head, full, shape, data, nullptr, seeds);
  }
  result["dropped_mass"] = full.dropped_mass();
  const int iterations = *flags.iterations;
  full.WarmUp(backend->max_chunks_in_flight());
  // iterations + 1 microbatches have `iterations` times between the ends of two of them.
  const ExchangeWatch exchanges(*backend);
  result["loss_and_gradients"] = ToJson(Summarise(full.Run(iterations + 1, backend->max_chunks_in_flight())));
  result["exchanges"] = exchanges.PerOne(iterations + 1);
  result["loss_and_gradients_one_at_a_time"] = ToJson(Summarise(full.Run(iterations + 1, 1)));
  Microbatch forward(*backend, *head, shape, data, ComputeType(), options, Call::kLoss);
  forward.WarmUp(backend->max_chunks_in_flight());
  result["loss_only"] = ToJson(Summarise(forward.Run(iterations + 1, backend->max_chunks_in_flight())));
  if (const int top_k = *flags.top_k; top_k > 0) {
    for (auto& [batch, key] :
         {std::pair(&full, "top_loss_and_gradients"), std::pair(&forward, "top_loss_only")}) {
      batch->set_top_k(top_k);
      batch->WarmUp(backend->max_chunks_in_flight());
      result[key] = ToJson(Summarise(batch->Run(iterations + 1, backend->max_chunks_in_flight())));
      batch->set_top_k(0);
    }
  }
  if (!flags.losses->empty()) {
    result["losses"] = TimeLosses(*backend, config, shape, data, full, forward);
  }
  if (*flags.deferred) {
    const bool errors = *flags.errors && ComputeType() == DType::kBFloat16;
    Json deferred = TimeDeferred(*backend, *head, shape, data, ComputeType(), options, iterations, errors);
    deferred["backward_ratio"] = deferred["backward"]["median_ms"].get<double>() /
                                 result["loss_and_gradients"]["median_ms"].get<double>();
    result["deferred"] = std::move(deferred);
  }
  if (const int steps = *flags.steps; steps > 0) {
    result["step"] = TimeSteps(*backend, *head, steps, [&] { full.Run(1, 1); });
  }
  return result;
}

BareOptions BareOptionsOfFlags() { return {.iterations = *flags.iterations, .autotune = *flags.autotune}; }

// TFLOP/s. A loss with gradients counts as three products, even if not all of them are computed; the loss
// alone counts as one product.
Json Teraflops(const DataShape& shape, const Floor& floor, const Json& result) {
  const double product = 2e-9 * static_cast<double>(shape.rows) * static_cast<double>(shape.hidden) *
                         static_cast<double>(shape.vocab);  // divided by ms
  return {{"floor", 3.0 * product / floor.total()},
          {"loss_and_gradients", 3.0 * product / result["loss_and_gradients"]["median_ms"].get<double>()},
          {"loss_only", product / result["loss_only"]["median_ms"].get<double>()}};
}

void AddFloor(const Floor& floor, Json& result) {
  result["floor"] = {{"logits", ToJson(floor.logits)},
                     {"hidden_gradient", ToJson(floor.hidden_gradient)},
                     {"weight_gradient", ToJson(floor.weight_gradient)},
                     {"rows", floor.rows},
                     {"total_ms", floor.total()}};
  result["ratio"] = result["loss_and_gradients"]["median_ms"].get<double>() / floor.total();
  result["forward_ratio"] = result["loss_only"]["median_ms"].get<double>() / floor.logits.median;
}

void Print(const NamedShape& named, const std::string& kind, const Way& way, const Floor& floor,
           const Json& result) {
  std::cout
      << absl::StrFormat(
             "%-13s %-6s %-10s %-13s chunk %5d ws %6.0f slots %4.0f MiB  floor %6.2f (%5.2f fwd)  loss+grad "
             "%6.2f [%.2f "
             "%.2f] x%.3f  loss %6.2f x%.3f",
             named.name, kind, kernels::Name(way.logits), way.Text(), result["chunk_rows"].get<int64_t>(),
             result["head_workspace_mib"].get<double>(), result["slots_mib"].get<double>(), floor.total(),
             floor.logits.median, result["loss_and_gradients"]["median_ms"].get<double>(),
             result["loss_and_gradients"]["min_ms"].get<double>(),
             result["loss_and_gradients"]["max_ms"].get<double>(), result["ratio"].get<double>(),
             result["loss_only"]["median_ms"].get<double>(), result["forward_ratio"].get<double>())
      << std::endl;
  if (result.contains("step")) {
    std::cout << absl::StrFormat("  norm and update %.2f ms",
                                 result["step"]["norm_and_update"]["median_ms"].get<double>())
              << std::endl;
  }
  if (result.contains("top_loss_only")) {
    const auto ratio = [&](const char* with, const char* without) {
      return result[with]["median_ms"].get<double>() / result[without]["median_ms"].get<double>();
    };
    std::cout << absl::StrFormat("  top classes: loss+grad x%.3f, loss x%.3f of those without",
                                 ratio("top_loss_and_gradients", "loss_and_gradients"),
                                 ratio("top_loss_only", "loss_only"))
              << std::endl;
  }
  if (result.contains("losses")) {
    for (const auto& [loss, times] : result["losses"].items()) {
      const double ms = times["median_ms"];
      std::cout
          << absl::StrFormat(
                 "  %s %.2f ms: x%.3f of the floor, x%.3f of the plain loss, x%.3f of the first product",
                 loss, ms, ms / floor.total(), ms / times["plain"]["median_ms"].get<double>(),
                 ms / floor.logits.median)
          << std::endl;
    }
  }
  if (result.contains("deferred")) std::cout << DeferredText(result["deferred"]) << std::endl;
  std::cout << result.dump() << std::endl;
}

// Prints how closely the data match the measured profile from which they were made.
Json ReachedProfile(const DataShape& shape, const LossData& data) {
  const data::ProfileCheck check = CheckProfile(shape, data);
  std::cout << check.Text() << std::flush;
  Json reached = {{"loss", check.loss()}};
  for (const data::ProfileCheck::Ratio& ratio : check.Ratios()) {
    reached["ratios"].push_back(
        {{"threshold", ratio.threshold}, {"candidates", ratio.candidates}, {"tail_mass", ratio.tail_mass}});
  }
  return reached;
}

// Returns one result for each Way. All results are for the same data and have the same floor.
std::vector<Json> RunShape(const NamedShape& named, const std::string& kind, Timer& timer) {
  const DataShape& shape = named.shape;
  LossData data = MakeData(ParseDataKind(kind), shape, std::random_device{}());
  Json profile;
  if (kind == "real") profile = ReachedProfile(shape, data);
  const std::vector<Way> ways = Ways();
  std::vector<Json> results;
  results.reserve(ways.size());
  for (const Way& way : ways) {
    results.push_back(RunBackend(shape, data, way));
    Check(cudaSetDevice(0), "cudaSetDevice");  // the device that has the data
  }
  if (ComputeType() == DType::kBFloat16) {
    const Floor floor = MeasureFloor(shape, data, BareOptionsOfFlags(), timer);
    for (size_t i = 0; i < results.size(); ++i) {
      AddFloor(floor, results[i]);
      results[i]["teraflops"] = Teraflops(shape, floor, results[i]);
      Print(named, kind, ways[i], floor, results[i]);
    }
    if (*flags.parts) {
      const int64_t rows = std::min(shape.rows, results.front()["chunk_rows"].get<int64_t>());
      results.front()["parts_of_a_chunk"] = MeasureParts(shape, data, rows, BareOptionsOfFlags(), timer);
    }
  }
  Free(data);
  for (size_t i = 0; i < results.size(); ++i) {
    results[i]["logits"] = std::string(kernels::Name(ways[i].logits));
    results[i]["gradients"] = std::string(kernels::Name(ways[i].gradients));
    results[i]["shape"] = {
        {"name", named.name}, {"rows", shape.rows}, {"hidden", shape.hidden}, {"vocab", shape.vocab}};
    results[i]["data"] = kind;
    if (!profile.is_null()) results[i]["profile"] = profile;
    results[i]["compute"] = *flags.compute;
  }
  return results;
}

Json RunNorm(int64_t cols, bool centred, double copy_gbps, Timer& timer) {
  const NormTimes times = TimeNorm(cols, centred, timer);
  const std::string name = centred ? "layernorm" : "rmsnorm";
  const double f = times.forward_gbps, b = times.backward_gbps;
  std::cout << absl::StrFormat(
                   "%-9s fp16 %d x %5d  forward %5.0f GB/s (%.2f of copy)  backward %5.0f GB/s (%.2f)", name,
                   kNormRows, cols, f, f / copy_gbps, b, b / copy_gbps)
            << std::endl;
  return {{"norm", name},
          {"columns", cols},
          {"rows", kNormRows},
          {"forward", ToJson(times.forward)},
          {"backward", ToJson(times.backward)},
          {"forward_gbps", f},
          {"backward_gbps", b},
          {"forward_of_copy", f / copy_gbps},
          {"backward_of_copy", b / copy_gbps}};
}

NamedShape FindShape(const std::string& name) {
  for (const NamedShape& shape : kShapes) {
    if (shape.name == name) return shape;
  }
  const std::vector<std::string> parts = absl::StrSplit(name, 'x');
  if (parts.size() != 3) {
    std::cerr << "--shapes: unknown shape " << name << std::endl;
    std::exit(2);
  }
  return {name, {std::atoll(parts[0].c_str()), std::atoll(parts[1].c_str()), std::atoll(parts[2].c_str())}};
}

int Main() {
  Timer timer;
  Json results = StartResults(*flags.commit, timer);
  const double copy_gbps = results["copy_gbps"];
  if (*flags.norm) {
    for (bool centred : {true, false}) {
      for (int64_t cols :
           {1024, 2048, 4096, 5120, 6144, 8192, 8200, 10240, 12288, 14336, 15872, 16384, 20480, 24584}) {
        results["norm"].push_back(RunNorm(cols, centred, copy_gbps, timer));
      }
    }
  }
  if (*flags.loss) {
    for (const std::string& name : *flags.shapes) {
      for (const std::string& kind : *flags.data) {
        for (Json& result : RunShape(FindShape(name), kind, timer)) {
          results["loss"].push_back(std::move(result));
        }
      }
    }
  }
  WriteResults(results, *flags.out);
  return 0;
}

}  // namespace
}  // namespace lossd::bench::cuda_loss

namespace lossd::bench {

int RunCudaLossBench(int argc, char** argv) {
  cuda_loss::flags.Parse(argc, argv);
  return cuda_loss::Main();
}

}  // namespace lossd::bench
