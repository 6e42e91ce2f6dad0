// SPDX-License-Identifier: Apache-2.0
#include "client/plan/measured.h"

#include <array>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::plan {
namespace {

using Json = nlohmann::json;

// Thrown while a document is read, and caught before ParseMeasured returns.
struct Unexpected : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename E, size_t n>
E WordOf(const Json& entry, const char* key, const std::array<E, n>& values) {
  const auto word = entry.at(key).get<std::string>();
  for (const E value : values) {
    if (Name(value) == word) return value;
  }
  throw Unexpected(absl::StrCat(key, " \"", word, "\" is not known"));
}

double Positive(const Json& entry, const char* key) {
  const auto value = entry.at(key).get<double>();
  if (!(value > 0.0)) throw Unexpected(absl::StrCat(key, " has to be above 0, but is ", value));
  return value;
}

int64_t Count(const Json& entry, const char* key) {
  const auto value = entry.at(key).get<int64_t>();
  if (value < 1) throw Unexpected(absl::StrCat(key, " has to be at least 1, but is ", value));
  return value;
}

class Reader {
 public:
  explicit Reader(const Json& document) : document_(document) {}

  Measured Read() {
    const Json& card = document_.at("card");
    Measured m;
    m.card = {card.at("name").get<std::string>(), Count(card, "memory_bytes"),
              static_cast<int>(Count(card, "multiprocessors")), card.at("clusters").get<int>()};
    for (const Json& e : document_.at("sources")) {
      m.sources.push_back({e.at("file").get<std::string>(), e.at("date").get<std::string>(),
                           e.at("commit").get<std::string>()});
    }
    sources_ = m.sources.size();
    for (const Json& e : document_.at("loss")) m.loss.push_back(Loss(e));
    for (const Json& e : document_.at("last_stage")) m.last_stage.push_back(LastStage(e));
    for (const Json& e : document_.at("optimizer")) {
      m.passes.push_back({e.at("pass").get<std::string>(), Count(e, "bytes_per_parameter"),
                          Positive(e, "gbps"), SourceOf(e)});
    }
    for (const Json& e : document_.at("transports")) m.transports.push_back(Transport(e));
    for (const Json& e : document_.at("devices")) {
      m.devices.push_back({WordOf(e, "split", std::array{kernels::Split::kRows, kernels::Split::kVocabulary}),
                           static_cast<int>(Count(e, "devices")), Positive(e, "speedup"), SourceOf(e)});
    }
    for (const Json& e : document_.at("pipelines")) m.pipelines.push_back(Pipeline(e));
    for (const Json& e : document_.at("steps")) m.steps.push_back(Step(e));
    m.factors = Factors(document_.at("step_factors"));
    return m;
  }

 private:
  size_t SourceOf(const Json& entry) const {
    const auto source = entry.at("source").get<int64_t>();
    if (source < 0 || source >= static_cast<int64_t>(sources_)) {
      throw Unexpected(absl::StrCat("source ", source, " is none of the ", sources_));
    }
    return static_cast<size_t>(source);
  }

  Timing TimingOf(const Json& e) const {
    return {Count(e, "hidden"), Count(e, "vocab"), Count(e, "rows"),
            Positive(e, "ms"),  SourceOf(e),       e.at("data").get<std::string>()};
  }

  LossTiming Loss(const Json& e) const {
    LossTiming timing;
    static_cast<Timing&>(timing) = TimingOf(e);
    timing.logits = WordOf(e, "logits", std::array{kernels::Logits::kStored, kernels::Logits::kRecomputed});
    timing.gradients = WordOf(
        e, "gradients",
        std::array{kernels::Gradients::kExact, kernels::Gradients::kFiltered, kernels::Gradients::kSampled});
    return timing;
  }

  LastStageTiming LastStage(const Json& e) const {
    LastStageTiming timing;
    static_cast<Timing&>(timing) = TimingOf(e);
    timing.method = e.at("method").get<std::string>();
    timing.peak_mib = Positive(e, "peak_mib");
    return timing;
  }

  TransportRate Transport(const Json& e) const {
    TransportRate rate;
    rate.transport = e.at("transport").get<std::string>();
    rate.connections = static_cast<int>(Count(e, "connections"));
    rate.gigabytes_per_second = Positive(e, "gigabytes_per_second");
    rate.rows_per_second = Positive(e, "rows_per_second");
    rate.kernels_rows_per_second = Positive(e, "kernels_rows_per_second");
    rate.server_cores = e.at("server_cores").get<double>();
    rate.source = SourceOf(e);
    return rate;
  }

  PipelineRun Pipeline(const Json& e) const {
    PipelineRun run;
    run.head = e.at("head").get<std::string>();
    run.schedule = e.at("schedule").get<std::string>();
    run.stages = static_cast<int>(Count(e, "stages"));
    run.layers = Count(e, "layers");
    run.hidden = Count(e, "hidden");
    run.vocab = Count(e, "vocab");
    run.microbatches = Count(e, "microbatches");
    run.rows = Count(e, "rows");
    run.step_seconds = Positive(e, "step_seconds");
    run.peak_bytes = e.at("peak_bytes").get<std::vector<int64_t>>();
    run.source = SourceOf(e);
    return run;
  }

  PipelineStep Step(const Json& e) const {
    PipelineStep step;
    step.kind = e.at("kind").get<std::string>();
    step.gradients = e.at("gradients").get<std::string>();
    step.mps = e.at("mps").get<bool>();
    step.hidden = Count(e, "hidden");
    step.vocab = Count(e, "vocab");
    step.microbatches = Count(e, "microbatches");
    step.microbatch_rows = Count(e, "microbatch_rows");
    step.layers = e.at("layers").get<std::vector<int64_t>>();
    step.shares = e.at("shares").get<std::vector<int64_t>>();
    step.layer_seconds = Positive(e, "layer_seconds");
    step.step_seconds = Positive(e, "step_seconds");
    step.peak_bytes = e.at("peak_bytes").get<std::vector<int64_t>>();
    step.source = SourceOf(e);
    return step;
  }

  static StepFactors Factors(const Json& e) {
    StepFactors factors;
    factors.layer = Positive(e, "layer");
    factors.local_head = Positive(e, "local_head");
    for (const Json& each : e.at("colocated")) {
      factors.colocated.push_back({each.at("gradients").get<std::string>(), each.at("mps").get<bool>(),
                                   Positive(each, "factor")});
    }
    factors.worst_error = e.at("worst_error").get<double>();
    return factors;
  }

  const Json& document_;
  size_t sources_ = 0;
};

}  // namespace

absl::StatusOr<Measured> ParseMeasured(absl::string_view json) {
  const Json document = Json::parse(json.begin(), json.end(), nullptr, /*allow_exceptions=*/false);
  if (!document.is_object()) return absl::InvalidArgumentError("measured rates: not a JSON object");
  try {
    return Reader(document).Read();
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("measured rates: ", error.what()));
  } catch (const Unexpected& error) {
    return absl::InvalidArgumentError(absl::StrCat("measured rates: ", error.what()));
  }
}

}  // namespace lossd::plan
