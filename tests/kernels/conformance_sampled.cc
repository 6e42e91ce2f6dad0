// Sampled gradients.
#include <algorithm>
#include <utility>
#include <vector>

#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {

TEST_P(BackendConformance, SampledWithEachOption) {
  ProblemSpec plain = Plain({17, 20}, 37, 101);
  plain.options.gradients = Gradients::kSampled;
  plain.options.sample_threshold = 0.02f;
  std::vector<ProblemSpec> specs = EachOptionAlone(plain);
  specs.emplace_back(plain).options.logit_scale = -0.5f;
  specs.emplace_back(plain).accumulate_mask = true;
  ProblemSpec& weighted = specs.emplace_back(plain);
  weighted.config.has_class_weights = weighted.options.use_class_weights = true;
  weighted.options.label_smoothing = 0.2f;
  weighted.config.has_bias = true;
  ProblemSpec& capped = specs.emplace_back(plain);
  capped.options.softcap = 6.0f;
  capped.options.label_smoothing = 0.1f;
  ProblemSpec& entropy = specs.emplace_back(capped);
  entropy.grad_entropy = entropy.grad_lse = entropy.grad_loss = true;
  for (const ProblemSpec& spec : specs) RunAndCompare(backend(), {MakeProblem(spec, rng())});
}

}  // namespace lossd::kernels::testing
