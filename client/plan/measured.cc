// SPDX-License-Identifier: Apache-2.0
// Reads measured rates, and predicts times for other cards and other shapes (measured.h).
#include "client/plan/measured.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/errors/field_error.h"

namespace lossd::plan {

// ---- Measured ----

namespace {

using Json = nlohmann::json;

// Thrown by Reader when the document is not as expected. ParseMeasured catches it.
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
      factors.colocated.push_back(
          {each.at("gradients").get<std::string>(), each.at("mps").get<bool>(), Positive(each, "factor")});
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

// ---- Other cards ----

namespace {

// Cards with the values of NVIDIA's data sheets. The arithmetic rate is bf16 without sparsity.
struct Sheet {
  absl::string_view name;
  Card card;
  double teraflops = 0.0;
  double terabytes_per_second = 0.0;
};

const std::vector<Sheet>& Sheets() {
  constexpr int64_t kGigabyte = 1'000'000'000;
  static const auto* const sheets =
      new std::vector<Sheet>{{"h100-nvl", {"NVIDIA H100 NVL", 94 * kGigabyte, 132, 66}, 835.0, 3.9},
                             {"h100-sxm", {"NVIDIA H100 SXM", 80 * kGigabyte, 132, 66}, 989.0, 3.35},
                             {"h200", {"NVIDIA H200", 141 * kGigabyte, 132, 66}, 989.0, 4.8}};
  return *sheets;
}

template <typename Is>
const Sheet* Find(const Is& is) {
  const auto it = std::find_if(Sheets().begin(), Sheets().end(), is);
  return it == Sheets().end() ? nullptr : &*it;
}

}  // namespace

std::vector<std::string> CardNames() {
  std::vector<std::string> names;
  for (const Sheet& sheet : Sheets()) names.emplace_back(sheet.name);
  return names;
}

absl::StatusOr<Measured> OnCard(Measured measured, absl::string_view name) {
  const Sheet* const wanted = Find([&](const Sheet& sheet) { return sheet.name == name; });
  if (wanted == nullptr) {
    return errors::FieldError("card", absl::StrCat("be one of ", absl::StrJoin(CardNames(), ", ")), name);
  }
  if (wanted->card.name == measured.card.name) return measured;
  const Sheet* const known = Find([&](const Sheet& sheet) { return sheet.card.name == measured.card.name; });
  if (known == nullptr) {
    return errors::FieldError("card",
                              absl::StrCat("not be given with rates of an ", measured.card.name,
                                           ", of which no data sheet is known"),
                              name);
  }
  const double arithmetic = known->teraflops / wanted->teraflops;
  const double bandwidth = known->terabytes_per_second / wanted->terabytes_per_second;
  measured.bounds = CardBounds{.measured_on = measured.card.name,
                               .least = std::min(arithmetic, bandwidth),
                               .most = std::max(arithmetic, bandwidth)};
  measured.card = wanted->card;
  for (PassRate& pass : measured.passes)
    pass.gbps /= bandwidth;  // these passes read and write memory, and compute next to nothing
  measured.devices.clear();
  const auto of_gpu = [](const TransportRate& rate) { return rate.transport == "cuda_ipc"; };
  measured.transports.erase(std::remove_if(measured.transports.begin(), measured.transports.end(), of_gpu),
                            measured.transports.end());
  return measured;
}

// ---- Other shapes ----

namespace {

// The time per row and per element of the weight.
double UnitSeconds(const Timing& t) {
  return t.ms * 1e-3 /
         (static_cast<double>(t.rows) * static_cast<double>(t.hidden) * static_cast<double>(t.vocab));
}

bool SameShape(const Timing& a, int64_t hidden, int64_t vocab) {
  return a.hidden == hidden && a.vocab == vocab;
}

// One timing of each shape: the one with the most rows.
std::vector<Timing> OfEachShape(absl::Span<const Timing> measured) {
  std::vector<Timing> shapes;
  for (const Timing& t : measured) {
    const auto it = std::find_if(shapes.begin(), shapes.end(),
                                 [&](const Timing& s) { return SameShape(s, t.hidden, t.vocab); });
    if (it == shapes.end()) {
      shapes.push_back(t);
    } else if (t.rows > it->rows) {
      *it = t;
    }
  }
  return shapes;
}

double MeanUnit(absl::Span<const Timing> shapes, const Timing* without) {
  double sum = 0.0;
  int count = 0;
  for (const Timing& t : shapes) {
    if (&t == without) continue;
    sum += UnitSeconds(t);
    ++count;
  }
  return sum / count;
}

// The largest relative error when the time of each shape is predicted from the other shapes.
double WorstError(absl::Span<const Timing> shapes) {
  double worst = 0.0;
  for (const Timing& t : shapes) {
    worst = std::max(worst, std::fabs(MeanUnit(shapes, &t) / UnitSeconds(t) - 1.0));
  }
  return worst;
}

// Whether `value` is within kNearFactor of the range of get(shape) over all shapes.
template <typename Get>
bool IsNear(absl::Span<const Timing> shapes, int64_t value, const Get& get) {
  int64_t least = get(shapes.front()), most = least;
  for (const Timing& t : shapes) {
    least = std::min(least, get(t));
    most = std::max(most, get(t));
  }
  const auto v = static_cast<double>(value);
  return v >= static_cast<double>(least) / kNearFactor && v <= static_cast<double>(most) * kNearFactor;
}

Estimate None(std::string why) {
  Estimate none;
  none.why_none = std::move(why);
  return none;
}

std::vector<size_t> SourcesOf(absl::Span<const Timing> timings) {
  std::vector<size_t> sources;
  for (const Timing& t : timings) sources.push_back(t.source);
  std::sort(sources.begin(), sources.end());
  sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  return sources;
}

}  // namespace

absl::string_view Name(Basis basis) {
  switch (basis) {
    case Basis::kMeasured:
      return "measured";
    case Basis::kLikeShapes:
      return "from other shapes";
    case Basis::kBetween:
      return "between other shapes";
    case Basis::kDataSheets:
      return "bounds by data sheets";
    case Basis::kNone:
      break;
  }
  return "not measured";
}

Estimate EstimateTime(absl::Span<const Timing> measured, int64_t hidden, int64_t vocab, int64_t rows) {
  if (measured.empty()) return None("not measured on this card with such data");
  if (rows < kLeastRows) return None(absl::StrCat("not measured for less than ", kLeastRows, " rows"));
  const Timing* same = nullptr;
  for (const Timing& t : measured) {
    if (!SameShape(t, hidden, vocab)) continue;
    if (same == nullptr || std::llabs(t.rows - rows) < std::llabs(same->rows - rows)) same = &t;
  }
  if (same != nullptr) {
    const double seconds = same->ms * 1e-3 * static_cast<double>(rows) / static_cast<double>(same->rows);
    return {Basis::kMeasured, seconds, seconds, {same->source}, ""};
  }
  const std::vector<Timing> shapes = OfEachShape(measured);
  constexpr size_t kFewestShapes = 3;
  if (shapes.size() < kFewestShapes) return None("too few shapes were measured on this card");
  if (!IsNear(shapes, hidden, [](const Timing& t) { return t.hidden; })) {
    return None("no hidden size near this one was measured");
  }
  if (!IsNear(shapes, vocab, [](const Timing& t) { return t.vocab; })) {
    return None("no vocabulary near this one was measured");
  }
  const double units = static_cast<double>(rows) * static_cast<double>(hidden) * static_cast<double>(vocab);
  Estimate estimate = {Basis::kLikeShapes, 0.0, 0.0, SourcesOf(shapes), ""};
  const double worst = WorstError(shapes);
  if (worst <= kMostError) {
    const double seconds = MeanUnit(shapes, nullptr) * units;
    estimate.low_seconds = seconds * (1.0 - worst);
    estimate.high_seconds = seconds * (1.0 + worst);
    return estimate;
  }
  const auto [fast, slow] =
      std::minmax_element(shapes.begin(), shapes.end(),
                          [](const Timing& a, const Timing& b) { return UnitSeconds(a) < UnitSeconds(b); });
  estimate.basis = Basis::kBetween;
  estimate.low_seconds = UnitSeconds(*fast) * units;
  estimate.high_seconds = UnitSeconds(*slow) * units;
  return estimate;
}

Estimate Bounded(Estimate estimate, const std::optional<CardBounds>& bounds) {
  if (!bounds.has_value() || !estimate.known()) return estimate;
  estimate.basis = Basis::kDataSheets;
  estimate.low_seconds *= bounds->least;
  estimate.high_seconds *= bounds->most;
  return estimate;
}

std::vector<Timing> TimingsOf(const Measured& measured, kernels::Logits logits, kernels::Gradients gradients,
                              absl::string_view data) {
  std::vector<Timing> timings;
  for (const LossTiming& t : measured.loss) {
    if (t.logits == logits && t.gradients == gradients && t.data == data) timings.push_back(t);
  }
  return timings;
}

std::vector<Timing> TimingsOf(const Measured& measured, absl::string_view last_stage_method,
                              absl::string_view data) {
  std::vector<Timing> timings;
  for (const LastStageTiming& t : measured.last_stage) {
    if (t.method == last_stage_method && t.data == data) timings.push_back(t);
  }
  return timings;
}

}  // namespace lossd::plan
