// SPDX-License-Identifier: Apache-2.0
#include "client/cli/metrics_text.h"

#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace lossd::cli {
namespace {

// The label value that starts behind its opening quote at text[*at]; leaves *at behind the closing one.
std::string ReadQuoted(absl::string_view text, size_t* at) {
  std::string value;
  while (*at < text.size() && text[*at] != '"') {
    char c = text[(*at)++];
    if (c == '\\' && *at < text.size()) {
      c = text[(*at)++];
      if (c == 'n') c = '\n';
    }
    value += c;
  }
  ++*at;
  return value;
}

// Reads {a="b",...} at text[*at]; leaves *at behind it.
bool ReadLabels(absl::string_view text, size_t* at, std::map<std::string, std::string>* labels) {
  ++*at;  // the brace
  while (*at < text.size() && text[*at] != '}') {
    const size_t equals = text.find("=\"", *at);
    if (equals == absl::string_view::npos) return false;
    const std::string name(absl::StripAsciiWhitespace(text.substr(*at, equals - *at)));
    *at = equals + 2;
    (*labels)[name] = ReadQuoted(text, at);
    while (*at < text.size() && (text[*at] == ',' || text[*at] == ' ')) ++*at;
  }
  if (*at >= text.size()) return false;
  ++*at;
  return true;
}

std::optional<double> ParseNumber(absl::string_view text) {
  if (text == "+Inf") return std::numeric_limits<double>::infinity();
  double value;
  if (!absl::SimpleAtod(text, &value)) return std::nullopt;
  return value;
}

std::optional<MetricSample> ParseLine(absl::string_view line) {
  line = absl::StripAsciiWhitespace(line);
  if (line.empty() || line[0] == '#') return std::nullopt;
  MetricSample sample;
  size_t at = line.find_first_of("{ ");
  if (at == absl::string_view::npos) return std::nullopt;
  sample.name = std::string(line.substr(0, at));
  if (line[at] == '{' && !ReadLabels(line, &at, &sample.labels)) return std::nullopt;
  const std::vector<absl::string_view> rest = absl::StrSplit(line.substr(at), ' ', absl::SkipEmpty());
  if (rest.empty()) return std::nullopt;
  const std::optional<double> value = ParseNumber(rest[0]);
  if (!value.has_value()) return std::nullopt;
  sample.value = *value;
  return sample;
}

}  // namespace

std::vector<MetricSample> ParseMetrics(absl::string_view text) {
  std::vector<MetricSample> samples;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (std::optional<MetricSample> sample = ParseLine(line)) samples.push_back(*std::move(sample));
  }
  return samples;
}

Buckets BucketsOf(const std::vector<MetricSample>& samples, absl::string_view name) {
  const std::string bucket_name = absl::StrCat(name, "_bucket");
  Buckets buckets;
  for (const MetricSample& sample : samples) {
    if (sample.name != bucket_name) continue;
    const auto bound = sample.labels.find("le");
    if (bound == sample.labels.end()) continue;
    if (const std::optional<double> upper = ParseNumber(bound->second)) buckets[*upper] += sample.value;
  }
  return buckets;
}

Buckets Difference(const Buckets& later, const Buckets& earlier) {
  Buckets result = later;
  for (auto& [upper, count] : result) {
    const auto it = earlier.find(upper);
    if (it != earlier.end()) count -= it->second;
  }
  return result;
}

std::optional<double> Quantile(const Buckets& buckets, double q) {
  if (buckets.empty() || buckets.rbegin()->second <= 0) return std::nullopt;
  const double rank = q * buckets.rbegin()->second;
  double lower = 0, below = 0;
  for (const auto& [upper, count] : buckets) {
    if (count >= rank && count > below) {
      if (std::isinf(upper)) return lower;
      return lower + (upper - lower) * (rank - below) / (count - below);
    }
    lower = upper;
    below = count;
  }
  return lower;
}

}  // namespace lossd::cli
