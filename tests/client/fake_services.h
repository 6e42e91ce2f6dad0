// SPDX-License-Identifier: Apache-2.0
// The services of the fake server that keep the protocol's rules. `state` outlives them.
#ifndef LOSSD_TESTS_CLIENT_FAKE_SERVICES_H_
#define LOSSD_TESTS_CLIENT_FAKE_SERVICES_H_

#include <memory>

#include "lossd/v1/head.grpc.pb.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "tests/client/fake_state.h"

namespace lossd::fake {

std::unique_ptr<v1::LossService::Service> MakeLossService(FakeState* state);
std::unique_ptr<v1::HeadService::Service> MakeHeadService(FakeState* state);

}  // namespace lossd::fake

#endif  // LOSSD_TESTS_CLIENT_FAKE_SERVICES_H_
