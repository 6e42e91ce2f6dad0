// SPDX-License-Identifier: Apache-2.0
// Sends the problems of tests/kernels through the service: creates the head, makes the calls, and checks the
// answers.
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

// The name of the head that is the teacher of rows with Problem::teacher.
inline constexpr char kTeacherName[] = "teacher";

// The opening message of microbatch `id` of step 0: all rows of `data`, with every output and gradient.
v1::OpenMicrobatch OpenFor(const std::string& head, const kernels::testing::Problem& problem,
                           const kernels::testing::SliceData& data, uint64_t id);

// The payload of a slice with these rows, with the teacher's hidden states if there is a teacher.
std::string PayloadOf(const kernels::testing::Problem& problem, const kernels::testing::SliceData& data,
                      int64_t begin, int64_t end);

// Sends rows [begin, end) of one microbatch in one call. All slices are sent before the first answer is read.
LossAnswers Stream(TestClient& client, v1::OpenMicrobatch open, const kernels::testing::Problem& problem,
                   const kernels::testing::SliceData& data, int64_t begin, int64_t end,
                   kernels::testing::Rng rng);

// Joins the answers of the calls of one microbatch. Checks their order, and that each row came once.
kernels::testing::SliceOutputs Collect(const kernels::testing::Problem& problem,
                                       const kernels::testing::SliceData& data,
                                       const std::vector<LossAnswers>& calls);

// Compares the head's gradients with the tolerances of tests/kernels/comparison.h for fp32.
void ExpectGradients(TestClient& client, const std::string& head, const kernels::HeadConfig& config,
                     const kernels::reference::ParamGradients& want, double max_abs_logit);

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_SERVICE_SERVICE_PROBLEM_H_
