// SPDX-License-Identifier: Apache-2.0
// The seed of a microbatch's random numbers (kernels/sampling.h): a function of what identifies it and of
// nothing else. So a row is sampled alike whenever and wherever it is computed: in a repeat, by another
// connection, cut into other slices, in its backward pass, after a restart. Pure; thread-safe.
#ifndef LOSSD_SERVER_ENGINE_SAMPLE_SEED_H_
#define LOSSD_SERVER_ENGINE_SAMPLE_SEED_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace lossd::engine {

// `step`: the one that was open when the rows were opened. The result may not change from one version of the
// program to the next.
uint64_t SampleSeed(absl::string_view head, uint64_t step, uint64_t microbatch_id);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_SAMPLE_SEED_H_
