// SPDX-License-Identifier: Apache-2.0
// Problems of tests/kernels through the service: the head, the calls, and what has to come back.
#ifndef LOSSD_TESTS_SERVER_SERVICE_SERVICE_PROBLEM_H_
#define LOSSD_TESTS_SERVER_SERVICE_SERVICE_PROBLEM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/reference/reference.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/problem.h"
#include "tests/server/service/service_client.h"

namespace lossd::app::testing {

// A head with the problem's tensors, computed in fp32.
void CreateHead(TestClient& client, const std::string& name, const kernels::testing::Problem& problem);

// The name of the head that rows with Problem::teacher name.
inline constexpr char kTeacherName[] = "teacher";

// Opens microbatch `id` of step 0: all rows of `data`, every output and gradient wanted.
v1::OpenMicrobatch OpenFor(const std::string& head, const kernels::testing::Problem& problem,
                           const kernels::testing::SliceData& data, uint64_t id);

// The payload of a slice of these rows, with those of a teacher.
std::string PayloadOf(const kernels::testing::Problem& problem, const kernels::testing::SliceData& data,
                      int64_t begin, int64_t end);

// Rows [begin, end) of one microbatch on one call, all slices sent before the first answer is read.
LossAnswers Stream(TestClient& client, v1::OpenMicrobatch open, const kernels::testing::Problem& problem,
                   const kernels::testing::SliceData& data, int64_t begin, int64_t end,
                   kernels::testing::Rng rng);

// Puts the answers of the calls of one microbatch together. Checks their order and that each row came once.
kernels::testing::SliceOutputs Collect(const kernels::testing::Problem& problem,
                                       const kernels::testing::SliceData& data,
                                       const std::vector<LossAnswers>& calls);

// The head's gradients; as tests/kernels/comparison.h says, for fp32 accumulators.
void ExpectGradients(TestClient& client, const std::string& head, const kernels::HeadConfig& config,
                     const kernels::reference::ParamGradients& want, double max_abs_logit);

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_SERVICE_SERVICE_PROBLEM_H_
