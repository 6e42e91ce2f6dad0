// SPDX-License-Identifier: Apache-2.0
// HeadVersions: the version numbers of a head, and the check of a Binding (stream.h).
#include "server/engine/stream.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace lossd::engine {
namespace {

constexpr absl::string_view kWritten = "a tensor was written (WriteTensor)";

bool Differs(std::optional<uint64_t> bound, uint64_t current) { return bound.value_or(current) != current; }

absl::Status Changed(absl::string_view what) {
  return absl::AbortedError(absl::StrCat(what, " during the call"));
}

}  // namespace

HeadVersions::HeadVersions(VersionCounter* counter)
    : counter_(counter),
      creation_(counter->Next()),
      generation_(counter->Next()),
      weights_(counter->Next()),
      moments_(counter->Next()),
      accumulation_(counter->Next()) {}

absl::Status HeadVersions::Check(const Binding& binding) const {
  if (Differs(binding.step, step_)) return Changed(step_change_);
  if (Differs(binding.generation, generation_)) return Changed(generation_change_);
  if (Differs(binding.weights, weights_)) return Changed(weights_change_);
  if (Differs(binding.moments, moments_)) return Changed(moments_change_);
  if (Differs(binding.accumulation, accumulation_)) return Changed("the gradients changed");
  return absl::OkStatus();
}

// ---- Changes ----

void HeadVersions::SetStep(uint64_t step, absl::string_view why) {
  step_ = step;
  step_change_ = std::string(why);
}

void HeadVersions::NewGeneration(absl::string_view why) {
  generation_ = counter_->Next();
  generation_change_ = std::string(why);
  NewAccumulation();
}

void HeadVersions::NewWeights(absl::string_view why) { Change(Written::kValue, why); }

void HeadVersions::NewMoments(absl::string_view why) { Change(Written::kMoment, why); }

void HeadVersions::Change(Written what, absl::string_view why) {
  const uint64_t number = counter_->Next();
  (what == Written::kValue ? weights_ : moments_) = number;
  (what == Written::kValue ? weights_change_ : moments_change_) = std::string(why);
}

// ---- Writes ----

uint64_t HeadVersions::BeginWrite(Written what) {
  Change(what, kWritten);
  const uint64_t token = counter_->Next();
  writes_.emplace(token, what);
  return token;
}

void HeadVersions::EndWrite(uint64_t token, bool several) {
  const auto it = writes_.find(token);
  if (it == writes_.end()) return;
  if (several) Change(it->second, kWritten);
  writes_.erase(it);
}

bool HeadVersions::values_being_written() const {
  return std::any_of(writes_.begin(), writes_.end(),
                     [](const auto& write) { return write.second == Written::kValue; });
}

}  // namespace lossd::engine
