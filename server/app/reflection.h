// SPDX-License-Identifier: Apache-2.0
// Which services a server has, for those who ask it.
#ifndef LOSSD_SERVER_APP_REFLECTION_H_
#define LOSSD_SERVER_APP_REFLECTION_H_

#include <grpcpp/server_builder.h>

namespace lossd::app {

// Gives the server gRPC's reflection service once, or not at all: it does not check who calls.
void SetReflection(bool wanted, grpc::ServerBuilder* builder);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_REFLECTION_H_
