// SPDX-License-Identifier: Apache-2.0
#include "server/app/rank_families.h"

#include <utility>

namespace lossd::app {

using metrics::PlainFamily;

ranks::v1::Metrics ToProto(const std::vector<PlainFamily>& families) {
  ranks::v1::Metrics out;
  for (const PlainFamily& family : families) {
    ranks::v1::MetricFamily* const to = out.add_families();
    to->set_name(family.name);
    to->set_help(family.help);
    to->set_counter(family.counter);
    for (const PlainFamily::Sample& each : family.samples) {
      ranks::v1::MetricSample* const sample = to->add_samples();
      sample->set_value(each.value);
      for (const auto& [name, value] : each.labels) {
        ranks::v1::MetricLabel* const label = sample->add_labels();
        label->set_name(name);
        label->set_value(value);
      }
    }
  }
  return out;
}

std::vector<PlainFamily> FromProto(const ranks::v1::Metrics& message) {
  std::vector<PlainFamily> out;
  for (const ranks::v1::MetricFamily& family : message.families()) {
    out.push_back({.name = family.name(), .help = family.help(), .counter = family.counter()});
    for (const ranks::v1::MetricSample& each : family.samples()) {
      PlainFamily::Sample sample;
      sample.value = each.value();
      for (const ranks::v1::MetricLabel& label : each.labels()) {
        sample.labels.emplace_back(label.name(), label.value());
      }
      out.back().samples.push_back(std::move(sample));
    }
  }
  return out;
}

}  // namespace lossd::app
